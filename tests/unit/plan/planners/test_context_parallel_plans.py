"""Context parallelism in plans: fixed, searched where sequences are long, and where nothing fits without."""

import math
from dataclasses import replace

import pytest

from benchmarks.baselines import COMPARED
from multimodal.plan.planners.allowed_sizes import context_parallel_sizes, shared_stage_sizes
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.memory_estimate import range_bytes, stage_bytes, working_bytes
from multimodal.plan.planners.estimate.step_estimate import estimate_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout
from multimodal.plan.planners.idle_units import MOST_MEMORY_SHARE, place_idle_units, without_idle_units
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, StageSize
from multimodal.plan.planners.search.layout_search import best_layouts
from multimodal.plan.planners.search.plan_to_fit import plan_to_fit
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Experts, ImageInput, ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.units.unit import Opaque
from multimodal.values.validate import validate_plan
from tests.unit.plan.planners.planning_cases import (
    AUDIO,
    GENERATOR,
    LLM,
    TEXT_ONLY,
    THREE,
    TWO,
    TWO_ENCODERS,
    VISION,
    random_lengths,
    request,
    with_memory,
)

FIXED = {"llm": FixedSizes(context_parallel_size=2)}
DOCUMENT = SampleLengths(0, (ItemLengths("vision", 4096, 1024),), 64 * 1024, 1000)


def long_request(**changes):
    return request(TWO, **{"lengths": (DOCUMENT,), "global_batch_size": 2, "num_gpus": 32, "time_budget_seconds": 2.0, **changes})


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


def test_units_beside_a_module_of_one_piece_are_given_no_context_parallelism_with_it():
    module = replace(VISION, image=ImageInput(image_size=28, patch_size=14), module=Opaque("nowhere"))
    graph = replace(TWO, units=(module, LLM))
    asked = long_request(most_context_parallel=8)
    assert {size.context for size in shared_stage_sizes(asked, TWO.unit_names)} == {1, 2, 4, 8}
    assert {size.context for size in shared_stage_sizes(replace(asked, graph=graph), TWO.unit_names)} == {1}
    with pytest.raises(PlanError, match=r"'vision' \[1\], 'llm' \[2\]\); fix the same --UNIT-context-parallel-size"):
        shared_stage_sizes(replace(asked, graph=graph, fixed_sizes=FIXED), TWO.unit_names)


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
    vision, llm = UnitLayout(StageSize(4), 1, (((0, 8),),)), UnitLayout(StageSize(2, 4), 1, (((0, 5),), ((5, 10),)))
    plan = Candidate({"vision": vision, "llm": llm}).build_plan(TWO)
    assert [stage.ranks for stage in plan.units["llm"].replicas[0].stages] == [tuple(range(8)), tuple(range(8, 16))]
    assert plan.units["vision"].ranks == (16, 17, 18, 19)
    odd = {"vision": vision, "llm": replace(llm, size=StageSize(2, 3))}
    assert Candidate(odd).build_plan(TWO).units["vision"].ranks == (0, 1, 2, 3), "6 is no multiple of 4"


def test_braid_spreads_long_documents_where_there_are_few_of_them():
    asked = long_request()
    run, prediction = plan_to_fit(COMPARED["braid"], asked)
    assert run.plan.units["llm"].context_parallel_size > 1
    other = plan_to_fit(COMPARED["megatron-balanced"], asked)[1]
    assert prediction.iteration_seconds < 0.5 * other.iteration_seconds
    assert any("cp 4" in note for note in run.notes)


def test_context_parallelism_is_the_last_resort_of_planners_that_do_not_look_at_it():
    sizes = FixedSizes(tensor_parallel_size=1, pipeline_parallel_size=1)
    asked = with_memory(long_request(fixed_sizes={"llm": sizes, "vision": sizes}), 6.0)
    with pytest.raises(PlanError, match="no plan on 32 GPUs fits"):
        COMPARED["disttrain"](replace(asked, recompute="full"))
    run, prediction = plan_to_fit(COMPARED["disttrain"], asked)
    assert run.plan.units["llm"].context_parallel_size > 1
    assert prediction.peak_memory_bytes <= asked.memory_bytes


def candidate_of(*, context: int, data: int = 1) -> Candidate:
    return Candidate({"llm": even_layout(LLM, StageSize(2, context), data, 2)})


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
    layouts = {"vision": even_layout(VISION, StageSize(2, 2), 2, 1), "llm": even_layout(LLM, StageSize(2, 4), 1, 1)}
    asked = long_request(num_gpus=8)
    run = Candidate(layouts, groups=(("vision", "llm"),)).to_run(asked, seconds=0.0)
    assert set(run.plan.units["vision"].ranks) == set(run.plan.units["llm"].ranks) == set(range(8))
    assert math.isfinite(predict_run(run, asked).iteration_seconds)


SHAPE = replace(LLM.transformer, num_layers=2, experts=Experts(8, ffn_hidden_size=8192))
MANY = replace(LLM, transformer=SHAPE)
GRAPH = ModelGraph((MANY,))
ONE_STAGE = {"llm": FixedSizes(tensor_parallel_size=1, pipeline_parallel_size=1)}


def shared_by(name: str, asked: PlanningRequest) -> int:
    run, prediction = plan_to_fit(COMPARED[name], asked)
    assert prediction.peak_memory_bytes <= asked.memory_bytes
    assert run.transformer_impl == "transformer_engine"
    return run.plan.units["llm"].expert_parallel_size


