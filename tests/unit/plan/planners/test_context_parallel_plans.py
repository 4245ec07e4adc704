"""Context parallelism in plans: fixed, searched where sequences are long, and where nothing fits without."""

import math
from dataclasses import replace

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.allowed_sizes import context_parallel_sizes
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.memory_estimate import stage_bytes, working_bytes
from multimodal.plan.planners.estimate.step_estimate import estimate_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout
from multimodal.plan.planners.planning_request import FixedSizes, StageSize
from multimodal.plan.planners.search.plan_to_fit import plan_to_fit
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.errors import PlanError
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.plan.planners.planning_cases import LLM, TEXT_ONLY, TWO, VISION, request, with_memory

FIXED = {"llm": FixedSizes(context_parallel_size=2)}
DOCUMENT = SampleLengths(0, (ItemLengths("vision", 4096, 1024),), 64 * 1024, 1000)


def long_request(**changes):
    """Few documents of 65 thousand tokens."""
    return request(TWO, **{"lengths": (DOCUMENT,), "global_batch_size": 2, "num_gpus": 32, "time_budget_seconds": 2.0, **changes})


def test_planners_that_share_a_grid_share_its_context_parallel_size():
    for name in ("megatron", "megatron-balanced", "encoders-replicated"):
        run = PLANNERS[name](request(TWO, fixed_sizes=FIXED))
        assert {unit.context_parallel_size for unit in run.plan.units.values()} == {2}, name
    contradiction = {**FIXED, "vision": FixedSizes(context_parallel_size=4)}
    with pytest.raises(PlanError, match="gives vision and llm one context parallel size, but they allow none together"):
        PLANNERS["megatron"](request(TWO, fixed_sizes=contradiction))


def test_sizes_are_open_only_where_every_rank_gets_a_long_share():
    asked = long_request(most_context_parallel=8)
    assert context_parallel_sizes(asked, "llm") == (1, 2, 4, 8)
    assert context_parallel_sizes(asked, "vision") == (1,), "4,096 tokens"
    assert context_parallel_sizes(replace(asked, micro_batch_size=4, global_batch_size=4), "vision") == (1, 2, 4)
    assert context_parallel_sizes(replace(asked, num_gpus=4), "llm") == (1, 2, 4)
    assert context_parallel_sizes(long_request(), "llm") == (1,), "planners of papers look at none"
    assert context_parallel_sizes(long_request(fixed_sizes=FIXED), "llm") == (2,)
    rare = replace(asked, lengths=(DOCUMENT, *(SampleLengths(index, (), 40, 10) for index in range(1, 300))))
    assert context_parallel_sizes(rare, "llm") == (1, 2), "259 tokens on average: two blocks"
    short = replace(asked, lengths=request(TWO).lengths)
    assert context_parallel_sizes(short, "llm") == (1,)


def test_an_encoder_may_cut_items_that_are_longer_than_a_microbatch():
    one_long = (
        SampleLengths(0, (ItemLengths("vision", 3072, 768),), 100, 50),
        *(SampleLengths(index, (ItemLengths("vision", 256, 64),), 100, 50) for index in range(1, 20)),
    )
    asked = request(TWO, lengths=one_long, num_gpus=32, most_context_parallel=8, micro_batch_size=1)
    assert asked.loads.longest_items == {"vision": 3072}
    assert context_parallel_sizes(asked, "vision") == (1, 2), "3 parts of 1,024 tokens; its ranks have less than 4,096"
    assert context_parallel_sizes(replace(asked, micro_batch_size=8), "vision") == (1,), "a microbatch has 3,174 on average"
    assert context_parallel_sizes(replace(asked, most_context_parallel=1), "vision") == (1,)
    assert context_parallel_sizes(asked, "llm") == (1,)


def test_an_encoder_whose_merged_patches_blocks_would_cut_is_not_spread():
    odd = replace(TWO, units=(replace(VISION, image=replace(VISION.image, merge_size=3)), LLM))
    lengths = (SampleLengths(0, (ItemLengths("vision", 90_000, 10_000),), 10, 10),)
    asked = request(odd, lengths=lengths, most_context_parallel=8)
    assert odd.unit("vision").merge_factor == 9
    assert context_parallel_sizes(asked, "vision") == (1,)
    assert context_parallel_sizes(asked, "llm") == (1, 2)


