"""What goes wrong with a checkpoint ends every rank with the same message, and costs nothing that was saved."""

import io
import os
import pickle
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.runtime.checkpoint import checkpoint as saving
from megatron.runtime.checkpoint import folder as checkpoint_folder
from megatron.runtime.checkpoint.background_save import BackgroundSave
from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from megatron.runtime.checkpoint.manifest import read_newest, write_manifest
from multimodal.values.errors import CheckpointError
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

GRAPH = build_graph()
CASE = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 1), llm=(1, 1, 1)))
BACKGROUND = replace(CASE, saves_in_background=True)


def save_steps(case: TrainingCase, folder: Path, steps: list[int], keep_last: int = 5) -> None:
    """Save with every parameter at the step's number."""
    training = Training(case)
    for step in steps:
        fill(training, float(step))
        training.save(folder, step=step, keep_last=keep_last)
    training.finish_saving()


def load(case: TrainingCase, folder: Path, load_optimizer: bool = True) -> tuple[int, set[float]]:
    """The loaded step and the values found in the parameters."""
    training = Training(case)
    step = training.load(folder, load_optimizer=load_optimizer).step
    parameters = [parameter for stage in training.session.stages.values() for parameter in stage.parameters()]
    return step, {value for parameter in parameters for value in parameter.detach().unique().tolist()}


def error_of(action: Callable[..., Any], *args: Any) -> str:
    """The CheckpointError that an action ends in."""
    with pytest.raises(CheckpointError) as caught:
        action(*args)
    return str(caught.value)


def load_error(case: TrainingCase, folder: Path) -> str:
    return error_of(load, case, folder)


def save_error(case: TrainingCase, folder: Path, failure: str) -> str:
    """Plant a failure on one rank while step 2 is saved."""
    target = {
        "disk full on rank 1": (saving, "write_tensors", 1),
        "disk full on rank 0": (saving, "write_index", 0),
        "rename fails": (checkpoint_folder, "sync_folder", 0),
        "planning fails": (saving, "offer_pieces", 1),
    }
    owner, name, rank = target[failure]
    training = Training(case)

    def save() -> None:
        training.save(folder, step=2)
        if training.background is not None and training.background._thread is not None:
            training.background._thread.join()
            training.background.check()

    if dist.get_rank() != rank:
        return error_of(save)
    with mock.patch.object(owner, name, side_effect=OSError(28, "No space left on device")):
        return error_of(save)


def fill(training: Training, value: float) -> None:
    with torch.no_grad():
        for stage in training.session.stages.values():
            for parameter in stage.parameters():
                parameter.fill_(value)


def the_only(messages: list[str]) -> str:
    assert len(set(messages)) == 1
    return messages[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_there(ranks: RankPool, tmp_path: Path) -> None:
    message = the_only(run(ranks, load_error, CASE, tmp_path / "nowhere"))
    assert message == f"{tmp_path / 'nowhere'}: no such folder; correct --load, or leave it out to start anew"
    (tmp_path / ".step_00000003.partial-elsewhere-5").mkdir()
    assert "no complete checkpoint there (no folder step_<number>)" in the_only(run(ranks, load_error, CASE, tmp_path))


def truncate(checkpoint: Path) -> str:
    file = checkpoint / "rank_00000.bin"
    size_bytes = file.stat().st_size
    os.truncate(file, size_bytes // 2)
    return f"rank_00000.bin has {size_bytes // 2} bytes instead of {size_bytes}"


def remove_file(checkpoint: Path) -> str:
    (checkpoint / "rank_00001.bin").unlink()
    return "rank_00001.bin is missing"


def cut_manifest(checkpoint: Path) -> str:
    os.truncate(checkpoint / "braid.json", 100)
    return "braid.json cannot be used"


@pytest.mark.parametrize("damage", [truncate, remove_file, cut_manifest])
def test_a_damaged_checkpoint_names_the_file_and_the_one_before_it(ranks: RankPool, tmp_path: Path, damage: Any) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1, 2])
    newest = tmp_path / "step_00000002"
    found = damage(newest)
    message = the_only(run(ranks, load_error, CASE, tmp_path))
    assert message.startswith(f"{newest} is damaged: {found}")
    assert message.endswith(f"move {newest} away, and the one before it, {tmp_path / 'step_00000001'}, is loaded")
    newest.rename(tmp_path / "damaged")
    assert run(ranks, load, CASE, tmp_path) == [(1, {1.0})] * 2


