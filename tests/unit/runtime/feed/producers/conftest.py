"""A producer in the process of a test, whose work is done by threads."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron.runtime.feed.producers.producer import Producer
from multimodal.data.chat.text_settings import TextSettings
from multimodal.values.model_graph import ModelGraph

TOKEN = b"0123456789abcdef"
SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}
IMAGE = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096}
GRAPH = ModelGraph.from_dict(
    {"units": {"vision": {"role": "encoder", **SHAPE, "image": IMAGE}, "llm": {"role": "backbone", **SHAPE}}}
)
TEXTS = TextSettings("ByteTokenizer")


class Serving:
    """A producer in this process, whose decoding threads a test may hold."""

    def __init__(self, token: bytes = TOKEN, cache_bytes: int = 2**20) -> None:
        self.producer = Producer(token=token, num_workers=2, cache_bytes=cache_bytes)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self.producer.serve, args=(self.listener,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.producer.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(20)

    def close_after(self, most: int) -> list[int]:
        """Let it answer so many requests, and end at the next; returns a list with the number of requests so far."""
        answer, asked = self.producer._answer, [0]

        async def answer_some(*arguments: Any) -> None:
            asked[0] += 1
            if asked[0] > most:
                self.producer.close()
                return
            await answer(*arguments)

        self.producer._answer = answer_some  # type: ignore[method-assign]
        return asked


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers work in threads in place of processes."""
    monkeypatch.setattr(Producer, "_make_pool", lambda self: ThreadPoolExecutor(self._num_workers))


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(**options: Any) -> Serving:
        started.append(Serving(**options))
        return started[-1]

    yield start
    for each in started:
        each.producer.close()
