"""kill -9 of a rank that saves a checkpoint or writes a Hugging Face folder, at every point: what is there is whole, and loads.

Points are before each change of a folder's files, and where half of a file is written. Python tells of every file that is opened
to be written and of every name that changes before it happens (audit events). Bytes have no such event: where `os.fsync` or
`os.pwrite` is about to make them last, half of them are there at the point. The points of a save in the background are those of
the other, reached by another thread, while all values change.
"""

import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.runtime.hugging_face.save_weights import save_hugging_face
from megatron.runtime.launch.meeting import wait_until
from multimodal.cost.layers.registry import read_model
from tests.distributed.launch import HANG_SECONDS, state_of
from tests.distributed.rank_pool import RankError, RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan

_EMPTIED = "os.rmdir"
"""With a relative name in the midst of `shutil.rmtree`: the files are removed, their folder is not."""
_NAMES_CHANGE = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
Write = Callable[..., None]
"""What both ranks of a world call with a function `arm` and other arguments; it calls `arm` where points begin to count."""


@dataclass(frozen=True)
class Die:
    """Dies at a point, whose name it leaves in a file."""

    point: int
    told: Path

    def __call__(self, number: int, name: str, others: Sequence[int]) -> None:
        if number == self.point:
            self.told.write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Keep:
    """Copies the files that a death would leave, into a folder by the point's number, while the others stand still."""

    folder: Path
    kept: Path

    def __call__(self, number: int, name: str, others: Sequence[int]) -> None:
        for other in others:
            freeze(other)
        if self.folder.exists():
            shutil.copytree(self.folder, self.kept / str(number))
        for other in others:
            os.kill(other, signal.SIGCONT)


def freeze(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    assert wait_until(lambda: state_of(process) == "T", seconds=HANG_SECONDS, pause_seconds=0.001)


def pass_points(write: Write, arguments: tuple[object, ...], rank: int, meet: Die | Keep) -> list[str]:
    """Write, as one of the ranks; `rank` meets every point, from 0. Returns the names of all that it passed."""
    processes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    others, names = [process for process in processes if process != os.getpid()], list[str]()

    def met(name: str) -> None:
        meet(len(names), name, others)
        names.append(name)

    with ExitStack() as stack:
        write(lambda folder: stack.enter_context(points(folder, met)) if dist.get_rank() == rank else None, *arguments)
        dist.barrier()
    return names


hears: Callable[[str, tuple[Any, ...]], None] | None = None
"""Is told of this process's events: a hook cannot be taken away."""


@cache
def add_hook() -> None:
    sys.addaudithook(lambda event, values: hears(event, values) if hears is not None else None)


@contextmanager
def points(folder: Path, met: Callable[[str], None]) -> Iterator[None]:
    """Call `met` with the name of each point, while the files are those that a death there would leave."""
    lock, sync, write_at = threading.Lock(), os.fsync, os.pwrite

    def hear(event: str, values: tuple[Any, ...]) -> None:
        is_written = event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR) and _is_below(values[0], folder)
        is_emptied = event == _EMPTIED and not os.path.isabs(values[0])
        if is_written or (event in _NAMES_CHANGE and (is_emptied or _is_below(values[0], folder))):
            with lock:  # also of threads that write in the background
                met(event)

    def fsync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size if stat.S_ISREG(os.fstat(descriptor).st_mode) else 0
        content = Path(f"/proc/self/fd/{descriptor}").read_bytes() if size else b""
        with lock:
            if size:
                os.ftruncate(descriptor, size // 2)
            met("fsync")
            if size:
                write_at(descriptor, content[size // 2 :], size // 2)
        sync(descriptor)

    def pwrite(descriptor: int, content: Any, position: int) -> int:
        with lock:
            write_at(descriptor, content[: len(content) // 2], position)
            met("pwrite")
        return write_at(descriptor, content, position)

    add_hook()
    with patch.object(os, "fsync", fsync), patch.object(os, "pwrite", pwrite), patch(f"{__name__}.hears", hear):
        yield


def _is_below(path: Any, folder: Path) -> bool:
    return not isinstance(path, int) and os.fsdecode(path).startswith(str(folder))


def kill_at(ranks: RankPool, point: int, write: Write, arguments: tuple[object, ...], *, killed: int) -> str:
    """Let two ranks write, of which one dies at a point; returns the point's name."""
    with TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        with pytest.raises(RankError) as caught:
            ranks.run(pass_points, write, arguments, killed, Die(point, told), world_size=2)
        assert f"rank {killed}: the process died" in str(caught.value)
        assert f"rank {1 - killed}: Traceback" in str(caught.value), "the rank that is left goes on, or hangs"
        return told.read_text()


GRAPH = build_graph(tied=True)
SAVED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 2), llm=(2, 1, 1), colocated=True))
LOADED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 1), llm=(1, 1, 1), colocated=True))