def test_the_only_checkpoint_is_damaged(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1])
    truncate(tmp_path / "step_00000001")
    message = the_only(run(ranks, load_error, CASE, tmp_path))
    assert "it is the only one there; restore it from a copy, or start anew without --load" in message


def flip_a_bit(checkpoint: Path) -> str:
    file = checkpoint / "rank_00001.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return "rank_00001.bin does not hold what was written (the checksum of "


def take_a_shard_of_another_step(checkpoint: Path) -> str:
    shutil.copy(checkpoint.parent / "step_00000001" / "rank_00001.bin", checkpoint)
    return "rank_00001.bin does not hold what was written (the checksum of "


def take_the_index_of_another_step(checkpoint: Path) -> str:
    shutil.copy(checkpoint.parent / "step_00000001" / "tensors.json", checkpoint)
    return "tensors.json "


def take_the_manifest_of_another_step(checkpoint: Path) -> str:
    shutil.copy(checkpoint.parent / "step_00000001" / "braid.json", checkpoint)
    return "braid.json is of step 1, which the folder's name does not say"


DAMAGES = [flip_a_bit, take_a_shard_of_another_step, take_the_index_of_another_step, take_the_manifest_of_another_step]


def test_what_has_the_right_size_and_was_not_written_there(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1, 2])
    newest, copy = tmp_path / "step_00000002", tmp_path / "copy"
    shutil.copytree(newest, copy)
    for damage in DAMAGES:
        found = damage(newest)
        message = the_only(run(ranks, load_error, CASE, tmp_path))
        assert message.startswith(f"{newest} is damaged: {found}")
        assert message.endswith(f"and the one before it, {tmp_path / 'step_00000001'}, is loaded")
        shutil.rmtree(newest)
        shutil.copytree(copy, newest)
    assert run(ranks, load, CASE, tmp_path) == [(2, {2.0})] * 2


@pytest.mark.parametrize("state", [{}, {"python": [3, [1], None]}, {"python": "import os"}, {"torch": "AAAA"}])
def test_a_random_state_that_is_none(ranks: RankPool, tmp_path: Path, state: dict[str, Any]) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1])
    path, manifest = read_newest(tmp_path)
    write_manifest(path, replace(manifest, random_state={**manifest.random_state, **state} if state else {}))
    assert f"{path} is damaged: its random_state cannot be restored" in the_only(run(ranks, load_error, CASE, tmp_path))


def test_messages_do_not_pass_control_characters_on(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1])
    path, manifest = read_newest(tmp_path)
    write_manifest(path, replace(manifest, dtype="\x1b[2J\n"))
    assert "it was trained with --dtype \\x1b[2J\\n, this run has float32" in the_only(run(ranks, load_error, CASE, tmp_path))


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_nothing_that_a_checkpoint_holds_is_executed(ranks: RankPool, tmp_path: Path) -> None:
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


def test_an_older_checkpoint_loads_by_its_own_folder(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1, 2])
    assert run(ranks, load, CASE, tmp_path / "step_00000001") == [(1, {1.0})] * 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (build_graph(hidden_size=32), "model.units.llm.hidden_size is 16 in the checkpoint and 32 in this run"),
        (build_graph(tied=True), "model.units.llm.untie_embeddings_and_output_weights is True in the checkpoint and False"),
        (replace(GRAPH, units=GRAPH.units[1:], edges=()), "model.units.vision is only in the checkpoint"),
    ],
)
def test_another_model(ranks: RankPool, tmp_path: Path, other: Any, words: str) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1])
    plan = CASE.plan if len(other.units) == 2 else Plan({"llm": llm_on_one_rank()})
    message = the_only(run(ranks, load_error, TrainingCase(other, plan), tmp_path))
    assert words in message
    assert "pass the model file that it was trained with, or another folder to --load" in message


