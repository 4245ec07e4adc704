"""Text-only training under megatron-core's own pipeline schedule and under Braid's executor: the same losses."""

import pytest

from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from tests.distributed.braid_training import braid_losses, initial_weights
from tests.distributed.compared_case import NUM_STEPS, TEXT_ONLY
from tests.distributed.megatron_training import megatron_losses
from tests.distributed.rank_pool import RankPool


@pytest.mark.deep(when=lambda tp: tp == 1)
@pytest.mark.parametrize(("megatron_pp", "tp", "pp", "dp"), [(2, 1, 2, 1), (4, 1, 4, 1), (2, 2, 2, 2)])
def test_losses_of_twenty_steps_equal_those_of_megatron(ranks: RankPool, megatron_pp: int, tp: int, pp: int, dp: int) -> None:
    (weights,) = ranks.run(initial_weights, TEXT_ONLY, world_size=1)
    expected = ranks.run(megatron_losses, TEXT_ONLY, weights["llm"], world_size=megatron_pp)[-1]
    world_size = tp * pp * dp
    sizes = {"llm": UnitSizes(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp)}
    plan = plan_disaggregated(TEXT_ONLY.graph, sizes=sizes, world_size=world_size)
    shares = ranks.run(braid_losses, TEXT_ONLY, plan, world_size=world_size)
    losses = [sum(share) for share in zip(*shares, strict=True)]
    assert len(expected) == NUM_STEPS and len(set(expected)) == NUM_STEPS
    assert losses == pytest.approx(expected, rel=0, abs=1e-9)
