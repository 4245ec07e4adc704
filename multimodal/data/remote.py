"""Paths of data: files of this machine, or files at s3://, gs:// and http(s):// addresses, of which ranges of bytes are read.

fsspec speaks the protocols; credentials come from the environment, as its packages s3fs, gcsfs and aiohttp find them. A read that
fails for a reason that may pass is tried again, ever later; one that fails for good is a RemoteError. A file that is not there is
a FileNotFoundError, as on this machine.
"""

import hashlib
import importlib
import io
import logging
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from errno import ENOENT
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import quote, unquote

from multimodal.data.byte_cache import ByteCache
from multimodal.values.errors import ConfigError, DataError, RemoteError

_PACKAGES: Mapping[str, tuple[str, str]] = {
    "s3": ("s3fs", "braid[remote]"),
    "gs": ("gcsfs", "gcsfs"),
    "http": ("aiohttp", "braid[remote]"),
    "https": ("aiohttp", "braid[remote]"),
}
"""Protocol -> the package that speaks it, and what to install."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
BLOCK = 2**14
"""Bytes that are read at once of a file, if nobody says otherwise: enough for an image's header, or some of a tar's."""
AT_ONCE = 16
"""Requests that a process makes at the same time."""
_KNOWN_SECONDS = 60.0
"""Time for which a file is taken for what it was."""
_MOST_KNOWN = 2**16
_TIMEOUT_SECONDS = 60
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 16.0
"""Seconds before a failed read is tried again: doubled each time, up to the longest."""
_GONE = frozenset((404, 410))
_PASSING = frozenset((408, 425, 429))
"""Replies of HTTP below 500 that may be others when asked again."""
_CONNECTION_ERRORS = frozenset(("OSError", "ConnectionError", "ClientError", "HTTPClientError", "ResponseParserError"))
"""Classes of Python, aiohttp and botocore that errors of connections belong to."""
Value = TypeVar("Value")
Result = TypeVar("Result")


def user_cache(room: str) -> Path:
    """Return the user's cache folder for one kind of files: XDG_CACHE_HOME/braid, by default ~/.cache/braid."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "braid" / room


@dataclass(frozen=True)
class RemoteOptions:
    """The way in which remote files are read."""

    folder: Path | None = None
    """The folder of what is kept of them (`ByteCache`); None: the user's."""
    cache_mib: int = 8192
    """The most that is kept, in MiB."""
    retries: int = 8
    """Times that a read which failed is tried again."""

    @property
    def cache(self) -> ByteCache:
        """The ranges of bytes that this machine keeps."""
        return ByteCache(self.folder or user_cache("remote"), most_bytes=self.cache_mib * 2**20)


class RemoteStatus(NamedTuple):
    """Length and version of a remote file."""

    st_size: int
    version: str
    """Its entity tag, if the server tells one, else the time of its last change."""


