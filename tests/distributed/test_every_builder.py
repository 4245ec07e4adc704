"""Every builder on every kind of model, units with unequal numbers of replicas: loss and gradients of one process."""

import itertools
from collections.abc import Collection
from dataclasses import replace

import pytest

from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_grid import fold_stages
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.schedule.builders import BUILDERS, VirtualStages
from multimodal.schedule.passes import PASSES, passes_named
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16, "init_method_std": 0.3}
IMAGE = {"patch_size": 2, "in_channels": 1, "merge_size": 1}
UNITS = {
    "vision": {"role": "encoder", "image": IMAGE, **SHAPE},
    "audio": {"role": "encoder", "image": {**IMAGE, "merge_size": 2}, **SHAPE, "hidden_size": 8},
    "llm": {"role": "backbone", **SHAPE},
    "painter": {"role": "generator", "image": {**IMAGE, "patch_size": 3}, **SHAPE, "hidden_size": 24},
}
MODELS = {
    "one unit": ("llm",),
    "encoder and LLM": ("vision", "llm"),
    "two encoders and LLM": ("vision", "audio", "llm"),
    "encoder, LLM and generator": ("vision", "llm", "painter"),
}
SAMPLES = (
    SampleShape((("vision", 1, 2), ("painter", 1, 2)), 5, 3),
    SampleShape((("audio", 1, 1), ("vision", 2, 2)), 4, 1),
    SampleShape((("painter", 2, 2), ("painter", 1, 3), ("vision", 1, 1)), 6, 2),
    SampleShape((), 3, 2),
    SampleShape((("audio", 1, 2), ("painter", 1, 1)), 4, 0),
)
SAMPLE_GROUPS = ([0, 1], [2], [3], [4])
"""Microbatches of samples; the generator makes nothing of the third."""
V_SHAPE = (((0, 1), (3, 4)), ((1, 2), (2, 3)))


def build_case(builder: str, names: tuple[str, ...]) -> GradientCase:
    """The LLM has 2 replicas of 2 V-shaped stages; a generator has 3 replicas; encoders have 1, two of them on one rank."""
    graph = ModelGraph.from_dict({"units": {name: UNITS[name] for name in names}})
    shapes = tuple(SampleShape(_of(names, shape), shape.num_text_tokens, shape.num_target_tokens) for shape in SAMPLES)
    source = RandomSource(graph, shapes, 12)
    units = {"llm": UnitPlan(tuple(Replica((Stage((r,), V_SHAPE[0]), Stage((r + 1,), V_SHAPE[1]))) for r in (0, 2)))}
    if "painter" in names:
        units["painter"] = UnitPlan(tuple(Replica((Stage((rank,), ((0, 4),)),)) for rank in (4, 5, 6)))
    for name in ("vision", "audio"):
        if name in names:
            units[name] = UnitPlan((Replica((Stage((7 if "painter" in names else 4,), ((0, 4),)),)),))
    plan = Plan({name: units[name] for name in names})
    return GradientCase(graph, plan, _assign(source, plan, graph), source, builder=builder)


def _assign(source: RandomSource, plan: Plan, graph: ModelGraph) -> Assignment:
    """Deal microbatches round robin; an encoder has a microbatch for each group of samples that has items for it."""
    units = {}
    for name, unit in plan.units.items():
        if graph.unit(name) in graph.encoders:
            found = [
                [
                    (sample, index)
                    for sample in group
                    for index, item in enumerate(source.lengths(sample).items)
                    if item.unit == name
                ]
                for group in SAMPLE_GROUPS
            ]
        else:
            found = [[(sample, -1) for sample in group] for group in SAMPLE_GROUPS]
        filled = [microbatch for microbatch in found if microbatch]
        units[name] = [filled[replica :: unit.data_parallel_size] for replica in range(unit.data_parallel_size)]
    return Assignment.from_dict(units)


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_leaves_a_generator_what_it_is(ranks: RankPool, name: str) -> None:
    case = build_case("1f1b", MODELS["encoder, LLM and generator"])
    assert_matches(replace(case, passes=passes_named(name)), ranks)


PAIRS = [",".join(pair) for pair in itertools.permutations(PASSES, 2) if pair[1] not in PASSES[pair[0]].undone_by]


@pytest.mark.deep(when=lambda names: names.split(",") != sorted(names.split(",")))  # tests/unit has both orders
@pytest.mark.parametrize("names", PAIRS)
def test_every_pair_of_passes_keeps_the_gradients(ranks: RankPool, names: str) -> None:
    """An encoder of two stages, whose first microbatch goes to two of the LLM's, and two replicas of an LLM of two stages."""
    units = {name: UNITS[name] for name in MODELS["encoder and LLM"]}
    graph = ModelGraph.from_dict({"units": units})
    source = RandomSource(graph, tuple(replace(shape, items=_of(units, shape)) for shape in SAMPLES), 12)
    first, second, third = (Replica((Stage((rank,), ((0, 2),)), Stage((rank + 1,), ((2, 4),)))) for rank in (0, 2, 4))
    plan = Plan({"vision": UnitPlan((first,)), "llm": UnitPlan((second, third))})
    assignment = Assignment.from_dict(
        {"vision": [[[(0, 0), (1, 0)], [(2, 0)]]], "llm": [[[(0, -1)], [(2, -1)], [(4, -1)]], [[(3, -1)], [(1, -1)]]]}
    )
    assert_matches(GradientCase(graph, plan, assignment, source, builder="1f1b", passes=passes_named(names)), ranks)


@pytest.mark.deep(when=lambda builder, model: builder not in ("1f1b", "zb-v") and model != "encoder, LLM and generator")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_every_builder_trains_every_model(ranks: RankPool, builder: str, model: str) -> None:
    assert_matches(build_case(builder, MODELS[model]), ranks)


@pytest.mark.parametrize("builder", [name for name, row in BUILDERS.items() if row.virtual_stages is not VirtualStages.NO_USE])
def test_virtual_stages_of_every_unit_made_from_sizes(ranks: RankPool, builder: str) -> None:
    """Five layers in four ranges; three and two microbatches on two stages, so that groups are uneven, too."""
    units = {name: {**UNITS[name], "num_layers": 5} for name in MODELS["encoder, LLM and generator"]}
    graph = ModelGraph.from_dict({"units": units})
    sizes = {name: UnitSizes(1, 2, 1, 2 if name == "llm" else 1, 2) for name in units}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=8)
    plan = fold_stages(plan) if BUILDERS[builder].is_folded else plan
    source = RandomSource(graph, tuple(replace(shape, items=_of(units, shape)) for shape in SAMPLES), 12)
    assert_matches(GradientCase(graph, plan, _assign(source, plan, graph), source, builder=builder), ranks)


def _of(units: Collection[str], shape: SampleShape) -> tuple[tuple[str, int, int], ...]:
    """The items of a sample that these units take or make."""
    return tuple(item for item in shape.items if item[0] in units)
