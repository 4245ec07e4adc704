"""What goes wrong with a checkpoint ends every rank with the same message, and costs nothing that was saved."""

import io
import os
import pickle
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.runtime.checkpoint import folder as checkpoint_folder
from megatron.runtime.checkpoint import storage
from megatron.runtime.checkpoint.checkpoint import BackgroundSave
from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from megatron.runtime.checkpoint.manifest import read_newest, write_manifest
from multimodal.values.errors import CheckpointError
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

GRAPH = build_graph()
CASE = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 1), llm=(1, 1, 1)))
BACKGROUND = replace(CASE, saves_in_background=True)


def save_steps(case: TrainingCase, folder: Path, steps: list[int], keep_last: int = 5) -> None:
    training = Training(case)
    for step in steps:
        training.fill(float(step))
        training.save(folder, step=step, keep_last=keep_last)
    training.finish_saving()


def load(case: TrainingCase, folder: Path, load_optimizer: bool = True) -> tuple[int, set[float]]:
    training = Training(case)
    return training.load(folder, load_optimizer=load_optimizer).step, training.found()


def error_of(action: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*args)
    return str(caught.value)


load_error, save_steps_error = (partial(error_of, each) for each in (load, save_steps))


SAVING = "saving step 2 to {folder} failed on rank {rank}: OSError: [Errno 28] No space left on device; "
SAVING += "earlier checkpoints are untouched"
COPYING = "copying step 2 for {folder} failed on rank {rank}: RuntimeError: no memory is left"
FULL, NO_MEMORY = OSError(28, "No space left on device"), RuntimeError("no memory is left")
SAVES: dict[str, tuple[Any, str, int, Exception, str]] = {
    "disk full on rank 1": (storage, "write_tensors", 1, FULL, SAVING),
    "disk full on rank 0": (storage, "write_index", 0, FULL, SAVING),
    "no room for a folder": (checkpoint_folder, "hidden_folder", 0, FULL, SAVING),
    "rename fails": (checkpoint_folder, "sync_folder", 0, FULL, SAVING),
    "planning fails": (storage, "offer_pieces", 1, FULL, SAVING),
    "no memory for a copy": (BackgroundSave, "_copy", 1, NO_MEMORY, COPYING),
}
"""Failures while step 2 is saved: the function, the rank on which it raises, the problem, and the message of all ranks."""


def save_error(case: TrainingCase, folder: Path, failure: str) -> str:
    owner, name, rank, problem, _ = SAVES[failure]
    training = Training(case)

    def save() -> None:
        training.save(folder, step=2)
        if training.background is not None and training.background._thread is not None:
            training.background._thread.join()
            training.background.check()

    if dist.get_rank() != rank:
        return error_of(save)
    with mock.patch.object(owner, name, side_effect=problem):
        return error_of(save)


