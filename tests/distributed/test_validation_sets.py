"""--valid-data-path and --save-best: sets by name, whose losses are those of the same samples held out, and the best weights."""

import json
from pathlib import Path
from typing import Any

from tests.distributed.launch import launch
from tests.distributed.small_run import train, working_flags, write_working_files


def evaluations(log: Path) -> list[dict[str, Any]]:
    return [entry for line in log.read_text().splitlines() if "evaluation" in (entry := json.loads(line))]


def test_sets_are_evaluated_by_name_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    """A learning rate that is too high makes the last step the worst; a resumed run knows the best of before."""
    write_working_files(tmp_path)
    manifest, other, saved, log = (tmp_path / name for name in ("data/manifest.jsonl", "data/two.jsonl", "saved", "log.jsonl"))
    other.write_text("".join(manifest.read_text().splitlines(keepends=True)[:2]))
    base = {"--eval-iters": 2}
    sets = {"--valid-data-path": [f"all={manifest}", other], "--eval-interval": 1, "--save": saved, "--load": saved}
    flags = {**base, **sets, "--save-best": "loss", "--lr-decay-style": "constant", "--train-iters": 4}
    train(tmp_path, {**flags, "--lr": 0.01, "--exit-interval": 3})
    _, done = train(tmp_path, {**flags, "--lr": 5.0, "--new-phase": None})
    found = evaluations(log)
    assert [(entry["step"], entry["evaluation"]) for entry in found] == [(4, "all"), (4, "two")]
    assert "the best loss" not in done.output

    best = json.loads((next((saved / "best").iterdir()) / "braid.json").read_text())["run_state"]["best_loss"]
    assert best < found[0]["loss"]
    skipped = {**base, "--split": "0,1", "--skip-train": None, "--finetune": None}
    train(tmp_path, {**skipped, "--load": saved / "best"})
    (held_out,) = evaluations(log)
    assert abs(held_out["loss"] - best) < 1e-9 and held_out["evaluation"] == "held out"
    train(tmp_path, {**skipped, "--load": saved, "--valid-data-path": f"two={other}"})
    assert [(entry["evaluation"], round(entry["loss"], 9)) for entry in evaluations(log)] == [
        ("held out", round(found[0]["loss"], 9)),
        ("two", round(found[1]["loss"], 9)),
    ]


def test_sets_with_one_name_and_sets_that_are_missing_are_errors(tmp_path: Path) -> None:
    write_working_files(tmp_path)
    for words, message in (
        (["a=x.jsonl", "a=y.jsonl"], "every set needs a name of its own, other than 'held out'; write NAME=PATH"),
        (["a=gone.jsonl"], "--valid-data-path gone.jsonl: gone.jsonl: no such manifest"),
    ):
        done = launch({**working_flags(tmp_path), "--eval-iters": 1, "--valid-data-path": words}, num_ranks=2)
        assert all(done.exit_codes) and message in done.output and "Traceback" not in done.output, done.output
