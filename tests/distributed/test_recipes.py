"""The recipes of docs/write_your_own.md, followed: one function and one row, and no other file knows the new name."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags.field_flags import field_flags
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.braid import PlanSearch
from multimodal.plan.planners.search.simulated_part import QUICK
from multimodal.schedule.builders import BUILDERS
from tests.distributed.added_rows import ADDS_ROWS, BALANCER, PLANNER, SCHEDULE, add_rows
from tests.distributed.launch import REPOSITORY
from tests.distributed.small_run import MODEL, losses
from tests.unit.plan.planners.planning_cases import TWO, request
from tools import emulate, plan, simulate

CLUSTER = REPOSITORY / "examples" / "clusters" / "a40.yaml"


@pytest.fixture(autouse=True, scope="module")
def rows() -> Iterator[None]:
    tables: tuple[dict[str, Any], ...] = (BUILDERS, BALANCERS, PLANNERS)
    before = [dict(table) for table in tables]
    for name in PLANNERS.keys() - {"braid", "megatron"}:
        del PLANNERS[name]
    add_rows()
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture(scope="module")
def search(rows: None) -> PlanSearch:
    """A search that looks at one planner's plan, with an unlimited budget to vary it."""
    found = PlanSearch(request(TWO, num_gpus=2, global_batch_size=8, time_budget_seconds=float("inf")))
    found.rank_others([PLANNERS["megatron"]])
    found.vary_best()
    return found


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """The flags of the tools that name a model, its data and its machine."""
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    return [
        *("--model", str(tmp_path / "model.yaml"), "--cluster", str(CLUSTER)),
        *("--uniform-lengths", "vision=64,llm=128", "--transformer-impl", "local"),
    ]


def run_tool(tool: Any, capsys: pytest.CaptureFixture[str], *flags: object) -> dict[str, Any]:
    assert tool.main([*map(str, flags), "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _recorded(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def recorded(*given: Any, **options: Any) -> Any:
        calls.append(given)
        return function(*given, **options)

    return recorded


def test_an_added_schedule_and_an_added_balancer_train(tmp_path):
    """Two processes, which get the rows before pretrain_mllm.py starts, as if these stood in the registries."""
    chosen = {"--schedule": SCHEDULE, "--balance": BALANCER}
    found, expected = losses(tmp_path, chosen, environment={ADDS_ROWS: "1"}), losses(tmp_path, {})
    assert len(found) == 2 and found == pytest.approx(expected, rel=0, abs=1e-9)


def test_an_added_schedule_is_a_flag_and_is_searched_simulated_and_emulated(tmp_path, model, search, capsys):
    choices = {flag.name: flag.choices for flag in field_flags("training")}
    assert SCHEDULE in choices["schedule"] and BALANCER in choices["balance"]
    assert {SCHEDULE, "gpipe"} <= {tried.run.schedule for tried in search.trials.fitting(QUICK)}
    file = tmp_path / "plan.yaml"
    run_tool(plan, capsys, *model, "--num-gpus", 2, "--global-batch-size", 4, "--planner", PLANNER, "--output", file)
    step = [*model, "--plan", str(file)]
    simulated = run_tool(simulate, capsys, *step, "--schedule", SCHEDULE, "--balance", BALANCER)
    assert simulated["iteration_seconds"] > 0
    assert emulate.build_run(step, SCHEDULE, "", num_iterations=1).schedule.lanes


def test_an_added_balancer_is_a_candidate_of_auto_and_of_the_search(monkeypatch, search):
    assert {BALANCER, "sorted"} <= {tried.run.balance for tried in search.trials.fitting(QUICK)}
    tried: list[Any] = []
    row = BALANCERS[BALANCER]
    monkeypatch.setitem(BALANCERS, BALANCER, replace(row, balance=_recorded(row.balance, tried)))
    asked = request(TWO)
    BALANCERS["auto"](asked.lengths, graph=TWO, plan=PLANNERS["megatron"](asked).plan, options=BalanceOptions())
    assert [list(work.lengths) for (work,) in tried] == [list(asked.lengths)]


def test_an_added_planner_is_a_choice_and_a_candidate_of_braid(monkeypatch, model, capsys):
    sizes = "--num-gpus", 2, "--global-batch-size", 4
    found = run_tool(plan, capsys, *model, *sizes, "--planner", PLANNER, "--compare", f"{PLANNER},megatron")
    assert found["planner"] == PLANNER and set(found["compare"]) == {PLANNER, "megatron"}
    tried: list[Any] = []
    row = PLANNERS[PLANNER]
    monkeypatch.setitem(PLANNERS, PLANNER, replace(row, plan=_recorded(row.plan, tried)))
    PLANNERS["braid"](request(TWO, num_gpus=2, time_budget_seconds=0.2))
    assert tried
