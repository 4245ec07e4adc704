"""Which steps a balancer decides that predicts them, and by what."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.runtime.feed.step_planner import (
    Decision,
    NodeDecisions,
    StepOptions,
    StepPlanner,
    StepPlanners,
    load_steps,
    load_steps_in_thread,
    num_begun,
)
from megatron.runtime.step.step import Step
from megatron.runtime.training.plan_steps import is_left_in_order
from megatron.runtime.training.prediction import MeasuredCosts, build_predictor
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.data.global_batches import DataPart, GlobalBatches
from multimodal.plan.plans_of_sizes import plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from tests.unit.runtime.training.conftest import open_example


class _Counted(NodeDecisions):
    """Decisions of another rank, which takes nine seconds for each."""

    def __init__(self) -> None:
        self.num_asked = 0

    def find(self, lengths: Any, decide: Callable[[], Decision]) -> Decision:
        self.num_asked += 1
        return decide()._replace(seconds=9.0)


def test_a_step_that_is_left_in_the_datas_order_is_not_decided() -> None:
    pytest.importorskip("sklearn")
    config, inputs = open_example("--num-workers 0", num_ranks=4)
    plan = plan_disaggregated(inputs.graph, sizes=config.parallelism.units, world_size=4)
    schedules = ScheduleCache(inputs.graph, plan, BUILDERS["1f1b"])
    predictor = replace(build_predictor(config, schedules, vocab_size=inputs.vocab_size), margin=0.0)
    counted, source = _Counted(), inputs.data.train.source
    options = BalanceOptions(micro_batch_size=16, predictor=predictor, vocab_size=inputs.vocab_size)
    build = partial(
        StepPlanner,
        source,
        batches=GlobalBatches((DataPart(len(source)),), 32, seed=0, shuffle=False),
        balance_options=options,
        options=StepOptions(schedules, rank=0, is_emulated=True, costs_of=predictor.costs),
    )
    planner = build(balancer=BALANCERS["auto"], decisions=counted, is_left=lambda step: step == 1)
    in_order = build(balancer=BALANCERS["none"])
    assert [planner[step].assignment == in_order[step].assignment for step in range(3)] == [False, True, False]
    assert counted.num_asked == 2
    assert [planner[step].balance.balance_ms >= 9000 for step in (0, 1)] == [True, False], "as long as it took where it was made"


def test_every_other_measured_step_is_left_and_all_steps_while_balancing_gains_nothing() -> None:
    config, _ = open_example("--num-workers 0", num_ranks=4)
    run = cast(Any, SimpleNamespace(config=config, done_steps=100))
    lost = MeasuredCosts(120, LayerProfile("", "", {}), keeps_order=True)

    def left(measured: MeasuredCosts | None, *, forward_only: bool = False) -> list[int]:
        return [step for step in range(112, 142) if is_left_in_order(run, measured, step, forward_only=forward_only)]

    in_trials = [112, 114, 116, 118, 132, 134, 136, 138]
    assert left(None) == left(lost._replace(keeps_order=False)) == in_trials
    assert left(lost) == [112, 114, 116, 118, *range(120, 132), 132, 134, 136, 138, 140, 141]
    assert not left(None, forward_only=True) and left(lost, forward_only=True) == [*range(112, 142)]


class _Echo(StepPlanners):
    """Gives what it is asked for."""

    def __init__(self) -> None:
        pass

    def plan(self, step: int, known: Any) -> Step:
        return cast(Step, f"{step} by {known}")


@pytest.mark.parametrize("num_workers", [0, 1, 3, None])
def test_steps_are_begun_no_earlier_than_said(num_workers: int | None) -> None:
    """So what is found behind a step can determine all steps from `num_begun` later on, on every rank."""
    num_taken = 0

    def known_at(step: int) -> int:
        assert step <= num_taken + num_begun(num_workers)
        return 10 * step

    more = {} if num_workers is None else {"num_workers": num_workers}
    load = load_steps_in_thread if num_workers is None else load_steps
    for step in load(_Echo(), range(12), known_at=known_at, **more):
        assert str(step) == f"{num_taken} by {10 * num_taken}"
        num_taken += 1
    assert num_taken == 12
