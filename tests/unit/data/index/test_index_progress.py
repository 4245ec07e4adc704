"""Progress of indexing: a bar on a terminal, lines in a log, nothing on ranks that do not log."""

import io
import logging

import pytest
from rich.console import Console

from multimodal.data.index.index_progress import watch_indexing


def watched(console: Console, seconds: list[float]) -> list[int]:
    passing = iter(seconds)
    found = watch_indexing(iter(range(3)), path="data.json", console=console, clock=lambda: next(passing))
    return list(found)


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    console = Console(file=io.StringIO())
    assert watched(console, [0.0, 10.0, 31.0, 31.0, 40.0]) == [0, 1, 2]
    assert caplog.messages == ["data.json: indexed 2 samples so far"]
    caplog.set_level(logging.WARNING)
    assert watched(console, []) == [0, 1, 2] and len(caplog.messages) == 1


def test_a_terminal_gets_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown = io.StringIO()
    assert watched(Console(file=shown, force_terminal=True, width=80), []) == [0, 1, 2]
    assert "indexing data.json: 3 samples" in shown.getvalue() and not caplog.messages
