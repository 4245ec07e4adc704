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


@pytest.mark.parametrize(("margin", "decided"), [(1.0, [0, 2, 6, 14]), (0.0, [*range(16)])])
def test_a_balancer_that_keeps_the_datas_order_is_asked_ever_less_often(margin: float, decided: list[int]) -> None:
    """After 1, 3, 7, ... steps left in the data's order; one that gains is asked each time."""
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
    for number in range(16):
        counted.steps.append(False)
        assert planner[number].balance.imbalance_after
    assert [number for number, is_decided in enumerate(counted.steps) if is_decided] == decided
