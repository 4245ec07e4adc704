"""The least memory of a rank: below every simulated peak, and not far below where nothing but the plan decides."""

import pytest

from megatron.runtime.training.memory_check import least_memory
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.search.run_variants import fitting_schedules, formed
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import fed_encoders
from multimodal.schedule.simulate import simulate_schedule
from tests.unit.plan.planners.planning_cases import CLUSTER, GRAPHS, request

SOME_PLANNERS = ("disttrain", "megatron", "megatron-balanced", "optimus", "encoders-colocated")


def is_deep(model: str, planner: str, recompute: str | None) -> bool:
    """Tell most rows of all, so that each planner and each model has both left."""
    return (list(GRAPHS).index(model) - SOME_PLANNERS.index(planner)) % 5 != (recompute is None)


@pytest.mark.deep(when=is_deep)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("planner", SOME_PLANNERS)
@pytest.mark.parametrize("model", GRAPHS)
def test_it_is_below_the_simulated_peak_under_every_schedule(model: str, planner: str, recompute: str | None) -> None:
    if fed_encoders(GRAPHS[model]) and not PLANNERS[planner].takes_fed_encoders:
        pytest.skip("the planner has no plan for it")
    asked = request(GRAPHS[model], transformer_impl="local", micro_batch_size=1)
    found = PLANNERS[planner](asked)
    shares = []
    for schedule, row in fitting_schedules(found, asked):
        run = formed(found, (schedule, "none"), asked)
        if run is None or (schedule == "encoders-colocated" and planner != "encoders-colocated"):
            continue
        options = BalanceOptions(vocab_size=asked.vocab_size)
        assignment = BALANCERS["none"](asked.lengths, graph=asked.graph, plan=run.plan, options=options)
        run_options = RunOptions(recompute, transformer_impl="local")
        costs = ModelCosts(
            assignment.shape(asked.graph, run.plan), assignment, asked.lengths, CLUSTER, asked.vocab_size, run_options
        )
        simulated = simulate_schedule(build_schedule(row.with_costs(costs), costs.shape, costs=costs), costs)
        for lane, ranks in enumerate(run.plan.lanes):
            peak = simulated.peak_total_bytes[lane]
            least = least_memory(costs.memory, rank=ranks[0], schedule=row).total_bytes
            assert 0 < least <= peak * (1 + 1e-9), (schedule, lane)
            shares.append(least / peak)
    assert shares and max(shares) > 0.6
