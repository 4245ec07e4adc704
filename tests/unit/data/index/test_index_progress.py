"""Progress of indexing: a bar on a terminal, lines in a log, nothing on ranks that do not log."""

import io
import logging

import pytest
from rich.console import Console

from multimodal.data.index.index_progress import watch_indexing
from multimodal.data.index.sample_index import SampleIndex, build_index

BLOCKS = [build_index(["why"] * number) for number in (2, 1, 3)]


def watched(console: Console, seconds: list[float]) -> list[SampleIndex]:
    passing = iter(seconds)
    found = watch_indexing(iter(BLOCKS), path="data.json", console=console, clock=lambda: next(passing))
    return list(found)


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    console = Console(file=io.StringIO())
    assert watched(console, [0.0, 10.0, 31.0, 31.0, 40.0]) == BLOCKS
    assert caplog.messages == ["data.json: indexed 3 samples so far"]
    caplog.set_level(logging.WARNING)
    assert watched(console, []) == BLOCKS and len(caplog.messages) == 1


def test_a_terminal_gets_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown = io.StringIO()
    assert watched(Console(file=shown, force_terminal=True, width=80), []) == BLOCKS
    assert "indexing data.json: 6 samples" in shown.getvalue() and not caplog.messages