def llm_on_one_rank() -> UnitPlan:
    return UnitPlan((Replica((Stage((0,), ((0, len(GRAPH.backbone.layers)),)),)),))


def test_another_vocabulary(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1])
    message = the_only(run(ranks, load_error, replace(CASE, vocab_size=40), tmp_path))
    assert "model.llm.layers.0.word_embeddings.weight has shape [36, 16] but this run needs [40, 16]" in message


def test_another_precision(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [1])
    message = the_only(run(ranks, load_error, replace(CASE, dtype=torch.bfloat16), tmp_path))
    assert "it was trained with --dtype float32, this run has bfloat16" in message
    assert "--no-load-optim" in message


@pytest.mark.parametrize("case", [CASE, BACKGROUND], ids=["at once", "in the background"])
@pytest.mark.parametrize("failure", ["disk full on rank 1", "disk full on rank 0", "rename fails", "planning fails"])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    ranks: RankPool, tmp_path: Path, failure: str, case: TrainingCase
) -> None:
    run(ranks, save_steps, case, tmp_path, [1])
    message = the_only(run(ranks, save_error, case, tmp_path, failure))
    assert f"saving step 2 to {tmp_path} failed on rank" in message
    assert "No space left on device" in message
    assert "earlier checkpoints are untouched" in message
    assert names(tmp_path) == ["step_00000001"]
    assert run(ranks, load, CASE, tmp_path) == [(1, {1.0})] * 2


def test_a_folder_that_cannot_be_made(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = the_only(run(ranks, save_anywhere, CASE, tmp_path / "file" / "checkpoints"))
    assert "failed on rank 0: NotADirectoryError" in message


def save_anywhere(case: TrainingCase, folder: Path) -> str:
    training = Training(case)
    return error_of(lambda: training.save(folder, step=1))


def test_no_memory_for_a_copy_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    message = the_only(run(ranks, copy_error, BACKGROUND, tmp_path))
    assert message == f"copying step 2 for {tmp_path} failed on rank 1: RuntimeError: no memory is left"
    assert names(tmp_path) == []


def copy_error(case: TrainingCase, folder: Path) -> str:
    training = Training(case)
    problem = RuntimeError("no memory is left") if dist.get_rank() == 1 else None
    with mock.patch.object(BackgroundSave, "_copy", side_effect=problem, return_value=[]):
        return error_of(lambda: training.save(folder, step=2))


@pytest.mark.parametrize("case", [CASE, BACKGROUND], ids=["at once", "in the background"])
def test_only_the_newest_are_kept(ranks: RankPool, tmp_path: Path, case: TrainingCase) -> None:
    run(ranks, save_steps, case, tmp_path, [10, 20, 30, 40], 2)
    assert names(tmp_path) == ["step_00000030", "step_00000040"]


def test_later_steps_of_another_run_are_not_removed(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [90])
    run(ranks, save_steps, CASE, tmp_path, [10, 20], 1)
    assert names(tmp_path) == ["step_00000020", "step_00000090"]


def test_a_step_saved_again_replaces_itself(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, save_steps, CASE, tmp_path, [5])
    run(ranks, save_step_with, CASE, tmp_path, 5, 7.0)
    assert names(tmp_path) == ["step_00000005"]
    assert run(ranks, load, CASE, tmp_path) == [(5, {7.0})] * 2


def save_step_with(case: TrainingCase, folder: Path, step: int, value: float) -> None:
    training = Training(case)
    fill(training, value)
    training.save(folder, step=step)


def test_what_dead_saves_left_is_removed_and_what_others_write_is_not(ranks: RankPool, tmp_path: Path) -> None:
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
