"""Weights of samples in the loss, and the mean over samples: the same under any plan, and what their formula says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.launch import read_log
from tests.distributed.small_run import LEFT_OUT, SIZED_OTHERWISE, losses, manifest_entries, train, write_working_files

TOGETHER = {"--global-batch-size": 4, "--micro-batch-size": 4}


def evaluate(folder: Path, entries: list[dict[str, Any]], **flags: object) -> float:
    (folder / "data" / "manifest.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    batch = {"--global-batch-size": len(entries), "--micro-batch-size": len(entries)}
    train(folder, {"--split": "0,1", "--skip-train": None, "--eval-iters": 1, **batch, **flags}, num_ranks=1)
    (entry,) = read_log(folder / "log.jsonl")
    loss: float = entry["loss"]
    return loss


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, Any]]:
    write_working_files(tmp_path)
    found = manifest_entries()
    for index, entry in enumerate(found):
        entry["segments"][1]["text"] += " again" * index
        entry["loss_weight"] = 1 + index / 2
    return found


def test_the_loss_is_the_weighted_mean(entries, tmp_path):
    """Of the means of single samples, which are evaluated one by one; a sample has a token for each letter, and its end."""
    alone = [evaluate(tmp_path, [entry]) for entry in entries]
    for average, counts in (("tokens", [len(entry["segments"][1]["text"]) + 1 for entry in entries]), ("samples", [1] * 4)):
        weights = [entry["loss_weight"] * count for entry, count in zip(entries, counts, strict=True)]
        joined = {"--seq-length": 90, "--packing-seq-length": 90, "--global-batch-size": 2, "--micro-batch-size": 1}
        for flags in ({}, joined):  # the same samples, in two sequences
            found = evaluate(tmp_path, entries, **{"--loss-average": average}, **flags)
            assert found == pytest.approx(np.average(alone, weights=weights), rel=0, abs=1e-9), average


def test_weighted_training_is_the_same_under_any_plan(entries, tmp_path):
    """And so are the losses of two data sets, of which the second counts half: those of new weights on one alone."""
    parts = {name: entries[first : first + 2] for first, name in ((0, "charts"), (2, "maps"))}
    alone = {f"{name}.jsonl": evaluate(tmp_path, part, **{"--loss-average": "samples"}) for name, part in parts.items()}
    for name, part in parts.items():
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in part))
    flags: dict[str, object] = {**TOGETHER, "--loss-average": "samples"}
    flags |= {"--data-path": [tmp_path / "data" / name for name in alone], "--sample-loss-weight": [1, 0.5]}
    spread = {"--micro-batch-size": 1, "--vision-tp": 2, "--llm-pp": 2, "--num-workers": 1, "--sequence-parallel": None}
    shared = {"--micro-batch-size": 2, "--llm-cp": 2, "--lengths-from": "decode", "--num-workers": LEFT_OUT}
    trained = [train(tmp_path, flags | how, num_ranks=ranks) for how, ranks in (({}, 2), (spread, 4), (shared, 3))]
    runs, outputs = zip(*trained, strict=True)
    values = [[(entry["loss"], entry["grad_norm"]) for entry in run] for run in runs]
    for found in values[1:]:
        assert [pytest.approx(each, rel=0, abs=1e-9) for each in values[0]] == found
    for run in runs:
        assert run[0]["data_set_losses"] == pytest.approx(alone, rel=0, abs=1e-9)
    weights = [
        sum(entry["loss_weight"] for entry in part) * weight for part, weight in zip(parts.values(), (1, 0.5), strict=True)
    ]
    assert runs[0][0]["loss"] == pytest.approx(np.average(list(alone.values()), weights=weights), rel=0, abs=1e-9)
    assert f"loss by data set: charts.jsonl {runs[0][-1]['data_set_losses']['charts.jsonl']:.4f}, maps" in outputs[0].output


ALIKE = {"--train-iters": 4, "--lr-decay-style": "cosine", "--min-lr": 1e-4, "--lr-warmup-iters": 1, "--lr": 1e-2}
RATES = {"--vision-lr": 3e-3, "--projector-lr": 3e-2, "--vision-projector-weight-decay": 0.5, "--llm-weight-decay": 0.0}
RATES |= {"--vision-lr-warmup-iters": 3, "--vision-projector-lr-warmup-iters": 0}
SHARED = {"--data-parallel-sharding-strategy": "optim_grads_params", "--reduce-gradients-once": None, "--micro-batch-size": 1}
PLANS = {
    "tp and dp": {"--vision-tp": 2, "--llm-dp": 2, "--micro-batch-size": 1},
    "zero 3": {"--vision-dp": 2, "--llm-dp": 2, **SHARED},
    "shared ranks": {**SIZED_OTHERWISE, "--llm-tp": 2, "--colocate-units": None},
}


def losses_of_one_process(folder: Path) -> tuple[Path, list[float], list[float]]:
    """The folder of the data, which is random, and the losses with and without `RATES`."""
    return folder, losses(folder, ALIKE | RATES, num_ranks=1), losses(folder, ALIKE, num_ranks=1)


@pytest.mark.deep(when=lambda plan: plan != "zero 3")
@pytest.mark.parametrize("plan", PLANS)
def test_rates_are_those_of_one_process_under_any_plan(plan, once, tmp_path):
    folder, alone, with_one_rate = once(losses_of_one_process)
    assert alone != with_one_rate
    num_ranks = 2 if plan == "shared ranks" else 4
    flags = {**ALIKE, **RATES, **PLANS[plan], "--log-json": tmp_path / "log.jsonl"}
    assert losses(folder, flags, num_ranks=num_ranks) == pytest.approx(alone, rel=0, abs=1e-9)
