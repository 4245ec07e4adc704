"""Units that the data asks nothing of hold neither GPUs nor stages of their own, whoever plans."""

from dataclasses import replace

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.estimate.memory_estimate import range_bytes
from multimodal.plan.planners.idle_units import MOST_MEMORY_SHARE, place_idle_units, without_idle_units
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, StageSize
from multimodal.plan.planners.search.layout_search import best_layouts
from multimodal.plan.planners.search.plan_to_fit import plan_to_fit
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.validate import validate_plan
from tests.unit.plan.planners.planning_cases import (
    AUDIO,
    GENERATOR,
    LLM,
    THREE,
    TWO,
    TWO_ENCODERS,
    VISION,
    random_lengths,
    request,
    with_memory,
)

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


@pytest.mark.deep(when=lambda name, case: name == "braid" or (name != "disttrain" and case != "generator"))
@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case) for name in PLANNERS for case in CASES if (name, case) != ("braid", "third-encoder")
    ],  # its search takes seconds
)
def test_a_unit_without_work_costs_no_time(name: str, case: str) -> None:
    graph, idle, smaller = CASES[case]
    asked = without_items(graph, idle)
    assert asked.loads.idle_units == {idle}
    run, prediction = plan_to_fit(PLANNERS[name], asked)
    validate_plan(run.plan, graph=graph, world_size=run.num_gpus)
    others = {rank for unit, plan in run.plan.units.items() if unit != idle for rank in plan.ranks}
    assert others.issuperset(run.plan.units[idle].ranks)
    alone, without = plan_to_fit(PLANNERS[name], replace(asked, graph=smaller))
    if name != "braid":  # whose search ends at another place
        assert {unit: run.plan.units[unit] for unit in smaller.unit_names} == dict(alone.plan.units)
    is_exact = run.balance != "disttrain" and run.schedule != "encoders-colocated" and not run.repeats_encoders
    # That balancer orders microbatches by all stages of the plan; encoders beside or copied like others reduce their gradients.
    assert prediction.iteration_seconds <= (1 + 1e-9 if is_exact else 1.15) * without.iteration_seconds


def test_it_lies_on_the_first_ranks_of_the_llm_in_one_replica() -> None:
    asked = without_items(TWO_ENCODERS, "audio")
    runs = [layout.to_run() for kind in best_layouts(asked) for layout in kind]
    apart = [run for run in runs if not set(run.plan.units["vision"].ranks) & set(run.plan.units["llm"].ranks)]
    assert apart
    for run in apart:
        audio, llm = run.plan.units["audio"], run.plan.units["llm"]
        assert audio.data_parallel_size == 1 and min(audio.ranks) == min(llm.ranks)
        assert set(audio.ranks) <= set(llm.ranks)


def test_it_is_cut_into_stages_until_it_takes_little_memory() -> None:
    asked = with_memory(without_items(THREE, "generator", num_gpus=16), 2.0)
    run = PLANNERS["disttrain"](asked)
    generator = run.plan.units["generator"]
    ranges = [stage.layer_ranges for stage in generator.replicas[0].stages]
    assert 1 < len(ranges) <= GENERATOR.transformer.num_layers
    size = StageSize(generator.tensor_parallel_size)
    taken = [range_bytes(asked, "generator", each, size, 1)[0] for each in ranges]
    assert max(taken) <= MOST_MEMORY_SHARE * asked.memory_bytes


def test_fixed_sizes_are_kept_where_there_are_gpus_for_them() -> None:
    fixed = FixedSizes(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    asked = without_items(THREE, "generator", fixed_sizes={"generator": fixed})
    plan = PLANNERS["disttrain"](asked).plan.units["generator"]
    assert (plan.tensor_parallel_size, len(plan.replicas[0].stages), plan.data_parallel_size) == (2, 2, 2)
    large = replace(fixed, data_parallel_size=4)
    with pytest.raises(PlanError, match=r"unit 'generator' is asked for nothing .* fixed sizes take 16 GPUs of 8; unfix them"):
        PLANNERS["disttrain"](replace(asked, fixed_sizes={"generator": large}))


def test_with_work_for_all_units_nothing_changes() -> None:
    asked = request(THREE)
    assert without_idle_units(asked) is asked
    run = PLANNERS["megatron"](asked)
    assert place_idle_units(run, asked) is run