def the_only(messages: list[str]) -> str:
    assert len(set(messages)) == 1
    return messages[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_there(ranks, tmp_path):
    message = the_only(run(ranks, load_error, CASE, tmp_path / "nowhere"))
    assert message == f"{tmp_path / 'nowhere'}: no such folder; correct --load, or leave it out to start anew"
    (tmp_path / ".step_00000003.partial-elsewhere-5").mkdir()
    assert "no complete checkpoint there (no folder step_<number>)" in the_only(run(ranks, load_error, CASE, tmp_path))


def edit(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        path = checkpoint / file
        path.write_bytes(change(path.read_bytes()))

    return damage


def change_random_state(**state: Any) -> Callable[[Path], None]:
    """No state: all of it is left out."""

    def damage(checkpoint: Path) -> None:
        path, manifest = read_newest(checkpoint.parent)
        write_manifest(path, replace(manifest, random_state={**manifest.random_state, **state} if state else {}))

    return damage


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


ANOTHERS, NO_STATE = "rank_00001.bin does not hold what was written (the checksum of ", "its random_state cannot be restored"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        edit("rank_00000.bin", lambda content: content[: len(content) // 2]),
        "rank_00000.bin has {half} bytes instead of {size}",
    ),
    "a file removed": (lambda checkpoint: (checkpoint / "rank_00001.bin").unlink(), "rank_00001.bin is missing"),
    "a bit flipped": (edit("rank_00001.bin", flip_a_bit), ANOTHERS),
    "a shard of another step": (
        lambda checkpoint: shutil.copy(checkpoint.parent / "step_00000001" / "rank_00001.bin", checkpoint),
        ANOTHERS,
    ),
    "no random state": (change_random_state(), NO_STATE),
    "numbers that are no random state": (change_random_state(python=[3, [1], None]), NO_STATE),
    "a text that is no random state": (change_random_state(python="import os"), NO_STATE),
    "bytes that are no random state": (change_random_state(torch="AAAA"), NO_STATE),
}
"""What happens to a checkpoint, and what is said of it; tests/unit/runtime/checkpoint has more of its manifest and index."""


def test_a_damaged_checkpoint_names_the_file_and_the_one_before_it(ranks, tmp_path):
    run(ranks, save_steps, CASE, tmp_path, [1, 2])
    newest, copy = tmp_path / "step_00000002", tmp_path / "copy"
    shutil.copytree(newest, copy)
    size = (newest / "rank_00000.bin").stat().st_size
    for name, (damage, found) in DAMAGES.items():
        damage(newest)
        message = the_only(run(ranks, load_error, CASE, tmp_path))
        assert message.startswith(f"{newest} is damaged: {found.format(half=size // 2, size=size)}"), (name, message)
        assert message.endswith(f"move {newest} away, and the one before it, {tmp_path / 'step_00000001'}, is loaded"), name
        shutil.rmtree(newest)
        shutil.copytree(copy, newest)
    assert run(ranks, load, CASE, tmp_path) == [(2, {2.0})] * 2
    newest.rename(tmp_path / "damaged")
    assert run(ranks, load, CASE, tmp_path) == [(1, {1.0})] * 2
    DAMAGES["truncated"][0](tmp_path / "step_00000001")
    message = the_only(run(ranks, load_error, CASE, tmp_path))
    assert "it is the only one there; restore it from a copy, or start anew without --load" in message


class Planted:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_nothing_that_a_checkpoint_holds_is_executed(ranks, tmp_path):
    """Whatever file a stranger replaced, and whether or not what was said of its size was, too."""
    saved, mark = tmp_path / "saved", tmp_path / "executed"
    run(ranks, save_steps, CASE, saved, [1])
    checkpoint = saved / "step_00000001"
    contents = {file: file.read_bytes() for file in checkpoint.iterdir()}
    assert {file.name for file in contents} == {"braid.json", "tensors.json", "rank_00000.bin", "rank_00001.bin"}
    poison = pickle.dumps(Planted(mark))
    for file, content in contents.items():
        for planted in (poison, poison.ljust(len(content), b"\0"), _as_torch_saves(Planted(mark)).ljust(len(content), b"\0")):
            file.write_bytes(planted)
            assert f"{checkpoint} is damaged: {file.name} " in the_only(run(ranks, load_error, CASE, saved))
        file.write_bytes(content)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (checkpoint / name).write_bytes(poison)
    assert run(ranks, load, CASE, saved) == [(1, {1.0})] * 2
    assert not mark.exists()
    pickle.loads(poison)
    assert mark.exists(), "the planted object does nothing, so nothing was tried"


def _as_torch_saves(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


ANOTHER_MODEL = "pass the model file that it was trained with, or another folder to --load"
ON_ONE_RANK = Plan({"llm": UnitPlan((Replica((Stage((0,), ((0, len(GRAPH.backbone.layers)),)),)),))})
OTHERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "width": (
        {"graph": build_graph(hidden_size=32)},
        ("model.units.llm.hidden_size is 16 in the checkpoint and 32 in this run", ANOTHER_MODEL),
    ),
    "tied embeddings": (
        {"graph": build_graph(tied=True)},
        ("model.units.llm.untie_embeddings_and_output_weights is True in the checkpoint and False", ANOTHER_MODEL),
    ),
    "units": (
        {"graph": replace(GRAPH, units=GRAPH.units[1:], edges=()), "plan": ON_ONE_RANK},
        ("model.units.vision is only in the checkpoint", ANOTHER_MODEL),
    ),
    "vocabulary": (
        {"vocab_size": 40},
        ("model.llm.layers.0.word_embeddings.weight has shape [36, 16] but this run needs [40, 16]",),
    ),
    "precision": ({"dtype": torch.bfloat16}, ("it was trained with --dtype float32, this run has bfloat16", "--no-load-optim")),
}
"""What a run has otherwise than the checkpoint, and what is said of it."""


def test_a_checkpoint_of_another_run(ranks, tmp_path):
    run(ranks, save_steps, CASE, tmp_path, [1])
    for name, (changes, words) in OTHERS.items():
        message = the_only(run(ranks, load_error, replace(CASE, **changes), tmp_path))
        assert all(each in message for each in words), (name, message)
    path, manifest = read_newest(tmp_path)
    write_manifest(path, replace(manifest, dtype="\x1b[2J\n"))
    message = the_only(run(ranks, load_error, CASE, tmp_path))
    assert "it was trained with --dtype \\x1b[2J\\n, this run has float32" in message, "control characters are not passed on"


@pytest.mark.parametrize(
    ("failure", "in_background"), [*((failure, True) for failure in SAVES), *((failure, False) for failure in list(SAVES)[:-1])]
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(ranks, tmp_path, failure, in_background):
    case = BACKGROUND if in_background else CASE
    run(ranks, save_steps, case, tmp_path, [1])
    message = the_only(run(ranks, save_error, case, tmp_path, failure))
    assert SAVES[failure][-1].format(folder=tmp_path, rank=SAVES[failure][2]) in message
    assert names(tmp_path) == ["step_00000001"]
    assert run(ranks, load, CASE, tmp_path) == [(1, {1.0})] * 2


def test_a_folder_that_cannot_be_made(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    message = the_only(run(ranks, save_steps_error, CASE, tmp_path / "file" / "checkpoints", [1]))
    assert "failed on rank 0: NotADirectoryError" in message


@pytest.mark.parametrize("case", [CASE, BACKGROUND], ids=["at once", "in the background"])
def test_only_the_newest_are_kept(ranks, tmp_path, case):
    run(ranks, save_steps, case, tmp_path, [10, 20, 30, 40], 2)
    assert names(tmp_path) == ["step_00000030", "step_00000040"]


def test_what_dead_saves_left_is_removed_and_what_others_write_is_not(ranks, tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    dead = tmp_path / f".step_00000003.partial-{host}-{ended.pid}"
    old = tmp_path / ".step_00000002.removed-another-host-7"
    alive = [tmp_path / f".step_00000003.partial-{host}-{os.getpid()}", tmp_path / ".step_00000004.partial-another-host-7"]
    for folder in (dead, old, *alive):
        folder.mkdir()
    os.utime(old, (0, 0))
    run(ranks, save_steps, CASE, tmp_path, [5])
    assert set(names(tmp_path)) == {"step_00000005", *(folder.name for folder in alive)}
    assert find_newest_checkpoint(tmp_path) == tmp_path / "step_00000005"
