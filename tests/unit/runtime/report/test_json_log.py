"""The log for programs: what a resumed run keeps of it, and what a full disk does to it."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.runtime.report.json_log import JsonLog
from multimodal.values.errors import ConfigError


def entry(step: int) -> dict[str, object]:
    return {"step": step, "loss": 1 / step, "text": "x" * 20}


def write(path: Path, steps: range, *, keep_until: int = 0) -> None:
    log = JsonLog(path, keep_until=keep_until)
    for step in steps:
        log.append(entry(step))
    log.close()


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond; the system then refuses to write as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_new_run_starts_anew_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    write(path, range(1, 4))
    write(path, range(1, 6))
    assert read(path) == [entry(step) for step in range(1, 6)]
    log = JsonLog(path, keep_until=3)
    assert [kept["step"] for kept in log.kept] == [1, 2, 3]
    log.append(entry(4))
    assert read(path) == [entry(step) for step in range(1, 5)]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 4, "lo',
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]\n",
        b'{"loss": 1}\n',
        b'{"step": "4", "loss": 1}\n',
        b'{"step": 2}\n',
    ],
)
def test_what_is_no_entry_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """The last line of a run that was killed, and whatever else got in."""
    path = tmp_path / "log.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes() + torn)
    write(path, range(4, 6), keep_until=3)
    assert read(path) == [entry(step) for step in range(1, 6)]


def test_a_line_that_does_not_fit_is_undone(tmp_path: Path) -> None:
    """When there is room again, later lines follow whole ones."""
    path = tmp_path / "log.jsonl"
    log = JsonLog(path, keep_until=0)
    log.append(entry(1))
    with room_for(path.stat().st_size + 10), pytest.raises(OSError) as problem:
        log.append(entry(2))
    assert problem.value.errno == errno.EFBIG
    log.append(entry(3))
    assert read(path) == [entry(1), entry(3)]


def test_a_link_keeps_leading_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "log.jsonl")
    write(tmp_path / "log.jsonl", range(1, 4))
    write(tmp_path / "link.jsonl", range(3, 5), keep_until=2)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert read(tmp_path / "log.jsonl") == [entry(step) for step in range(1, 5)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
def test_a_device_is_written_to_and_not_replaced() -> None:
    log = JsonLog(Path("/dev/full"), keep_until=2)
    with pytest.raises(OSError) as problem:
        log.append(entry(3))
    assert problem.value.errno == errno.ENOSPC
    assert Path("/dev/full").is_char_device()


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path, tmp_path / "file" / "log.jsonl", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=f"--log-json {wrong}: cannot be written .*; give another path"):
            JsonLog(wrong, keep_until=0)
