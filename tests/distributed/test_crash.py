"""kill -9 of a rank that saves a checkpoint or writes a Hugging Face folder, at every point: what is there is whole, and loads.

Points are before each change of a folder's files, and where half of a file is written. Python tells of every file that is opened
to be written and of every name that changes before it happens (audit events). Bytes have no such event: where `os.fsync` or
`os.pwrite` is about to make them last, half of them are there at the point. The points of a save in the background are those of
the other, reached by another thread, while all values change.
"""

import gc
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.runtime import platform
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from multimodal.cost.layers.registry import read_model
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan

END_SECONDS = 120.0
"""Only a hang lasts as long."""
_EMPTIED = "os.rmdir"
"""With a relative name in the midst of `shutil.rmtree`: the files are removed, their folder is not."""
_NAMES_CHANGE = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
Write = Callable[..., None]
"""What both ranks of a world call with a function `arm` and other arguments; it calls `arm` where points begin to count."""


def run_until_killed(write: Write, arguments: tuple[object, ...], *, killed: int, point: int) -> str | None:
    """Let two forked ranks write, of which one dies at a point; returns the point's name.

    None if it came to its end before so many points.
    """
    with _two_ranks(write, arguments, rank=killed, point=point) as (ranks, told, _):
        name: str | None = told.get()
        if name is None:
            assert told.get() is None, "a rank dies, but not at a point"
            return None
        for rank in ranks:
            rank.join(END_SECONDS)
        codes = [rank.exitcode for rank in ranks]
        assert codes[killed] == -signal.SIGKILL, f"{name}: {codes}"
        assert codes[1 - killed] not in (0, None), f"{name}: the rank that is left goes on, or hangs: {codes}"
        return name


def keep_at_points(write: Write, arguments: tuple[object, ...], *, rank: int, keep: Callable[[int], object]) -> list[str]:
    """Let two forked ranks write to the end, and call `keep` with the number of each point of one of them, from 0.

    Meanwhile both stand still, so that the files are those which a death there would leave. Returns the names of all points.
    """
    names: list[str] = []
    with _two_ranks(write, arguments, rank=rank, point=None) as (ranks, told, go_on):
        num_ended = 0
        while num_ended < len(ranks):
            if (name := told.get()) is None:
                num_ended += 1
                continue
            other = ranks[1 - rank].pid
            os.kill(other, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(other, os.WUNTRACED)[1]), f"the other rank died before {name}"
            keep(len(names))
            names.append(name)
            os.kill(other, signal.SIGCONT)
            go_on.put(None)
    return names


@contextmanager
def _two_ranks(
    write: Write, arguments: tuple[object, ...], *, rank: int, point: int | None
) -> Iterator[tuple[list[Any], Any, Any]]:
    """Yield the processes, of which `rank` passes points, the queue of their names, in which None is the end of a rank, and the
    one that lets it go on."""
    context, folder = multiprocessing.get_context("fork"), TemporaryDirectory()
    told, go_on = context.SimpleQueue(), context.SimpleQueue()

    def run(number: int) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the error of a lost peer is expected
        gc.freeze()  # what is inherited from the parent takes longer to look through than a save
        torch.set_num_threads(1)
        platform.install()
        store = dist.FileStore(f"{folder.name}/store", 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=60))
        arm = (lambda folder: _arm(folder, told, go_on, point)) if number == rank else (lambda folder: None)
        write(arm, *arguments)
        told.put(None)
        signal.pause()  # who ends first would break the connections of the other

    ranks = [context.Process(target=run, args=(number,), daemon=True) for number in range(2)]
    for each in ranks:
        each.start()
    try:
        yield ranks, told, go_on
    finally:
        for each in ranks:
            each.kill()
            each.join()
        folder.cleanup()


def _arm(folder: Path, told: Any, go_on: Any, point: int | None) -> None:
    """Die at a point, or stand still at every one (None) until it may go on."""
    passed, lock = 0, threading.Lock()
    sync, write_at = os.fsync, os.pwrite

    def pass_point(name: str, halve: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        nonlocal passed
        with lock:  # also of threads that write in the background
            passed += 1
            if point is None or passed == point:
                with halve():
                    told.put(name)
                    if point is None:
                        go_on.get()
                    else:
                        os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR) and _is_below(values[0], folder):
            pass_point("open")
        elif event in _NAMES_CHANGE and (_is_below(values[0], folder) or (event == _EMPTIED and not os.path.isabs(values[0]))):
            pass_point(event)

    @contextmanager
    def halved(descriptor: int) -> Iterator[None]:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            yield
            return
        content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        os.ftruncate(descriptor, found.st_size // 2)
        yield
        write_at(descriptor, content[found.st_size // 2 :], found.st_size // 2)

    def fsync(descriptor: int) -> None:
        pass_point("fsync", lambda: halved(descriptor))
        sync(descriptor)

    def pwrite(descriptor: int, content: Any, position: int) -> int:
        def halve() -> AbstractContextManager[None]:
            write_at(descriptor, content[: len(content) // 2], position)
            return nullcontext()

        pass_point("pwrite", halve)
        return write_at(descriptor, content, position)

    os.fsync, os.pwrite = fsync, pwrite  # type: ignore[assignment]
    sys.addaudithook(hear)


def _is_below(path: Any, folder: Path) -> bool:
    return not isinstance(path, int) and os.fsdecode(path).startswith(str(folder))


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

    assert run_until_killed(save, arguments(1), killed=killed, point=3)
    names = keep_at_points(
        save, arguments(2), rank=killed, keep=lambda point: shutil.copytree(folder, tmp_path / "kept" / str(point))
    )
    check([tmp_path / "kept" / str(point) for point in range(len(names))], names, 2)
    assert {"open", "fsync"} <= set(names)
    assert killed == 1 or {"os.mkdir", "os.rename", "shutil.rmtree", "os.rmdir"} <= set(names)
    points = range(len(names)) if request.config.getoption("all") else [names.index("fsync"), len(names) - 1]
    for number, point in enumerate(points, start=3):
        died_at = run_until_killed(save, arguments(number), killed=killed, point=1 + point)
        assert died_at is not None
        check([folder], [died_at], number)


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
def test_a_killed_export_leaves_no_folder_by_half(tmp_path, killed, request):
    """From what is there at every point, and once more where a rank really died.

    That is at one point of every kind, and with --all at every point.
    """
    texts = pytest.importorskip("tests.distributed.test_hugging_face_runs", reason="transformers is not installed")
    source, target, kept = (tmp_path / name for name in ("source", "target", "kept"))
    texts.small_qwen2().save_pretrained(source, max_shard_size="9KB")
    target.mkdir()
    expected = {path.name: path.read_bytes() for path in source.iterdir()}

    def keep(point: int) -> None:
        if (target / "whole").exists():
            shutil.copytree(target / "whole", kept / str(point))

    names = keep_at_points(write, (source, target / "whole"), rank=killed, keep=keep)
    shutil.copytree(target / "whole", kept / "at the end")
    for folder in kept.iterdir():
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"point {folder.name} of {names}"
    assert {"pwrite", "fsync"} <= set(names)
    assert killed == 1 or {"os.mkdir", "open", "os.rename"} <= set(names)
    for point in range(len(names)) if request.config.getoption("all") else {names.index(name) for name in names}:
        folder = target / str(point)
        died_at = run_until_killed(write, (source, folder), killed=killed, point=1 + point)
        assert died_at is not None
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