@dataclass(frozen=True, order=True)
class RemotePath:
    """The address of a remote file or folder, with those methods of `pathlib.Path` that reading data takes."""

    address: str
    """Without a slash at its end; of http, quoted as in a URL."""
    options: RemoteOptions = field(default=RemoteOptions(), compare=False)

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> "RemotePath":
        return replace(self, address=f"{self.address}/{self._spelled(name, quote)}")

    @property
    def name(self) -> str:
        """The last part of the address, as a name."""
        return self._spelled(posixpath.basename(self.address), unquote)

    @property
    def parent(self) -> "RemotePath":
        """The folder."""
        return replace(self, address=posixpath.dirname(self.address))

    def is_relative_to(self, folder: "RemotePath") -> bool:
        """Return True if it lies in a folder, by its name."""
        return self.address.startswith(f"{folder.address}/") and ".." not in name_in(folder, self).split("/")

    def resolve(self) -> "RemotePath":
        """Return the same: there are no links."""
        return self

    absolute = resolve

    def is_file(self) -> bool:
        """Return True for a file; a page of a web server that lists a folder is none."""
        try:
            found = self._info()
        except FileNotFoundError:
            return False
        return found["type"] == "file" and found.get("mimetype") != "text/html"

    def is_dir(self) -> bool:
        """Return True for a folder with something in it; web servers that do not list folders seem to have none."""
        return not self.is_file() and bool([*self.iterdir()])

    def exists(self) -> bool:
        """Return True if there is something."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> "Iterator[RemotePath]":
        """Yield what is in a folder."""
        try:
            names = self._tried(lambda store: store.ls(f"{self.address}/", detail=False))
        except FileNotFoundError:
            return
        for name in sorted({each.rstrip("/").rpartition("/")[2] for each in names} - {"", self.name}):
            yield replace(self, address=f"{self.address}/{name}")

    def glob(self, pattern: str) -> "Iterator[RemotePath]":
        """Yield the files whose names match; the last part of a pattern alone may have wildcards."""
        folder, _, wanted = pattern.rpartition("/")
        yield from (each for each in (self / folder if folder else self).iterdir() if fnmatchcase(each.name, wanted))

    def stat(self) -> RemoteStatus:
        """Return length and version; raises FileNotFoundError."""
        found = self._info()
        names = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "updated")
        version = next((str(found[name]) for name in names if found.get(name)), "")
        if found.get("size") is None:
            raise RemoteError(f"{self}: the server does not say how long it is; put it where ranges of bytes can be read")
        return RemoteStatus(found["size"], version)

    def read_bytes(self) -> bytes:
        """Return the whole; raises FileNotFoundError."""
        return self.read_range(0, self.stat().st_size)

    def read_text(self) -> str:
        """Return the whole as text; raises FileNotFoundError."""
        return self.read_bytes().decode()

    def read_range(self, start: int, size: int) -> bytes:
        """Return bytes, by one request or from what is kept; raises FileNotFoundError."""
        if not size:
            return b""
        place = f"{self}\0{self.stat()}\0{start}\0{size}"
        key, cache = hashlib.blake2b(place.encode(), digest_size=16).hexdigest(), self.options.cache
        if (found := cache.get(key, size=size)) is None:
            found = self._tried(lambda store: store.cat_file(self.address, start=start, end=start + size))
            if len(found) != size:
                raise RemoteError(
                    f"{self}: {size} bytes from {start} on were asked for, and {len(found)} came; put it where ranges of bytes "
                    "can be read, and do not change it during a run"
                )
            cache.put(key, found)
        return found

    def open(self, mode: str = "rb", buffering: int = BLOCK) -> BinaryIO:
        """Open it for reading in blocks of about `buffering` bytes; raises FileNotFoundError."""
        return self.open_range(0, self.stat().st_size, block=buffering)

    def open_range(self, start: int, size: int, *, block: int = BLOCK) -> BinaryIO:
        """Open a part of it, as a file of its own; parts share small blocks, at whose end a file's header may be."""
        within = (0, self.stat().st_size) if block <= BLOCK else (start, start + size)
        return cast(BinaryIO, io.BufferedReader(_Range(self, range(start, start + size), range(*within), block), block))

    def _spelled(self, name: str, spell: Callable[[str], str]) -> str:
        return spell(name) if self.address.startswith("http") else name

    def _info(self) -> Mapping[str, Any]:
        known = _known(os.getpid())
        at, found = known.get(self.address, (-_KNOWN_SECONDS, {}))
        if time.monotonic() - at >= _KNOWN_SECONDS:
            found = self._tried(lambda store: store.info(self.address))
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[self.address] = time.monotonic(), found
        return found

    def _tried(self, ask: Callable[[Any], Result]) -> Result:
        """Return an answer, asking again after errors that may pass; raises RemoteError or FileNotFoundError."""
        store = _store(self.address.partition("://")[0], os.getpid())
        wait = _FIRST_WAIT * (1 + os.getpid() % 16 / 16)  # so that ranks do not come back all at once
        for left in range(self.options.retries, -1, -1):
            try:
                return ask(store)
            except Exception as raised:
                problem = raised
                if isinstance(raised, FileNotFoundError):  # that of fsspec for HTTP may have any cause
                    problem = raised.__cause__ if isinstance(raised.__cause__, Exception) else raised
                    if problem is raised or _status(problem) in _GONE:
                        raise FileNotFoundError(ENOENT, "there is no such file", str(self)) from raised
                reason = " ".join(str(problem).split()) or type(problem).__name__
                if not _may_pass(problem):
                    raise RemoteError(
                        f"{self}: cannot be read ({reason}); check the address, and that the environment has credentials that "
                        "may read it"
                    ) from problem
                if not left:
                    raise RemoteError(
                        f"{self}: cannot be read, tried {self.options.retries + 1} times ({reason}); start the run again when "
                        "the server answers, or raise --data-retries"
                    ) from problem
            time.sleep(min(wait, _LONGEST_WAIT))
            wait *= 2
        raise AssertionError


