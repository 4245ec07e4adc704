"""What ranks and producers set on their sockets: ZeroMQ encrypts, and admits only keys that follow from the run's token."""

import hmac
from typing import NamedTuple

from multimodal.values.errors import ConfigError

try:
    import zmq
    from zmq.utils import z85
except ImportError as problem:
    raise ConfigError(
        "producers need the package 'pyzmq', on both sides; install it with: pip install braid[producers]"
    ) from problem

HANDSHAKE_SECONDS = 10.0
"""Time for all of the handshake, however many bytes a peer sends meanwhile."""
_BEAT_SECONDS, _BEATLESS_SECONDS = 3, 12
"""Time between signs of life, and without one until a connection ends; libzmq gives them, whatever the process computes."""


class Keys(NamedTuple):
    """A side's keys (in Z85), and the public one of the other side."""

    secret: bytes
    public: bytes
    other: bytes


def derive_keys(token: bytes, *, is_producer: bool) -> Keys:
    """Return the keys of one side, which follow from the token alone."""
    secrets = [z85.encode(hmac.digest(token, name, "sha256")) for name in (b"rank", b"producer")]
    publics = [zmq.curve_public(secret) for secret in secrets]
    return Keys(secrets[is_producer], publics[is_producer], publics[not is_producer])


def set_options(socket: zmq.Socket, keys: Keys, *, most_bytes: int) -> None:
    """Set keys and limits; most_bytes: largest part of a message that the other side may send."""
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * _BEAT_SECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * _BEATLESS_SECONDS)
