"""Runs whose images are decoded by tools/producer.py: the same losses as without, also when a producer is killed."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from multimodal.data.index.index_cache import FOLDER_NAME
from tests.distributed.launch import Forked, Launched, launch
from tests.distributed.small_run import working_flags, write_working_files

NUM_RANKS, NUM_STEPS = 3, 10
TENSOR_PARALLEL = ("--vision-tp", 2, "--balance", "orchmllm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_working_files(tmp_path)
    (tmp_path / "token").write_text("a secret of these tests")
    return tmp_path


class _Process:
    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        flags = ("--listen", "127.0.0.1:0", "--num-workers", "1", "--token", str(folder / "token"))
        self.process = Forked("tools/producer.py", flags, environment, output=Path(tempfile.mkstemp(dir=folder)[1]))
        while "producer listens at" not in self.process.said:
            assert self.process.poll() is None, self.process.said
            time.sleep(0.02)
        self.address = self.process.said.split()[3].rstrip(",")


@contextmanager
def producer(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[_Process]:
    found = _Process(folder, environment)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait(30)


def train(folder: Path, name: str, *flags: object, **options: object) -> Launched:
    common = {**working_flags(folder), "--train-iters": NUM_STEPS, "--dtype": "float64", "--log-json": folder / name}
    common["--num-workers"] = 1
    pairs = [item for pair in common.items() for item in pair]
    return launch([*pairs, *TENSOR_PARALLEL, *flags], num_ranks=NUM_RANKS, **options)  # type: ignore[arg-type]


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / name).read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_losses_are_the_same_with_producers_and_when_they_are_killed(folder: Path) -> None:
    """Two serve, and index the data first; one is killed after some steps, the other some steps later."""
    alone = train(folder, "alone.jsonl")
    assert not any(alone.exit_codes), alone.output
    (index,) = folder.glob(f"**/{FOLDER_NAME}/*")
    expected = {path.name: path.read_bytes() for path in index.iterdir()}
    shutil.rmtree(index)
    with ExitStack() as stack:
        first, second = (stack.enter_context(producer(folder)) for _ in range(2))

        def kill(processes: Sequence[int]) -> None:
            for count, each in ((2, first), (5, second)):
                deadline = time.monotonic() + 100
                while not (folder / "log.jsonl").exists() or len(losses(folder, "log.jsonl")) < count:
                    assert time.monotonic() < deadline, "training did not go on"
                    time.sleep(0.02)
                each.process.kill()

        named = ("--producers", f"{first.address},{second.address}", "--producer-token", folder / "token")
        found = train(folder, "log.jsonl", *named, meanwhile=kill)
    assert not any(found.exit_codes), found.output
    assert found.output.count(f"producer {second.address} is done without") >= 1
    assert losses(folder, "log.jsonl") == pytest.approx(losses(folder, "alone.jsonl"), rel=0, abs=1e-12)
    assert len(losses(folder, "log.jsonl")) == NUM_STEPS
    assert {path.name: path.read_bytes() for path in index.iterdir()} == expected


def test_a_run_without_its_producer_ends_at_the_start(folder: Path) -> None:
    found = train(folder, "log.jsonl", "--producers", "127.0.0.1:9", "--producer-token", folder / "token")
    assert all(found.exit_codes)
    assert "--producers 127.0.0.1:9: " in found.output and "start it with python tools/producer.py --listen" in found.output
