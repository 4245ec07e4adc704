"""`--plan auto` as a user runs it: it trains as one process does, keeps what it found, and goes on under a better plan."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.runtime.checkpoint.claim import MARK_NAME, Writer
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.model_graph import ModelGraph
from tests.distributed import small_run
from tests.distributed.launch import Launched, launch, read_log
from tests.distributed.small_run import SIZED_OTHERWISE, working_flags, write_working_files

NUM_STEPS, STEPS_OF_TWO_RUNS = 5, 7
BAD = "plan: vision tp 1 x pp 1 x dp 1"
AUTO = {"--plan": "auto", "--plan-time-budget": 0.2, "--plan-trial-iters": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan-auto")
    write_working_files(made)
    return made


def train(
    folder: Path, more: Mapping[str, object], *, num_ranks: int = 2, num_steps: int = NUM_STEPS, plans_itself: bool = True
) -> tuple[Launched, list[float]]:
    flags = {"--train-iters": num_steps, "--global-batch-size": 4, "--lr-decay-style": "constant", "--no-progress-bar": None}
    flags |= (SIZED_OTHERWISE | AUTO if plans_itself else {}) | more
    entries, launched = small_run.train(folder, flags, num_ranks=num_ranks, environment={"XDG_CACHE_HOME": str(folder / "cache")})
    return launched, [entry["loss"] for entry in entries]


@pytest.fixture(scope="module")
def one_process(folder: Path) -> list[float]:
    return train(folder, {}, num_ranks=1, num_steps=STEPS_OF_TWO_RUNS, plans_itself=False)[1]


def test_a_run_plans_by_itself_once_and_changes_a_plan_that_turns_out_bad(folder: Path, one_process: list[float]) -> None:
    first, losses = train(folder, {"--plan-review-iters": 3})
    assert losses == pytest.approx(one_process[:NUM_STEPS], rel=0, abs=1e-9)
    for said in (
        "plan auto: of 4 samples",
        "links as measured now",
        "layers profiled in",
        "predicted: ",
        "why: the shortest step",
    ):
        assert first.outputs[0].count(said) == first.output.count(said) == 1, first.output
    assert first.output.count("plan review after step 3: a step takes ") == 1

    plant_bad_plan(folder, as_second=True)
    second, losses = train(folder, {"--plan-review-iters": 0, "--plan-trial-iters": 1})
    assert f"plan trial: 1 steps are done; as many under {BAD}, llm" in second.output, second.output
    assert "under the second; going on under the " in second.output, second.output
    assert losses == pytest.approx(one_process[:NUM_STEPS], rel=0, abs=1e-9)
    assert "links as kept" in second.output and "layers as kept" in second.output and "(as planned before)" in second.output
    assert "plan review" not in second.output

    assert not json.loads(kept_choice(folder).read_text())["second"], "the trial's result is not kept"
    planted = plant_bad_plan(folder)
    third, losses = train(folder, {"--plan-review-iters": 2, "--replan": None, "--save": folder / "saved"})
    assert losses == pytest.approx(one_process[:NUM_STEPS], rel=0, abs=1e-9)
    assert f"{BAD}, llm" in third.output, "the planted plan is not taken"
    assert "plan review after step 2: " in third.output and "; going on under it" in third.output, third.output
    assert "plan review after step 4: " in third.output and "; under the plan before it took " in third.output, third.output
    chosen = json.loads(kept_choice(folder).read_text())
    assert (chosen["plan"], chosen["flags"]) != (planted["plan"], planted["flags"])

    fourth, losses = train(folder, {"--plan-review-iters": 2, "--load": folder / "saved"}, num_steps=STEPS_OF_TWO_RUNS)
    assert losses == pytest.approx(one_process[NUM_STEPS:], rel=0, abs=1e-9)
    assert "(as planned before)" in fourth.output and chosen["lines"][0] in fourth.output, fourth.output
    assert f"plan review after step {STEPS_OF_TWO_RUNS}: a step takes " in fourth.output, fourth.output


def kept_choice(folder: Path) -> Path:
    (kept,) = (folder / "cache" / "braid" / "choices").iterdir()
    return kept


def plant_bad_plan(folder: Path, *, as_second: bool = False) -> dict[str, Any]:
    """Put a plan in the place of the one that was kept, or behind it, whose encoder waits for most of a step."""
    graph = ModelGraph.from_file(folder / "model.yaml")
    sizes = {"vision": UnitSizes(data_parallel_size=1), "llm": UnitSizes(data_parallel_size=1)}
    kept: dict[str, Any] = json.loads(kept_choice(folder).read_text())
    choice = kept | {"second": None}
    choice["plan"] = plan_disaggregated(graph, sizes=sizes, world_size=2).to_dict()
    choice["flags"] = choice["flags"] | {"schedule": "gpipe", "passes": [], "balance": "none", "micro_batch_size": 1}
    choice["text"] = json.dumps(choice["plan"])  # which is YAML, too
    choice["lines"] = [f"{BAD}, llm tp 1 x pp 1 x dp 1", *kept["lines"][1:]]
    kept_choice(folder).write_text(json.dumps(kept | {"second": choice} if as_second else choice))
    return choice


@pytest.mark.parametrize(
    ("flags", "of_rank_1", "message"),
    [
        ({"--llm-tp": 3}, {}, "unit 'llm': tensor parallel size 3 is fixed, but it must divide the 2 GPUs of a node"),
        ({"--cluster": "{folder}/model.yaml"}, {}, "model.yaml"),
        ({}, {"--lr": 0.1}, "rank 1 was started with --lr 0.1, rank 0 with --lr 0.001"),
        (
            {},
            {"--plan": None, "--vision-dp": 1, "--llm-dp": 1},
            "rank 1 was started without --plan auto, rank 0 with --plan auto",
        ),
    ],
)
def test_what_is_wrong_ends_all_ranks(folder: Path, flags: dict[str, object], of_rank_1: dict[str, object], message: str) -> None:
    common = {name: value for name, value in working_flags(folder).items() if name not in ("--vision-dp", "--llm-dp")} | flags
    by_rank = {rank: {**common, "--plan": "auto", **own} for rank, own in enumerate(({}, of_rank_1))}
    given = {
        rank: [str(part).format(folder=folder) for pair in own.items() if pair[1] is not None for part in pair]
        for rank, own in by_rank.items()
    }
    environment = {"XDG_CACHE_HOME": str(folder / "unused")}
    launched = launch([], num_ranks=2, environment=environment, flags_of_rank=given)
    assert launched.exit_codes == (2, 2), launched.output
    assert launched.output.count(message) == 1 and "Traceback" not in launched.output, launched.output


PRETRAINED_STEPS = 4


def run(folder: Path, log: Path, *flags: object) -> tuple[list[dict[str, Any]], str]:
    """Train on two ranks; returns what is in the log, which a run that was requeued goes on with, and what was said."""
    base = {**working_flags(folder), "--lr": 1e-2, "--log-json": log, "--train-iters": PRETRAINED_STEPS}
    done = launch({**base, **dict(zip(flags[::2], flags[1::2], strict=True))}, num_ranks=2)
    assert done.exit_codes == (0, 0), done.output
    return read_log(log), done.output


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
    finetune = (*other, "--finetune", None, "--load", pretrained, "--save", tmp_path / "tuned")
    log = tmp_path / "tuned.jsonl"
    first, said = run(tmp_path, log, *finetune, "--exit-interval", 2)
    assert f"starting at step 0 from the weights of {pretrained / 'step_00000004'}" in said
    assert [entry["step"] for entry in first] == [1, 2]
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
