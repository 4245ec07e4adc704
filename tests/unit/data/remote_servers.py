"""Servers on the loopback address that show a folder: one of HTTP that counts requests and fails as it is told, and moto's S3."""

import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from multimodal.data import remote

BUCKET = "data"


class FolderServer(ThreadingHTTPServer):
    """Shows the files of a folder, by ranges of bytes, and lists of them."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.lock = folder, threading.Lock()
        self.requests: list[tuple[str, str, int]] = []
        """Method, path and the bytes that were sent."""
        self.failures: list[int] = []
        """Replies to the next reads: a status; 0: the connection ends; 1: half of the bytes; 2: the whole in place of a range."""
        self.overloaded = ""
        """The end of the paths of files that are never read."""
        self.meets: threading.Barrier | None = None
        """Reads of images and tars wait for each other there."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sent(self, name: str = "") -> int:
        return sum(size for method, path, size in self.requests if method == "GET" and path.endswith(name))

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: connections end as they were told to."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FolderServer

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, *, with_body: bool) -> None:
        path = self.server.folder / unquote(self.path).strip("/")
        if with_body and self.server.meets and path.suffix in (".png", ".tar"):
            self.server.meets.wait()
        with self.server.lock:
            failure = self.server.failures.pop(0) if with_body and self.server.failures else None
        if self.server.overloaded and self.path.endswith(self.server.overloaded):
            failure = 503
        if failure == 0:
            self._hang_up()
            return
        status, kind = 200, "application/octet-stream"
        if failure is not None and failure > 2:
            status, content = failure, b""
        elif path.is_dir():
            kind = "text/html"
            content = "".join(f'<a href="{each.name}">{each.name}</a>\n' for each in sorted(path.iterdir())).encode()
        elif path.is_file():
            content = path.read_bytes()
        else:
            status, content = 404, b""
        self.send_response(status)
        tag = f'"{path.stat().st_mtime_ns}"' if path.is_file() else ""
        if tag:
            self.send_header("ETag", tag)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and failure != 2:
            content = content[int(asked[1]) : int(asked[2]) + 1]
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        content = content[: len(content) // 2] if failure == 1 else content
        with self.server.lock:
            self.server.requests.append((self.command, self.path, len(content) if with_body else 0))
        if with_body:
            self.wfile.write(content)
        if failure == 1:
            self._hang_up()


@contextmanager
def serve_folder(folder: Path) -> Iterator[FolderServer]:
    server = FolderServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serve_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run moto's S3, which the environment names, with an empty bucket; gives its address for others than fsspec."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "of-no-one",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    remote._store.cache_clear()
    remote._known.cache_clear()
    s3_client().create_bucket(Bucket=BUCKET)
    try:
        yield f"s3://{BUCKET}"
    finally:
        server.stop()


def s3_client() -> object:
    import boto3

    return boto3.client("s3")


def upload(folder: Path) -> None:
    """Put the files of a folder into the bucket."""
    client = s3_client()
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), BUCKET, str(path.relative_to(folder)))
