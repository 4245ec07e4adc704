"""The store of an elastic run, of whose values only those count that someone wrote who knows the run's token."""

import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from os import fsencode
from pathlib import Path

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from megatron.runtime.launch.shared_token import HOW, check_token, read_token
from multimodal.values.errors import ConfigError

logger = logging.getLogger(__name__)
TOKEN_VARIABLE = "BRAID_ELASTIC_TOKEN"
"""Environment variable with the token, as supervisors hand it to ranks."""
_SEAL_BYTES = 64
"""Bytes of a value before what it says: HMAC-SHA256, in hexadecimal digits."""


class SealedStore:
    """A store's keys below a prefix. Values that nobody of the run wrote under their key are as good as not there.

    Counters (`add`) are numbers of the store's own, and cannot be sealed.
    """

    def __init__(self, store: Store, token: bytes, prefix: str) -> None:
        self._store, self._token, self._prefix = store, token, prefix
        self._has_warned = False

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._store.set(self._name(key), self._seal(key, value))

    def find(self, key: str) -> bytes | None:
        """Return a value; None if it is not there, or forged."""
        return self._open(key, self._store.get(self._name(key))) if self.is_written(key) else None

    def get(self, key: str) -> bytes:
        """Return a value that is there; raises DistStoreError if it is not."""
        found = self.find(key)
        if found is None:
            raise DistStoreError(f"the store has no value of this run at {self._name(key)}")
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all of these values are there."""
        return all(self.find(key) is not None for key in keys)

    def is_written(self, key: str) -> bool:
        """Return True if anyone has written a value, forged or not."""
        return bool(self._store.check([self._name(key)]))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until anyone has written these values; raises DistStoreError after the timeout."""
        self._store.wait([self._name(key) for key in keys], timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._store.add(self._name(key), amount))

    def first_to_set(self, key: str, value: str) -> bytes:
        """Set a value unless it is there, and return what is there now."""
        sealed, expected = self._seal(key, value), b""
        while True:
            found = self._store.compare_set(self._name(key), expected, sealed)  # type: ignore[arg-type]  # it takes bytes, too
            told = self._open(key, found)
            if told is not None:
                return told
            expected = found  # forged: to be replaced

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _digest(self, key: str, said: bytes) -> bytes:
        return hmac.digest(self._token, self._name(key).encode() + b"\0" + said, "sha256").hex().encode()

    def _seal(self, key: str, value: str) -> str:
        return self._digest(key, value.encode()).decode() + value

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        seal, said = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if hmac.compare_digest(seal, self._digest(key, said)):
            return said
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ignored what the store has at %s, as it was written without the token of this run: by a supervisor with "
                "another --token, by another run, or by a stranger who reaches the store's port",
                self._name(key),
            )
        return None


def find_token(path: Path | None, environ: Mapping[str, str], *, makes_one: bool) -> bytes:
    """Return the token in a file, or else in the environment, or else a new one; raises ConfigError.

    makes_one: True if all who need the token get it from this process.
    """
    if path is not None:
        return read_token(path, flag="--token")
    if TOKEN_VARIABLE in environ:
        return check_token(fsencode(environ[TOKEN_VARIABLE]), where=TOKEN_VARIABLE)
    if makes_one:
        return secrets.token_hex().encode()
    raise ConfigError(f"supervisors that share a store need a token that all of them know: --token FILE; {HOW}")
