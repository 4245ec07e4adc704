"""Small graphs, plans and assignments for the schedule tests, and strategies for random ones."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from multimodal.schedule.builders import BUILDERS, fed_encoders
from multimodal.schedule.builders.zb_v import is_v_shaped
from multimodal.values.action import Action, LayerRange
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers
from multimodal.values.shape import StepShape

SHAPE = Transformer(num_layers=8, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16)


def build_graph(*encoders: str, frozen: Sequence[str] = (), frozen_projectors: Sequence[str] = ()) -> ModelGraph:
    """A backbone `llm` behind the named encoders, eight transformer layers each; `joint` takes what all others give."""
    fed = [name for name in encoders if name == "joint"]
    units = [
        Unit(
            name,
            Role.ENCODER,
            SHAPE,
            join="sequence" if name in fed else None,
            freeze_module=name in frozen,
            freeze_projector=name in frozen_projectors,
        )
        for name in encoders
    ]
    llm = Unit("llm", Role.BACKBONE, SHAPE, freeze_module="llm" in frozen)
    return ModelGraph((*units, llm), tuple([(name, "llm" if name in fed else [*fed, "llm"][0]) for name in encoders]))


def build_unit_plan(
    graph: ModelGraph, unit: str, *, dp: int, pp: int, tp: int = 1, first_rank: int = 0, chunks: int = 1, v_shaped: bool = False
) -> UnitPlan:
    """A grid of consecutive ranks; `chunks` layer ranges per stage, dealt in turn, or two in the shape of a V."""
    ranges = split_layers(graph.unit(unit).layers, num_stages=pp * (2 if v_shaped else chunks))
    held = [(ranges[stage], ranges[-1 - stage]) if v_shaped else ranges[stage::pp] for stage in range(pp)]
    starts = [[first_rank + (replica * pp + stage) * tp for stage in range(pp)] for replica in range(dp)]
    return UnitPlan(
        tuple(
            Replica(tuple(Stage(tuple(range(start, start + tp)), layers) for start, layers in zip(row, held, strict=True)))
            for row in starts
        ),
        tp,
    )


class PlacedCase(NamedTuple):
    """The shape of a step, and its samples."""

    shape: StepShape
    assignment: Assignment


def build_case(graph: ModelGraph, *given: Any, **options: Any) -> StepShape:
    return placed_case(graph, *given, **options).shape


def placed_case(
    graph: ModelGraph,
    sizes: dict[str, tuple[int, int, int]],
    groupings: dict[str, list[list[list[int]]]],
    *,
    colocated: bool = False,
    layouts: Mapping[str, Mapping[str, int]] | None = None,
) -> PlacedCase:
    """`sizes`: unit -> (dp, pp, tp); `groupings`: unit -> replica -> microbatch -> samples, one item per sample and encoder.

    `layouts`: unit -> chunks or v_shaped of `build_unit_plan`.
    """
    units, first_rank = {}, 0
    for name in graph.unit_names:
        dp, pp, tp = sizes[name]
        units[name] = build_unit_plan(graph, name, dp=dp, pp=pp, tp=tp, first_rank=first_rank, **(layouts or {}).get(name, {}))
        first_rank += 0 if colocated else dp * pp * tp
    index = {name: -1 if name == "llm" else position for position, name in enumerate(graph.unit_names)}
    assignment = Assignment(
        {
            name: tuple(
                tuple(tuple(Atom(sample, index[name]) for sample in microbatch) for microbatch in replica) for replica in replicas
            )
            for name, replicas in groupings.items()
        }
    )
    return PlacedCase(assignment.shape(graph, Plan(units)), assignment)


def deal(num_samples: int, dp: int) -> list[list[list[int]]]:
    """Samples dealt round robin over `dp` replicas, one per microbatch."""
    return [[[sample] for sample in range(replica, num_samples, dp)] for replica in range(dp)]


@st.composite
def groupings_of(draw: st.DrawFn, atoms: Sequence[Atom], dp: int) -> tuple[tuple[tuple[Atom, ...], ...], ...]:
    """Any grouping of the atoms into microbatches, of any sizes and order, on any replicas; some may stay without."""
    shuffled = draw(st.permutations(atoms))
    replicas: list[list[list[Atom]]] = [[] for _ in range(dp)]
    for atom in shuffled:
        replica = replicas[draw(st.integers(0, dp - 1))]
        if not replica or draw(st.booleans()):
            replica.append([])
        replica[-1].append(atom)
    return tuple(tuple(tuple(microbatch) for microbatch in replica) for replica in replicas)


def cases() -> st.SearchStrategy[StepShape]:
    return placed_cases().map(lambda case: case.shape)


@st.composite
def placed_cases(draw: st.DrawFn) -> PlacedCase:
    """Random graphs (none to three encoders, any part frozen), plans (disjoint, colocated) and assignments."""
    encoders = draw(st.sampled_from([(), ("vision",), ("vision", "audio"), ("vision", "joint"), ("vision", "audio", "joint")]))
    frozen = [unit for unit in (*encoders, "llm") if draw(st.booleans())]
    graph = build_graph(*encoders, frozen=frozen, frozen_projectors=[unit for unit in encoders if draw(st.booleans())])
    colocated = draw(st.booleans())
    alike = colocated and draw(st.booleans())
    units, first_rank = {}, 0
    for name in graph.unit_names:
        if alike and units and name in encoders:
            units[name] = units[encoders[0]]
            continue
        dp, pp, tp = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        layout = draw(st.sampled_from([{}, {}, {"chunks": 2}, {"v_shaped": True}]))
        if draw(st.integers(0, 3)) == 0:
            units[name] = draw(unlike_unit_plans(len(graph.unit(name).layers), first_rank=first_rank))
            first_rank = first_rank if colocated else 1 + max(units[name].ranks)
            continue
        units[name] = build_unit_plan(graph, name, dp=dp, pp=pp, tp=tp, first_rank=first_rank, **layout)
        first_rank += 0 if colocated else dp * pp * tp
    num_items = [[draw(st.integers(0, 2)) for _ in encoders] for _ in range(draw(st.integers(1, 6)))]
    positions = {name: graph.unit_names.index(graph.item_units(name)[0]) for name in encoders}
    placed = {
        name: [Atom(sample, position * 2 + item) for sample, counts in enumerate(num_items) for item in range(counts[position])]
        for name, position in positions.items()
    }
    placed["llm"] = [Atom(sample) for sample in range(len(num_items))]
    assignment = Assignment({name: draw(groupings_of(atoms, units[name].data_parallel_size)) for name, atoms in placed.items()})
    return PlacedCase(assignment.shape(graph, Plan(units)), assignment)


@st.composite
def unlike_unit_plans(draw: st.DrawFn, num_layers: int, *, first_rank: int) -> UnitPlan:
    """Two or three replicas on consecutive ranks, each with its own number of stages, cuts and tensor parallel size.

    Stages hold one layer range, or two: dealt in turn, or in the shape of a V.
    """
    replicas: list[Replica] = []
    free = range(first_rank, first_rank + 8)
    for index in range(draw(st.integers(2, 3))):
        fitting = [
            (size, count)
            for size in (1, 2)
            for count in (1, 2, 3)
            if count <= num_layers and size * count + (index == 0) <= len(free)
        ]
        if not fitting:
            break
        size, count = draw(st.sampled_from(fitting))
        once = list(range(count))
        order = once + draw(st.sampled_from([[], [], once, once[::-1]] if 2 * count <= num_layers else [[]]))
        inner = draw(st.permutations(range(1, num_layers)))[: len(order) - 1]
        ranges = list(zip(order, pairwise([0, *sorted(inner), num_layers]), strict=True))
        held = [tuple(layers for stage, layers in ranges if stage == index) for index in once]
        replicas.append(
            Replica(tuple(Stage(tuple(free[index * size : (index + 1) * size]), held[index], size) for index in once))
        )
        free = free[size * count :]
    return UnitPlan(tuple(replicas))


def builders_for(case: StepShape) -> list[str]:
    """The builders that the layout of a case allows."""
    encoders = [case.plan.units[unit.name] for unit in case.graph.encoders]
    stages = [[[stage.ranks for stage in replica.virtual_stages] for replica in unit.replicas] for unit in encoders]
    has_no_v = not any(is_v_shaped(unit) for unit in case.plan.units.values())
    is_apart = any(each != stages[0] for each in stages)
    return [
        name
        for name, row in BUILDERS.items()
        if not (row.is_folded and has_no_v)
        and not (row.fewest_encoders > 1 and is_apart)
        and (row.takes_fed_encoders or not fed_encoders(case.graph))
    ]


@st.composite
def built_cases(draw: st.DrawFn) -> tuple[StepShape, str]:
    case = draw(cases())
    return case, draw(st.sampled_from(builders_for(case)))


def all_alike(case: StepShape) -> bool:
    return not any(unit.is_unlike for unit in case.plan.units.values())


def reduced_together(action: Action, step: StepShape) -> list[Action]:
    """A collective over replicas and the others that it is one with: where these differ, those of the same layers."""
    held = step.plan.units[action.unit]
    if not held.is_unlike:
        return [action._replace(replica=replica) for replica in range(held.data_parallel_size)]
    covers, found = action.covers, []
    if not isinstance(covers, LayerRange):
        return [action]  # no collective of such replicas
    first = step.plan.virtual_stage(*action[1:4]).layers.start
    for unit, replica, stage in step.stages:
        if unit == action.unit:
            start = first - step.plan.virtual_stage(unit, replica, stage).layers.start
            other = LayerRange(covers.first + start, covers.end + start)
            if other in step.reductions(unit, replica, stage):
                found.append(action._replace(replica=replica, stage=stage, covers=other))
    return found


def written_unit(text: str, num_layers: int) -> UnitPlan:
    """Read where a unit lies: "0|1 (0-4|4-10) / 2,3|4,5 (0-7|7-10)"; / stands between replicas, | between stages.

    Behind the ranks stand the layer ranges of each stage; without them, layers are divided evenly.
    """
    replicas = []
    for replica in text.split(" / "):
        ranks, _, written = replica.partition(" ")
        held = [tuple(map(int, stage.split(","))) for stage in ranks.split("|")]
        layers = [[re.findall(r"\d+", each) for each in stage.split(",")] for stage in written.split("|")] if written else []
        ranges = [tuple((int(first), int(end)) for first, end in stage) for stage in layers]
        ranges = ranges or [(each,) for each in split_layers(("",) * num_layers, num_stages=len(held))]
        replicas.append(Replica(tuple(Stage(each, own, len(each)) for each, own in zip(held, ranges, strict=True))))
    sizes = {stage.tensor_parallel_size for replica in replicas for stage in replica.stages}
    return UnitPlan(tuple(replicas), sizes.pop() if len(sizes) == 1 else 1)


def written_case(plan: Mapping[str, str], samples: Mapping[str, str], **frozen: Sequence[str]) -> PlacedCase:
    """Read a case: where each unit lies, and its samples, "0|2 3 / 1" (| between microbatches); one item of each for an encoder.

    A unit `painter` is a generator behind the LLM.
    """
    graph = build_graph(*(name for name in plan if name not in ("llm", "painter")), **frozen)
    if "painter" in plan:
        graph = ModelGraph((*graph.units, Unit("painter", Role.GENERATOR, SHAPE)), (*graph.edges, ("llm", "painter")))
    units = {name: written_unit(text, len(graph.unit(name).layers)) for name, text in plan.items()}
    item = {unit.name: index if unit.role is Role.ENCODER else -1 for index, unit in enumerate(graph.units)}
    assignment = Assignment(
        {
            name: [
                [[(int(sample), item[name]) for sample in group.split()] for group in replica.split("|") if group.strip()]
                for replica in text.split("/")
            ]
            for name, text in samples.items()
        }
    )
    return PlacedCase(assignment.shape(graph, Plan(units)), assignment)


FOUR = {"vision": "0|1|2|3", "llm": "0|1|2|3"}
GOLDEN: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "one_unit": ({"llm": "0|1|2"}, {"llm": "0|1|2|3|4"}),
    "encoder_dp2_llm_pp2": ({"vision": "0 / 1", "llm": "2|3"}, {**FOUR, "vision": "0|2 / 1|3"}),
    "encoder_dp1_llm_dp2_unequal": ({"vision": "0", "llm": "1 / 2"}, {"vision": "0 1|2 3|4", "llm": "0|1|2 / 3 4"}),
    "frozen_encoder": ({"vision": "0|1", "llm": "2|3"}, FOUR),
    "colocated_one_rank": ({"vision": "0", "llm": "0"}, {"vision": "0|1|2", "llm": "0|1|2"}),
    "colocated_different_tp": ({"vision": "0 / 1", "llm": "0,1"}, {"vision": "0 / 1", "llm": "0|1"}),
    "encoder_copies": ({"vision": "0 / 1", "llm": "0|1"}, {**FOUR, "vision": "0|2 / 1|3"}),
    "crossed_groupings": ({"vision": "0 / 1", "llm": "2"}, {"vision": "0|1 / 2|3", "llm": "3|2|0|1"}),
    "interleaved_llm": ({"vision": "0", "llm": "1|2 (0-3,5-7|3-5,7-10)"}, FOUR),
    "v_shaped_llm": ({"vision": "0", "llm": "1|2 (0-3,7-10|3-5,5-7)"}, FOUR),
    "two_encoders": (dict.fromkeys(("vision", "audio", "llm"), "0|1"), dict.fromkeys(("vision", "audio", "llm"), "0|1|2")),
}
"""The small cases whose schedules are compared with golden text."""


def golden_cases() -> dict[str, StepShape]:
    return {name: case.shape for name, case in placed_golden_cases().items()}


def placed_golden_cases() -> dict[str, PlacedCase]:
    frozen = {"frozen": ["vision"], "frozen_projectors": ["vision"]}
    return {name: written_case(*given, **frozen if name == "frozen_encoder" else {}) for name, given in GOLDEN.items()}


def one_unit(num_stages: int, num_microbatches: int, **layout: int) -> StepShape:
    return build_case(build_graph(), {"llm": (1, num_stages, 1)}, {"llm": deal(num_microbatches, 1)}, layouts={"llm": layout})


def small() -> StepShape:
    return build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": deal(2, 1), "llm": deal(2, 1)})


def copies(num_stages: int, num_microbatches: int, **layout: int) -> StepShape:
    """An encoder in every stage of the LLM; each computes its part of the microbatches."""
    sizes = {"vision": (num_stages, 1, 1), "llm": (1, num_stages, 1)}
    groupings = {"vision": deal(num_microbatches, num_stages), "llm": deal(num_microbatches, 1)}
    return build_case(build_graph("vision"), sizes, groupings, colocated=True, layouts={"llm": layout})
