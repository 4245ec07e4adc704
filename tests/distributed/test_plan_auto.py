"""`--plan auto` as a user runs it: it trains as one process does, keeps what it found, and goes on under a better plan."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.model_graph import ModelGraph
from tests.distributed import small_run
from tests.distributed.launch import Launched, launch
from tests.distributed.small_run import SIZED_OTHERWISE, working_flags, write_working_files

NUM_STEPS, STEPS_OF_TWO_RUNS = 5, 7
BAD = "plan: vision tp 1 x pp 1 x dp 1"
AUTO = {"--plan": "auto", "--plan-time-budget": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a small run, and the user's cache."""
    made = tmp_path_factory.mktemp("plan-auto")
    write_working_files(made)
    return made


def train(
    folder: Path, more: Mapping[str, object], *, num_ranks: int = 2, num_steps: int = NUM_STEPS, plans_itself: bool = True
) -> tuple[Launched, list[float]]:
    """Train, and return what was said and the losses."""
    flags = {"--train-iters": num_steps, "--global-batch-size": 4, "--lr-decay-style": "constant", "--no-progress-bar": None}
    flags |= (SIZED_OTHERWISE | AUTO if plans_itself else {}) | more
    entries, launched = small_run.train(folder, flags, num_ranks=num_ranks, environment={"XDG_CACHE_HOME": str(folder / "cache")})
    return launched, [entry["loss"] for entry in entries]


@pytest.fixture(scope="module")
def one_process(folder: Path) -> list[float]:
    """The losses of one process."""
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

    second, losses = train(folder, {"--plan-review-iters": 0})
    assert losses == pytest.approx(one_process[:NUM_STEPS], rel=0, abs=1e-9)
    assert "links as kept" in second.output and "layers as kept" in second.output and "(as planned before)" in second.output
    assert "plan review" not in second.output

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
    """The file of the plan that the next run takes."""
    (kept,) = (folder / "cache" / "braid" / "choices").iterdir()
    return kept


def plant_bad_plan(folder: Path) -> dict[str, Any]:
    """Put a plan in the place of the one that was kept whose encoder waits for most of a step, in microbatches of one sample."""
    graph = ModelGraph.from_file(folder / "model.yaml")
    sizes = {"vision": UnitSizes(data_parallel_size=1), "llm": UnitSizes(data_parallel_size=1)}
    choice: dict[str, Any] = json.loads(kept_choice(folder).read_text())
    choice["plan"] = plan_disaggregated(graph, sizes=sizes, world_size=2).to_dict()
    choice["flags"] |= {"schedule": "gpipe", "passes": [], "balance": "none", "micro_batch_size": 1, "sharding": "optim"}
    choice["text"] = json.dumps(choice["plan"])  # which is YAML, too
    choice["lines"][0] = f"{BAD}, llm tp 1 x pp 1 x dp 1"
    kept_choice(folder).write_text(json.dumps(choice))
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
