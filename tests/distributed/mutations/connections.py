"""Mutations of what a run connects to: producers that are none, and a launcher's nonsense."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from tests.distributed.mutations.mutation import Inputs, Mutation, short
from tests.distributed.small_run import NUM_RANKS

TOKEN = b"a secret of these tests"

ANSWERS = {
    "hangs up": b"",
    "speaks HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "sends zeros": b"\0" * 4096,
    "promises much": b"\xff" * 16,
    "sends a pickle": b"\x80\x04cos\nabort\n(tR.",
}
"""What a stranger sends to whoever connects, before it hangs up."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
TEXTS = ("", "-1", "text", "1.5", "9" * 12)


def connection_mutations() -> Iterator[Mutation]:
    """Name a producer that is none, or give all ranks or one of them another environment."""
    for name, answer in ANSWERS.items():
        apply = partial(_meet_stranger, answer=answer)
        yield Mutation(f"producer: {name}", apply, ("127.0.0.1",), must_be_refused=True)
    for name, address in {"nobody there": "127.0.0.1:1", "no port": "127.0.0.1", "no host": "no.such.host.invalid:80"}.items():
        apply = partial(_name_producer, address=address)
        yield Mutation(f"producer: {name}", apply, (address.split(":")[0],), must_be_refused=True)
    for token in ("no/such/file", "/dev/null", "."):
        apply = partial(_name_producer, address="127.0.0.1:1", token=token)
        yield Mutation(f"producer: token {token}", apply, (token,), must_be_refused=True)
    for variable in VARIABLES:
        for text in TEXTS:
            apply = partial(_set_variable, name=variable, text=text)
            yield Mutation(f"environment: {variable} {short(text)}", apply, (variable,), must_be_refused=True)


def _set_variable(inputs: Inputs, *, name: str, text: str) -> None:
    inputs.environment_of_rank = {rank: {name: text} for rank in range(NUM_RANKS)}


def _name_producer(inputs: Inputs, *, address: str, token: str | None = None) -> None:
    path = inputs.folder / "token"
    path.write_bytes(TOKEN)
    inputs.flags |= {"--producers": address, "--producer-token": token or path, "--num-workers": 1}


def _meet_stranger(inputs: Inputs, *, answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60.0)

    def serve() -> None:
        with listener, suppress(OSError):
            while True:
                met, _ = listener.accept()
                with met, suppress(OSError):
                    met.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    _name_producer(inputs, address=f"127.0.0.1:{listener.getsockname()[1]}")
