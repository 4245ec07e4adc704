"""Small models whose samples are dealt round robin: what tests of one technique hold against one process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.random_source import RandomSource, SampleShape

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16, "init_method_std": 0.3}
IMAGE = {"patch_size": 2, "in_channels": 1, "merge_size": 1}
UNITS: dict[str, dict[str, Any]] = {
    "vision": {"role": "encoder", "image": IMAGE, **SHAPE},
    "audio": {"role": "encoder", "image": {**IMAGE, "merge_size": 2}, **SHAPE, "hidden_size": 8},
    "llm": {"role": "backbone", **SHAPE},
    "painter": {"role": "generator", "image": {**IMAGE, "patch_size": 3}, **SHAPE, "hidden_size": 24},
}
SAMPLES = (
    SampleShape((("vision", 1, 2), ("painter", 1, 2)), 5, 3),
    SampleShape((("audio", 1, 1), ("vision", 2, 2)), 4, 1),
    SampleShape((("painter", 2, 2), ("painter", 1, 3), ("vision", 1, 1)), 6, 2),
    SampleShape((), 3, 2),
    SampleShape((("audio", 1, 2), ("painter", 1, 1)), 4, 0),
)
GROUPS = ([0, 1], [2], [3], [4])
"""Microbatches of samples; the generator makes nothing of the third."""
ONE_ITEM_EACH = tuple(SampleShape((("vision", 1, size), ("audio", 1, 1)), 2 + size, 2) for size in (1, 2, 3, 1, 2, 1))
"""Samples of other sizes, for microbatches of one."""
Units = Mapping[str, Mapping[str, Any]]


def unit_plan(first: int, *, dp: int = 1, cp: int = 1, tp: int = 1, pp: int = 1, num_layers: int = 4) -> UnitPlan:
    """Replicas on consecutive ranks, stage by stage."""
    size, held = cp * tp, num_layers // pp
    ranks = iter(range(first, first + dp * pp * size))
    replicas = [
        Replica(tuple(Stage(tuple(islice(ranks, size)), ((stage * held, (stage + 1) * held),)) for stage in range(pp)))
        for _ in range(dp)
    ]
    return UnitPlan(tuple(replicas), tp, cp)


def described(*names: str, **changes: Any) -> Units:
    return {name: {**UNITS[name], **changes} for name in names}


def source_of(units: Units, shapes: Sequence[SampleShape] = SAMPLES) -> RandomSource:
    """Samples with those of their items that these units take or make."""
    taken = [replace(shape, items=tuple(item for item in shape.items if item[0] in units)) for shape in shapes]
    return RandomSource(ModelGraph.from_dict({"units": units}), tuple(taken), 12)


def dealt(source: RandomSource, plan: Plan, groups: Sequence[Sequence[int]] | None = GROUPS) -> Assignment:
    """Microbatches round robin; an encoder has one for each group of samples (None: for each sample) that has items for it."""
    units = {}
    for name, unit in plan.units.items():
        found = [
            [atom for sample in group for atom in _atoms_of(source, name, sample)]
            for group in groups or [[index] for index in range(len(source))]
        ]
        filled = [microbatch for microbatch in found if microbatch]
        units[name] = [filled[replica :: unit.data_parallel_size] for replica in range(unit.data_parallel_size)]
    return Assignment(units)


def _atoms_of(source: RandomSource, name: str, sample: int) -> list[tuple[int, int]]:
    if source.graph.unit(name) not in source.graph.encoders:
        return [(sample, -1)]
    return [(sample, index) for index, (unit, *_) in enumerate(source.shapes[sample].items) if unit == name]


def dealt_case(
    units: Units,
    plan: Plan,
    *,
    shapes: Sequence[SampleShape] = SAMPLES,
    groups: Sequence[Sequence[int]] | None = GROUPS,
    **options: Any,
) -> GradientCase:
    source = source_of(units, shapes)
    return GradientCase(source.graph, plan, dealt(source, plan, groups), source, **options)