@pytest.mark.deep(when=lambda name: name == "braid")
@pytest.mark.parametrize("name", ["megatron", "braid"])
def test_experts_are_shared_where_memory_asks_for_it(name: str) -> None:
    """Two layers of 8 experts with 25 M weights each: 0.4 B, whose weights and gradients alone take 2.4 GB."""
    asked = request(GRAPH, fixed_sizes=ONE_STAGE, num_gpus=8)
    assert shared_by(name, with_memory(asked, 3.2)) > 1


def test_a_model_without_experts_is_planned_once() -> None:
    assert request(TWO).expert_parallel_sizes == (1,)
    assert request(GRAPH, num_gpus=6).expert_parallel_sizes == (1, 2, 4)
    assert request(GRAPH, fixed_sizes={"llm": FixedSizes(data_parallel_size=2)}).expert_parallel_sizes == (1, 2)


SPEECH = replace(AUDIO, name="speech")
THREE_ENCODERS = ModelGraph((VISION, AUDIO, SPEECH, LLM), tuple((unit.name, "llm") for unit in (VISION, AUDIO, SPEECH)))
CASES = {
    "generator": (THREE, "generator", TWO),
    "encoder": (TWO_ENCODERS, "audio", TWO),
    "third-encoder": (THREE_ENCODERS, "speech", TWO_ENCODERS),
}


def without_items(graph: ModelGraph, idle: str, **changes: object) -> PlanningRequest:
    """Ask for a plan on lengths in which no sample has an item of the unit."""
    lengths = tuple(
        replace(sample, items=tuple(item for item in sample.items if item.unit != idle)) for sample in random_lengths(graph)
    )
    return request(graph, lengths=lengths, **changes)


@pytest.mark.deep(when=lambda name, case: name not in ("disttrain", "optimus", "entrain") or case != "generator")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case) for name in COMPARED for case in CASES if (name, case) != ("braid", "third-encoder")
    ],  # its search takes seconds
)
def test_a_unit_without_work_costs_no_time(name: str, case: str) -> None:
    graph, idle, smaller = CASES[case]
    asked = without_items(graph, idle)
    assert asked.loads.idle_units == {idle}
    run, prediction = plan_to_fit(COMPARED[name], asked)
    validate_plan(run.plan, graph=graph, world_size=run.num_gpus)
    others = {rank for unit, plan in run.plan.units.items() if unit != idle for rank in plan.ranks}
    assert others.issuperset(run.plan.units[idle].ranks)
    alone, without = plan_to_fit(COMPARED[name], replace(asked, graph=smaller))
    if name != "braid":  # whose search ends at another place
        assert {unit: run.plan.units[unit] for unit in smaller.unit_names} == dict(alone.plan.units)
    is_exact = run.balance != "disttrain" and run.schedule != "encoders-colocated" and run.can_run
    # That balancer orders microbatches by all stages of the plan; encoders beside or copied like others reduce their gradients.
    assert prediction.iteration_seconds <= (1 + 1e-9 if is_exact else 1.15) * without.iteration_seconds


def test_it_lies_on_the_first_ranks_of_the_llm_in_one_replica() -> None:
    asked = without_items(TWO_ENCODERS, "audio")
    runs = [layout.to_run(asked) for kind in best_layouts(asked) for layout in kind]
    apart = [run for run in runs if not set(run.plan.units["vision"].ranks) & set(run.plan.units["llm"].ranks)]
    assert apart
    for run in apart:
        audio, llm = run.plan.units["audio"], run.plan.units["llm"]
        assert audio.data_parallel_size == 1 and min(audio.ranks) == min(llm.ranks)
        assert set(audio.ranks) <= set(llm.ranks)


def test_it_is_cut_into_stages_until_it_takes_little_memory() -> None:
    asked = with_memory(without_items(THREE, "generator", num_gpus=16), 2.0)
    run = COMPARED["disttrain"](asked)
    generator = run.plan.units["generator"]
    ranges = [stage.layer_ranges for stage in generator.replicas[0].stages]
    assert 1 < len(ranges) <= GENERATOR.transformer.num_layers
    size = StageSize(generator.tensor_parallel_size)
    taken = [range_bytes(asked, "generator", each, size, 1)[0] for each in ranges]
    assert max(taken) <= MOST_MEMORY_SHARE * asked.memory_bytes


def test_fixed_sizes_are_kept_where_there_are_gpus_for_them() -> None:
    fixed = FixedSizes(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    asked = without_items(THREE, "generator", fixed_sizes={"generator": fixed})
    plan = COMPARED["disttrain"](asked).plan.units["generator"]
    assert (plan.tensor_parallel_size, len(plan.replicas[0].stages), plan.data_parallel_size) == (2, 2, 2)
    large = replace(fixed, data_parallel_size=4)
    with pytest.raises(PlanError, match=r"unit 'generator' is asked for nothing .* fixed sizes take 16 GPUs of 8; unfix them"):
        COMPARED["disttrain"](replace(asked, fixed_sizes={"generator": large}))


def test_with_work_for_all_units_nothing_changes() -> None:
    asked = request(THREE)
    assert without_idle_units(asked) is asked
    run = COMPARED["megatron"](asked)
    assert place_idle_units(run, asked) is run
