"""Training with images under megatron-core's own MIMO and under Braid's executor: the same losses."""

import pytest

from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from tests.distributed.braid_training import NUM_STEPS, TWO_ENCODERS, WITH_IMAGES, braid_losses, initial_weights
from tests.distributed.gradient_case import single_rank_plan

pytest.importorskip(
    "megatron.core.models.mimo.config.role",
    reason="the installed megatron-core has no MIMO with modules on ranks of their own; 0.19 has",
    exc_type=ImportError,
)

from tests.distributed.mimo_training import MimoLayout, mimo_losses


@pytest.mark.parametrize("layout", [MimoLayout(1, 1, 1), MimoLayout(1, 2, 1), MimoLayout(2, 1, 2), MimoLayout(1, 1, 2)])
def test_losses_of_twenty_steps_equal_those_of_mimo(ranks, layout):
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


@pytest.mark.parametrize(
    ("layout", "schedule", "balance"),
    [
        (MimoLayout(2, 2, 1), "1f1b", "none"),
        (MimoLayout(1, 1, 2), "zb-h1", "none"),
        (MimoLayout(1, 1, 1, llm_tp=2), "eager-1f1b", "none"),
        (MimoLayout(1, 2, 1, num_encoders=2), "eager-1f1b", "none"),
        (MimoLayout(2, 1, 2), "1f1b", "whole-sample"),
        (MimoLayout(4, 2, 2, shares_ranks=True), "optimus", "none"),
        (MimoLayout(1, 2, 1, llm_chunks=2), "interleaved-1f1b", "none"),
        (MimoLayout(2, 2, 1, shares_ranks=True, llm_chunks=2), "optimus", "none"),
    ],
)
def test_mimos_loop_trains_on_braids_schedules_as_on_megatrons(ranks, layout, schedule, balance):
    """Encoders on ranks of their own; also as in one process. More replicas than the LLM's fail there if images are unlike.

    With an LLM of several stages on the encoders' ranks, or of several chunks (not in MIMO), encoders compute in its bubbles.
    """
    case = TWO_ENCODERS if layout.num_encoders > 1 else WITH_IMAGES
    (weights,) = ranks.run(initial_weights, case, world_size=1)
    plan = None
    if balance != "none" or layout.shares_ranks:
        sizes = {
            "vision": UnitSizes(data_parallel_size=layout.vision_dp),
            "llm": UnitSizes(
                data_parallel_size=layout.llm_dp, pipeline_parallel_size=layout.llm_pp, virtual_pipeline_size=layout.llm_chunks
            ),
        }
        lay = plan_colocated if layout.shares_ranks else plan_disaggregated
        plan = lay(case.graph, sizes=sizes, world_size=layout.num_ranks)
    found = ranks.run(mimo_losses, case, weights, layout, schedule, balance, plan, world_size=layout.num_ranks)
    if layout.vision_dp <= layout.llm_dp and layout.llm_chunks == 1 and balance == "none":
        expected = ranks.run(mimo_losses, case, weights, layout, world_size=layout.num_ranks)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=0, abs=1e-9)
    if layout.llm_tp == 1:  # whose ranks have other weights
        alone = ranks.run(braid_losses, case, single_rank_plan(case.graph), world_size=1)
        assert [sum(share) for share in zip(*found, strict=True)] == pytest.approx(alone[0], rel=0, abs=1e-9)