class _Range(io.RawIOBase):
    """A part of a remote file, read in blocks that begin at multiples of their size, of which the last is kept."""

    def __init__(self, path: RemotePath, part: range, within: range, block: int) -> None:
        """within: the bytes that blocks are cut out of."""
        self._path, self._part, self._within, self._block = path, part, within, block
        self._place, self._held_at, self._held = part.start, 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place - self._part.start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: self._part.start, io.SEEK_CUR: self._place, io.SEEK_END: self._part.stop}[whence]
        self._place = max(self._part.start, origin + offset)
        return self.tell()

    def readinto(self, buffer: Any) -> int:
        if self._place >= self._part.stop:
            return 0
        if not self._held_at <= self._place < self._held_at + len(self._held):
            start, block = self._within.start, self._block
            self._held_at = start + (self._place - start) // block * block
            last = max(self._held_at + block, start + (self._place - start + len(buffer)) // block * block)
            self._held = self._path.read_range(self._held_at, min(last, self._within.stop) - self._held_at)
        skipped = self._place - self._held_at
        found = self._held[skipped : skipped + min(len(buffer), self._part.stop - self._place)]
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)


DataPath = Path | RemotePath


def name_in(folder: DataPath, path: DataPath) -> str:
    """Return the path inside a folder that it lies in."""
    name = str(path).removeprefix(f"{folder}/")
    return path._spelled(name, unquote) if isinstance(path, RemotePath) else name


def is_address(path: str) -> bool:
    """Return True for addresses of any protocol."""
    return _ADDRESS.match(path) is not None


def data_path(path: "str | DataPath", options: RemoteOptions | None = None) -> DataPath:
    """Return the path of data; raises DataError for addresses of unknown protocols, ConfigError without what reads them."""
    if isinstance(path, Path | RemotePath) or (match := _ADDRESS.match(path)) is None:
        return path if isinstance(path, RemotePath) else Path(path)
    protocol, place = match[1].lower(), path[match.end() :].rstrip("/")
    if protocol not in _PACKAGES:
        raise DataError(f"{path[:60]}: unknown protocol '{protocol}'; use one of {', '.join(_PACKAGES)}, or a path of a file")
    package, wanted = _PACKAGES[protocol]
    if find_spec(package) is None:
        raise ConfigError(f"{path[:60]}: needs the package '{package}'; install it with: pip install '{wanted}'")
    if place.startswith("/") or not place:
        raise DataError(f"{path[:60]}: names no host or bucket; write it between '://' and the path")
    if "@" in place.partition("/")[0]:
        raise DataError(f"{protocol}://...: has a password in it; give that by the environment, such as in ~/.netrc")
    if protocol.startswith("http"):
        place = quote(place, safe="%/:=&?~+!$,;'@()*[]")
    return RemotePath(f"{protocol}://{place}", options or RemoteOptions())


def at_once(function: Callable[[Value], Result], values: Iterable[Value], *, among: "DataPath") -> list[Result]:
    """Return the results for all values, several at a time where the data are remote."""
    if isinstance(among, Path):
        return [function(value) for value in values]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(function, values)]


@lru_cache(maxsize=1)
def _known(process: int) -> dict[str, tuple[float, Mapping[str, Any]]]:
    """Address -> when this process asked for it, and what was told."""
    return {}


@lru_cache(maxsize=8)
def _store(protocol: str, process: int) -> Any:
    """Return what fsspec reads a protocol with; connections are those of one process, and retries are ours."""
    fsspec = importlib.import_module("fsspec")
    options: dict[str, Any] = {"skip_instance_cache": True}
    if protocol == "s3":
        for name in ("botocore", "aiobotocore"):  # which say where they found credentials
            logging.getLogger(name).setLevel(logging.WARNING)
        limits = {"connect_timeout": _TIMEOUT_SECONDS, "read_timeout": _TIMEOUT_SECONDS, "retries": {"total_max_attempts": 1}}
        options |= {"config_kwargs": limits, "listings_expiry_time": _KNOWN_SECONDS}
    if protocol.startswith("http"):
        limits = dict.fromkeys(("sock_connect", "sock_read"), _TIMEOUT_SECONDS)
        timeout = importlib.import_module("aiohttp").ClientTimeout(total=None, **limits)
        options |= {"encoded": True, "headers": {"Accept-Encoding": "identity"}}
        options |= {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    store = fsspec.filesystem(protocol, **options)
    if protocol == "s3":
        store.retries = 1
    return store


def _may_pass(problem: BaseException) -> bool:
    """Return True for errors of connections, and for replies of a server that is overloaded or being repaired."""
    if (status := _status(problem)) is not None:
        return status >= 500 or status in _PASSING
    names = {base.__name__ for base in type(problem).__mro__}
    return bool(names & _CONNECTION_ERRORS) and not isinstance(problem, PermissionError)


def _status(problem: BaseException) -> int | None:
    """Return the server's reply in an error of aiohttp or botocore, or in its cause."""
    for each in (problem, problem.__cause__):
        response = getattr(each, "response", None)
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        if (found := found or getattr(each, "status", None)) is not None:
            return int(found)
    return None
