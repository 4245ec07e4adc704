"""Schedules from a cache against schedules built afresh, for every balancer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.schedule.build_schedule import ScheduleCache, build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.schedule.validate import validate_schedule
from multimodal.values.assignment import Assignment
from tests.unit.plan.planners.planning_cases import TWO, random_lengths

SIZES = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(pipeline_parallel_size=2, data_parallel_size=2)}
PLANS = {
    "own ranks": plan_disaggregated(TWO, sizes=SIZES, world_size=6),
    "shared ranks": plan_colocated(TWO, sizes={"llm": UnitSizes(pipeline_parallel_size=2)}, world_size=4),
}
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "dip", "dip-2", "breadth-first", "interleaved-1f1b")


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("balancer", BALANCERS)
def test_a_schedule_from_the_cache_is_the_one_built_afresh(balancer: str, data: st.DataObject) -> None:
    plan = PLANS[data.draw(st.sampled_from(sorted(PLANS)))]
    builder = BUILDERS[data.draw(st.sampled_from(SCHEDULES))]
    passes = [PASSES[name] for name in data.draw(st.sampled_from([(), ("split-backward",), ("reduce-by-layer",)]))]
    cache = ScheduleCache(TWO, plan, builder, passes)
    options = BalanceOptions(micro_batch_size=data.draw(st.integers(1, 2)), vocab_size=512)
    for seed in data.draw(st.lists(st.integers(0, 99), min_size=2, max_size=3)):
        lengths = random_lengths(TWO, count=12, seed=seed)
        assignment = BALANCERS[balancer](lengths, graph=TWO, plan=plan, options=options)
        afresh = build_schedule(builder, Assignment.from_dict(assignment.to_dict()).shape(TWO, plan), passes=passes)
        for _ in range(2):
            found = cache.schedule(assignment)
            assert found == afresh
            validate_schedule(found)
