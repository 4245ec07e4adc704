"""Producers whose work is done by threads of the test's process."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron.runtime.feed.producers.producer import Producer
from tests.unit.runtime.feed.producers.serving import Serving


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers work in threads in place of processes."""
    monkeypatch.setattr(Producer, "_make_pool", lambda self: ThreadPoolExecutor(self._num_workers))


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    """Start producers."""
    started: list[Serving] = []

    def start(**options: Any) -> Serving:
        started.append(Serving(**options))
        return started[-1]

    yield start
    for each in started:
        each.producer.close()
