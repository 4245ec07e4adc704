"""Runs whose phases have other data, batches, frozen units and learning rates, and runs that evaluate several sets."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import launch, read_log
from tests.distributed.small_run import manifest_entries, train, working_flags, write_working_files

START = {"--lr": 1e-2, "--lr-decay-style": "linear", "--train-iters": 4, "--seed": 3, "--dtype": "float64"}


def run(folder: Path, *switches: str, **changed: object) -> tuple[list[dict[str, Any]], str]:
    """Train on two ranks in the folder `run`; returns what was logged, if all went well, and what was said."""
    log = folder / "log.jsonl"
    places = {"--load": folder / "run", "--save": folder / "run", "--log-json": log}
    named = {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    log.unlink(missing_ok=True)
    done = launch({**working_flags(folder), **START, **places, **named, **dict.fromkeys(switches)}, num_ranks=2)
    return [] if any(done.exit_codes) else read_log(log), done.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small run, and beside its four samples two of text alone."""
    write_working_files(tmp_path)
    texts = [{"id": f"text {index}", "segments": manifest_entries()[index]["segments"][1:]} for index in range(2)]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "manifest.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in texts))
    return tmp_path


def test_phases_of_one_run(folder: Path) -> None:
    first, _ = run(folder)
    assert [entry["step"] for entry in first] == [1, 2, 3, 4]

    mixture = {"data_path": [0.75, folder / "data", 0.25, folder / "texts"], "global_batch_size": 4, "train_iters": 6}
    _, said = run(folder, **mixture)
    assert "it was trained with --global-batch-size 2, this run has 4" in said
    assert "add --new-phase to go on otherwise from here" in said

    second = {**mixture, "lr": 4e-3, "lr_decay_style": "cosine", "tokens_per_microbatch": 40}
    found, said = run(folder, "--new-phase", freeze="vision", exit_interval=5, **second)
    assert "a new phase begins after step 4, 8 samples" in said
    assert [entry["step"] for entry in found] == [5]
    assert found[0]["learning_rate"] == pytest.approx(4e-3, rel=0.02), "the schedule begins anew"
    assert found[0]["loss"] < first[0]["loss"], "the weights are those of the first phase"

    again, said = run(folder, "--new-phase", freeze="vision", **second)
    assert [entry["step"] for entry in again] == [6]
    assert "a new phase begins" not in said
    assert again[0]["learning_rate"] < found[0]["learning_rate"], "the same command goes on with the schedule"

    _, said = run(folder, "--new-phase", **{**second, "lr": 1e-3})
    assert "of --train-iters 6, 6 steps are done, which leaves 0 for a schedule" in said


def test_a_phase_in_two_runs_is_that_of_one(folder: Path) -> None:
    """Losses of a mixture of sequences that is interrupted are those without interruption, to 1e-9, whoever balances."""
    changed = {"data_path": [3, folder / "data", 1, folder / "texts"], "global_batch_size": 3}
    changed |= {"seq_length": 40, "packing_seq_length": 60}
    whole, _ = run(folder, **changed, save=folder / "whole", load=folder / "whole")
    for first, balance in ((0, "disttrain"), (2, "entrain")):
        part, _ = run(folder, **changed, exit_interval=2, balance=balance)
        assert [entry["step"] for entry in part] == [first + 1, first + 2]
        for entry, expected in zip(part, whole[first : first + 2], strict=True):
            assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-9)


def evaluations(log: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_log(log) if "evaluation" in entry]


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
