"""Training with images under megatron-core's own MIMO and under Braid's executor: the same losses."""

import pytest

from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from tests.distributed.braid_training import NUM_STEPS, WITH_IMAGES, braid_losses, initial_weights
from tests.distributed.rank_pool import RankPool

pytest.importorskip(
    "megatron.core.models.mimo.config.role",
    reason="the installed megatron-core has no MIMO with modules on ranks of their own; 0.19 has",
    exc_type=ImportError,
)

from tests.distributed.mimo_training import MimoLayout, mimo_losses


@pytest.mark.parametrize("layout", [MimoLayout(1, 1, 1), MimoLayout(1, 2, 1), MimoLayout(2, 1, 2), MimoLayout(1, 1, 2)])
def test_losses_of_twenty_steps_equal_those_of_mimo(ranks: RankPool, layout: MimoLayout) -> None:
    (weights,) = ranks.run(initial_weights, WITH_IMAGES, world_size=1)
    expected = ranks.run(mimo_losses, WITH_IMAGES, weights, layout, world_size=layout.num_ranks)
    sizes = {
        "vision": UnitSizes(data_parallel_size=layout.vision_dp),
        "llm": UnitSizes(pipeline_parallel_size=layout.llm_pp, data_parallel_size=layout.llm_dp),
    }
    plan = plan_disaggregated(WITH_IMAGES.graph, sizes=sizes, world_size=layout.num_ranks)
    found = ranks.run(braid_losses, WITH_IMAGES, plan, world_size=layout.num_ranks)
    summed = [[sum(share) for share in zip(*shares, strict=True)] for shares in (found, expected)]
    assert len(set(summed[1])) == NUM_STEPS
    assert summed[0] == pytest.approx(summed[1], rel=0, abs=1e-9)