def test_ranks_of_a_stage_are_neighbours_and_tensor_parallel_groups_stay_in_a_node():
    layouts = {"vision": UnitLayout(4, 1, (((0, 8),),)), "llm": UnitLayout(2, 1, (((0, 5),), ((5, 10),)), 4)}
    plan = Candidate(layouts).build_plan(TWO)
    assert [stage.ranks for stage in plan.units["llm"].replicas[0].stages] == [tuple(range(8)), tuple(range(8, 16))]
    assert plan.units["vision"].ranks == (16, 17, 18, 19)
    odd = {**layouts, "llm": replace(layouts["llm"], context_parallel_size=3)}
    assert Candidate(odd).build_plan(TWO).units["vision"].ranks == (0, 1, 2, 3), "6 is no multiple of 4"


def test_braid_spreads_long_documents_where_there_are_few_of_them():
    asked = long_request()
    run, prediction = plan_to_fit(PLANNERS["braid"], asked)
    assert run.plan.units["llm"].context_parallel_size > 1
    other = plan_to_fit(PLANNERS["megatron-balanced"], asked)[1]
    assert prediction.iteration_seconds < 0.5 * other.iteration_seconds
    assert any("cp 4" in note for note in run.notes)


def test_context_parallelism_is_the_last_resort_of_planners_that_do_not_look_at_it():
    sizes = FixedSizes(tensor_parallel_size=1, pipeline_parallel_size=1)
    asked = with_memory(long_request(fixed_sizes={"llm": sizes, "vision": sizes}), 6.0)
    with pytest.raises(PlanError, match="no plan on 32 GPUs fits"):
        PLANNERS["disttrain"](replace(asked, recompute="full"))
    run, prediction = plan_to_fit(PLANNERS["disttrain"], asked)
    assert run.plan.units["llm"].context_parallel_size > 1
    assert prediction.peak_memory_bytes <= asked.memory_bytes


def candidate_of(*, context: int, data: int = 1, tensor: int = 2, pipeline: int = 2) -> Candidate:
    return Candidate({"llm": even_layout(LLM, tensor, data, pipeline, context=context)})


@pytest.mark.parametrize("context", [1, 2, 4, 8])
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_estimated_and_simulated_memory_agree(context, implementation, recompute):
    document = SampleLengths(0, (), 32 * 1024, 1000)
    asked = request(TEXT_ONLY, lengths=(document,), global_batch_size=4, num_gpus=64)
    asked = replace(asked, transformer_impl=implementation, recompute=recompute)
    candidate = candidate_of(context=context, data=2)
    found = predict_run(candidate.to_run(asked, seconds=0.0), asked).peak_memory_bytes
    estimated = max(stage_bytes(asked, "llm", candidate.layouts["llm"], stage, num_samples=2 - stage) for stage in (0, 1))
    estimated += working_bytes(asked, "llm", StageSize(2, context))
    assert estimated == pytest.approx(found, rel=0.1)


def test_estimated_and_simulated_time_agree():
    document = SampleLengths(0, (), 32 * 1024, 1000)
    asked = request(TEXT_ONLY, lengths=(document,), global_batch_size=8, num_gpus=64)
    seconds = {}
    for context in (1, 4):
        candidate = candidate_of(context=context)
        run = candidate.to_run(asked, seconds=0.0)
        seconds[context] = predict_run(run, asked).iteration_seconds
        assert estimate_seconds(asked, candidate) == pytest.approx(seconds[context], rel=0.03)
    assert seconds[4] < 0.35 * seconds[1]


def test_units_of_other_context_parallel_sizes_share_ranks():
    layouts = {"vision": even_layout(VISION, 2, 2, 1, context=2), "llm": even_layout(LLM, 2, 1, 1, context=4)}
    asked = long_request(num_gpus=8)
    run = Candidate(layouts, groups=(("vision", "llm"),)).to_run(asked, seconds=0.0)
    assert set(run.plan.units["vision"].ranks) == set(run.plan.units["llm"].ranks) == set(range(8))
    assert math.isfinite(predict_run(run, asked).iteration_seconds)
