"""Text-only training under megatron-core's own pipeline schedule and under Braid's executor: the same losses."""

import pytest

from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from tests.distributed.braid_training import NUM_STEPS, TEXT_ONLY, braid_losses, initial_weights
from tests.distributed.megatron_training import megatron_losses
from tests.distributed.rank_pool import RankPool


def test_losses_of_twenty_steps_equal_those_of_megatron(ranks: RankPool) -> None:
    (weights,) = ranks.run(initial_weights, TEXT_ONLY, world_size=1)
    expected = ranks.run(megatron_losses, TEXT_ONLY, weights["llm"], world_size=2)[-1]
    sizes = {"llm": UnitSizes(pipeline_parallel_size=2, data_parallel_size=2)}
    plan = plan_disaggregated(TEXT_ONLY.graph, sizes=sizes, world_size=4)
    shares = ranks.run(braid_losses, TEXT_ONLY, plan, world_size=4)
    losses = [sum(share) for share in zip(*shares, strict=True)]
    assert len(expected) == NUM_STEPS and len(set(expected)) == NUM_STEPS
    assert losses == pytest.approx(expected, rel=0, abs=1e-9)
