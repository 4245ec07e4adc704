"""A run that starts from another's weights: anew at step 0, and taken up by the very same command when it is started again."""

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.runtime.checkpoint.claim import MARK_NAME, Writer
from tests.distributed.launch import launch
from tests.distributed.small_run import working_flags, write_working_files

PRETRAINED_STEPS = 4


def run(folder: Path, log: Path, *flags: object) -> tuple[list[dict[str, Any]], str]:
    """Train on two ranks; returns what is in the log, which a run that was requeued goes on with, and what was said."""
    base = {**working_flags(folder), "--lr": 1e-2, "--log-json": log, "--train-iters": PRETRAINED_STEPS}
    done = launch({**base, **dict(zip(flags[::2], flags[1::2], strict=True))}, num_ranks=2)
    assert done.exit_codes == (0, 0), done.output
    return [json.loads(line) for line in log.read_text().splitlines()], done.output


def leave_mark_of_a_killed_run(folder: Path) -> None:
    """As kill -9 does, which nobody can clean up after."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / MARK_NAME).write_text(json.dumps(asdict(replace(Writer.of_this_process({}), process=ended.pid))))


def test_weights_are_taken_over_and_the_run_can_be_requeued(tmp_path: Path) -> None:
    """Other data order, batch size, precision and mask; the weights are those that were trained, and step and optimizer new."""
    write_working_files(tmp_path)
    pretrained = tmp_path / "pretrained"
    before, _ = run(tmp_path, tmp_path / "before.jsonl", "--save", pretrained)

    other = ("--seed", 5, "--global-batch-size", 4, "--dtype", "float64", "--attention-mask", "embedded", "--train-iters", 4)
    fresh, _ = run(tmp_path, tmp_path / "fresh.jsonl", *other)
    finetune = (*other, "--finetune", None, "--load", pretrained, "--save", tmp_path / "tuned")
    log = tmp_path / "tuned.jsonl"
    first, said = run(tmp_path, log, *finetune, "--exit-interval", 2)
    assert f"starting at step 0 from the weights of {pretrained / 'step_00000004'}" in said
    assert [entry["step"] for entry in first] == [1, 2]
    assert first[0]["loss"] < 0.9 * fresh[0]["loss"]
    assert first[0]["loss"] < 0.9 * before[0]["loss"]

    leave_mark_of_a_killed_run(tmp_path / "tuned")
    requeued, said = run(tmp_path, log, *finetune)
    assert "holds step_00000002: going on from there, not from the weights in" in said
    assert [entry["step"] for entry in requeued] == [1, 2, 3, 4]
    assert not (tmp_path / "tuned" / MARK_NAME).exists()

    folder = tmp_path / "in one go"
    start = ("--pretrained-checkpoint", pretrained, "--load", folder, "--save", folder)
    whole, _ = run(tmp_path, tmp_path / "whole.jsonl", *other, *start)
    assert [entry["loss"] for entry in whole] == [entry["loss"] for entry in requeued]
    assert sorted(path.name for path in pretrained.iterdir()) == ["step_00000004"], "what it started from was changed"
