"""Which steps a balancer decides that predicts them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron.runtime.feed.step_planner import Decision, NodeDecisions, StepOptions, StepPlanner
from megatron.runtime.training.prediction import build_predictor
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.data.global_batches import DataPart, GlobalBatches
from multimodal.plan.plans_of_sizes import plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from tests.unit.runtime.training.conftest import open_example


class _Counted(NodeDecisions):
    def __init__(self) -> None:
        self.steps: list[bool] = []

    def find(self, lengths: Any, decide: Callable[[], Decision]) -> Decision:
        self.steps[-1] = True
        return decide()


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize(("margin", "decided"), [(1.0, [0, 8]), (0.0, [*range(16)])])
def test_a_balancer_that_keeps_the_datas_order_is_asked_once_a_period(margin: float, decided: list[int], first: int) -> None:
    """One that gains is asked for each step. Who goes on inside a period asks for its first step, and leaves the same."""
    pytest.importorskip("sklearn")
    config, inputs = open_example("--num-workers 0", num_ranks=4)
    plan = plan_disaggregated(inputs.graph, sizes=config.parallelism.units, world_size=4)
    schedules = ScheduleCache(inputs.graph, plan, BUILDERS["1f1b"])
    predictor = replace(build_predictor(config, schedules, vocab_size=inputs.vocab_size), margin=margin)
    counted, source = _Counted(), inputs.data.train.source
    planner = StepPlanner(
        source,
        batches=GlobalBatches((DataPart(len(source)),), 32, seed=0, shuffle=False),
        balancer=BALANCERS["auto"],
        balance_options=BalanceOptions(micro_batch_size=16, predictor=predictor, vocab_size=inputs.vocab_size),
        options=StepOptions(schedules, rank=0, is_emulated=True, costs_of=predictor.costs),
        decisions=counted,
    )
    steps = range(first, 16)
    for number in steps:
        counted.steps.append(False)
        assert planner[number].balance.imbalance_after
    asked = [number for number, is_asked in zip(steps, counted.steps, strict=True) if is_asked]
    assert asked == sorted({max(first, step) for step in decided})