@pytest.mark.deep(when=lambda killed, in_background: killed or in_background)
@pytest.mark.parametrize("in_background", [False, True], ids=["in the foreground", "in the background"])
@pytest.mark.parametrize("killed", [0, 1])
def test_the_newest_complete_checkpoint_always_loads(ranks, tmp_path, request, killed, in_background):
    """Beside what a save left that died before: from the files of every point, and once more where a rank really died.

    That is at the first half of a file and at the last point, and with --all at every point.
    """
    case, folder = replace(SAVED, saves_in_background=in_background), tmp_path / "checkpoints"

    def arguments(number: int) -> tuple[object, ...]:
        return case, folder, 2 * number

    def check(folders: list[Path], names: list[str], number: int) -> None:
        ((found),) = ranks.run(load, LOADED, folders, world_size=1)
        for (step, values), name in zip(found, names, strict=True):
            assert step in (2 * number, 2 * number + 1), f"step {step} is the newest after {name}"
            assert values == {float(step)}, f"step {step} mixes several saves after {name}"

    assert kill_at(ranks, 2, save, arguments(1), killed=killed)
    kept = tmp_path / "kept"
    names = ranks.run(pass_points, save, arguments(2), killed, Keep(folder, kept), world_size=2)[killed]
    check([kept / str(point) for point in range(len(names))], names, 2)
    assert {"open", "fsync"} <= set(names)
    assert killed == 1 or {"os.mkdir", "os.rename", "shutil.rmtree", "os.rmdir"} <= set(names)
    points = range(len(names)) if request.config.getoption("all") else [names.index("fsync"), len(names) - 1]
    for number, point in enumerate(points, start=3):
        check([folder], [kill_at(ranks, point, save, arguments(number), killed=killed)], number)


def save(arm: Callable[[Path], None], case: TrainingCase, folder: Path, step: int) -> None:
    """Save a step, and then the next one twice, as after a resumption; every parameter and moment is the step's number."""
    training = Training(case)
    training.train_step(0)
    training.fill(float(step), with_moments=True)
    training.save(folder, step=step)
    training.finish_saving()
    dist.barrier()
    arm(folder)
    for _ in range(2):
        training.fill(float(step + 1), with_moments=True)
        training.save(folder, step=step + 1)
        training.fill(-1.0, with_moments=True)
    training.finish_saving()


def load(case: TrainingCase, folders: list[Path]) -> list[tuple[int, set[float]]]:
    """The steps that are the newest in folders, and all values that each has."""
    training = Training(case)
    training.train_step(0)
    found = []
    for folder in folders:
        training.fill(-1.0, with_moments=True)
        found.append((training.load(folder).step, training.found(with_moments=True)))
    return found


@pytest.mark.deep(when=lambda killed: killed == 1)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_export_leaves_no_folder_by_half(ranks, tmp_path, killed, request):
    """From what is there at every point, and once more where a rank really died.

    That is at one point of every kind, and with --all at every point.
    """
    texts = pytest.importorskip("tests.distributed.test_hugging_face_runs", reason="transformers is not installed")
    source, target, kept = (tmp_path / name for name in ("source", "target", "kept"))
    texts.small_qwen2().save_pretrained(source, max_shard_size="9KB")
    target.mkdir()
    expected = {path.name: path.read_bytes() for path in source.iterdir()}

    names = ranks.run(pass_points, write, (source, target / "whole"), killed, Keep(target / "whole", kept), world_size=2)[killed]
    shutil.copytree(target / "whole", kept / "at the end")
    for folder in kept.iterdir():
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"point {folder.name} of {names}"
    assert {"pwrite", "fsync"} <= set(names)
    assert killed == 1 or {"os.mkdir", "open", "os.rename"} <= set(names)
    for point in range(len(names)) if request.config.getoption("all") else {names.index(name) for name in names}:
        folder = target / str(point)
        died_at = kill_at(ranks, point, write, (source, folder), killed=killed)
        if folder.exists():
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"{died_at} (point {point})"


def write(arm: Callable[[Path], None], source: Path, target: Path) -> None:
    """Write a folder, as one of two tensor parallel ranks."""
    from tests.distributed.hugging_face_comparison import FromFolder, case_of
    from tests.distributed.hugging_face_models import TEXTS

    session = FromFolder(source).session(case_of(read_model(source), TEXTS, {"llm": (2, 1, 1)}))
    dist.barrier()
    arm(target.parent)
    save_hugging_face(target, session=session, like=source)
