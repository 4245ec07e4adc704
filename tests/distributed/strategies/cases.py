"""Random cases for tests against one process: samples, assignments and what the runtime must get right with them."""

from collections.abc import Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance.placement import even_out_replicas
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.align_replicas import check_expert_groups
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.move_actions import defer_receives, delay_forward, fill
from multimodal.schedule.passes.reduce_by_layer import gather_parameters, reduce_by_layer
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.shape import StepShape
from tests.distributed.gradient_case import GradientCase
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.schedule_rewrites import CutMicrobatches, FillWithWeightGradients, RunInsideWaits, SplitStages
from tests.distributed.strategies.graphs import MAX_AUDIO_TOKENS, graphs
from tests.distributed.strategies.plans import MAX_RANKS, divides, layer_ranges, plans, renumber
from tests.unit.schedule.schedule_cases import groupings_of

VOCAB_SIZE = 12


@st.composite
def samples(draw: st.DrawFn, units: Sequence[Unit]) -> tuple[SampleShape, ...]:
    """One to seven samples with up to three items; some without items, some without target tokens, but not all."""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        takers = [draw(st.sampled_from(units)) for _ in range(draw(st.integers(0, 3)) if units else 0)]
        items = [
            (unit.name, draw(st.integers(3, 2 * MAX_AUDIO_TOKENS)), 1)
            if unit.audio is not None
            else (unit.name, draw(st.integers(1, 2)), draw(st.integers(1, 3)))
            for unit in takers
        ]
        found.append(SampleShape(tuple(items), draw(st.integers(2, 6)), draw(st.integers(0, 2))))
    if not any(sample.num_target_tokens for sample in found):
        found[0] = SampleShape(found[0].items, found[0].num_text_tokens, 1)
    return tuple(found)


@st.composite
def assignments(draw: st.DrawFn, graph: ModelGraph, plan: Plan, source: RandomSource) -> Assignment:
    """Any grouping of every unit's atoms, in any order, on any replica, apart from all other units'.

    Generators are given all samples, or only those that have something for them.
    """
    atoms: dict[str, list[Atom]] = {name: [] for name in graph.unit_names}
    gives_all = draw(st.booleans())
    for index in range(len(source)):
        atoms["llm"].append(Atom(index))
        items = source.lengths(index).items
        for generator in graph.generators:
            if gives_all or any(item.unit == generator.name for item in items):
                atoms[generator.name].append(Atom(index))
        for item, lengths in enumerate(items):
            for name in lengths.units if graph.unit(lengths.unit).role is Role.ENCODER else ():
                atoms[name].append(Atom(index, item))
    return Assignment({name: draw(groupings_of(atoms[name], plan.units[name].data_parallel_size)) for name in graph.unit_names})


@st.composite
def gradient_cases(
    draw: st.DrawFn,
    *,
    has_unlike_replicas: bool | None = None,
    has_encoder_edges: bool | None = None,
    has_conditions: bool | None = None,
    num_state_copies: int | None = None,
) -> GradientCase:
    """Anything that the runtime must get right.

    has_unlike_replicas: True: in the LLM or another unit; False: in none. has_encoder_edges: whether encoders feed encoders,
    has_conditions: generators, of which there are some then. num_state_copies: None if no unit has replicas.
    """
    of_graph: dict[str, Any] = {"has_encoder_edges": has_encoder_edges, "has_conditions": has_conditions}
    if has_conditions:
        of_graph |= {"encoders": [("vision",), ("vision", "audio")], "generators": [("painter",), ("painter", "engraver")]}
    graph = draw(graphs(divisor=draw(st.sampled_from([2, 2, 3])), **of_graph))
    plan = draw(plans(graph, has_unlike_replicas=has_unlike_replicas, num_state_copies=num_state_copies))
    has_replicas = any(unit.data_parallel_size > 1 for unit in plan.units.values())
    source = RandomSource(graph, draw(samples((*graph.item_encoders, *graph.generators))), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    shape = assignment.shape(graph, plan)
    builders = [name for name in sorted(BUILDERS) if can_build(name, shape)]
    options: dict[str, Any] = {"builder": draw(st.sampled_from(builders)), "sequence_parallel": draw(st.booleans())}
    options |= {"recompute": draw(st.sampled_from([None, "selective", "full"])), "passes": draw(passes())}
    options["attention_mask"] = draw(st.sampled_from(MaskMode))
    options["attention_backend"] = draw(st.sampled_from(["auto", "blocks"]))
    options["distribution"] = draw(st.sampled_from(list(TokenDistribution)))
    options |= {"block_size": draw(st.sampled_from([4, 8, 128])), "num_overlapped_parts": draw(st.sampled_from([1, 3]))}
    options["num_state_copies"] = num_state_copies if has_replicas else None
    return GradientCase(graph, plan, assignment, source, **options)


@st.composite
def passes(draw: st.DrawFn) -> tuple[Pass, ...]:
    """Nothing; split backwards, cut microbatches, both, weight gradients as fillers; reductions by layer; what a run may use, and
    passes that move what earlier ones made."""
    seed = draw(st.integers(0, 1000))
    split, cut, filled = SplitStages(seed), CutMicrobatches(seed), FillWithWeightGradients(seed)
    chosen: tuple[Pass, ...] = (split_backward, fill, gather_parameters)
    layered = (reduce_by_layer,), (gather_parameters, cut, reduce_by_layer)
    moving = (fill, split_backward, defer_receives), (reduce_by_layer, fill, delay_forward, split_backward)
    single: tuple[tuple[Pass, ...], ...] = ((), (split,), (cut,))
    return draw(st.sampled_from([*single, (split, filled), (split, cut, filled), (cut, split), chosen, *layered, *moving]))


def can_build(builder: str, shape: StepShape) -> bool:
    """Return True if a run may have the schedule and its builder allows the plan; most allow every plan."""
    row = BUILDERS[builder]
    if not (row.is_folded or row.fewest_encoders > 1 or not row.takes_fed_encoders):
        return True
    try:
        BUILDERS[builder](shape)
    except ScheduleError:
        return False
    return True


@st.composite
def inside_cases(draw: st.DrawFn) -> GradientCase:
    """Encoders on the LLM's ranks, with sizes of their own, that run inside its waits for tensor parallel collectives."""
    divisor = draw(st.sampled_from([2, 2, 3]))
    graph = draw(graphs(encoders=[("vision",), ("vision", "audio")], generators=[()], divisor=divisor))
    plan = draw(plans_on_shared_ranks(graph))
    source = RandomSource(graph, draw(samples(graph.item_encoders)), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    shape = assignment.shape(graph, plan)
    sequence_parallel, recompute = draw(st.booleans()), draw(st.sampled_from([None, "selective", "full"]))
    options = RunOptions(transformer_impl="local", sequence_parallel=sequence_parallel, recompute=recompute)
    builder = draw(st.sampled_from([name for name in ("1f1b", "optimus", "gpipe") if can_build(name, shape)]))
    inside = RunInsideWaits(draw(st.integers(0, 1000)), options, density=draw(st.sampled_from([0.2, 0.7, 1.0])))
    layers = {"sequence_parallel": sequence_parallel, "recompute": recompute}
    return GradientCase(graph, plan, assignment, source, builder=builder, passes=(inside,), **layers)


@st.composite
def plans_on_shared_ranks(draw: st.DrawFn, graph: ModelGraph) -> Plan:
    """The LLM with TP 2-4, PP 1-4, V 1-2 on up to 8 ranks; on these, encoders with a TP and a PP that divide its."""
    llm = graph.backbone
    sizes = [size for size in (2, 3, 4) if divides(size, llm)]
    shapes = [(size, count) for size in sizes for count in range(1, 5) if size * count <= 8 and count <= len(llm.layers)]
    llm_size, num_stages = draw(st.sampled_from(shapes))
    groups = [tuple(range(first, first + llm_size)) for first in range(0, llm_size * num_stages, llm_size)]
    units: dict[str, UnitPlan] = {}
    for unit in graph.units:
        is_encoder = unit.role is Role.ENCODER
        own_sizes = [size for size in (1, 2, 3) if llm_size % size == 0 and divides(size, unit)]
        size = draw(st.sampled_from(own_sizes)) if is_encoder else llm_size
        counts = [count for count in range(1, num_stages + 1) if num_stages % count == 0 and count <= len(unit.layers)]
        pipeline_size = draw(st.sampled_from(counts)) if is_encoder else num_stages
        ranges = draw(layer_ranges(len(unit.layers), pipeline_size))
        parts = [[group[first : first + size] for group in groups] for first in range(0, llm_size, size)]
        pipelines = [part[first : first + pipeline_size] for part in parts for first in range(0, num_stages, pipeline_size)]
        units[unit.name] = UnitPlan(tuple(Replica(tuple(map(Stage, pipeline, ranges))) for pipeline in pipelines), size)
    return Plan(units)


@st.composite
def expert_cases(draw: st.DrawFn) -> GradientCase:
    """An LLM whose replicas share experts: two or four to a group, beside encoders and generators anywhere."""
    graph = draw(graphs(has_experts=True))
    plan = draw(plans(graph, has_unlike_replicas=False))
    dp, pp, tp, cp = draw(
        st.sampled_from([(2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 1), (4, 1, 1, 1), (4, 2, 1, 1), (2, 1, 1, 2), (2, 1, 2, 2)])
    )
    ranges, size = draw(layer_ranges(len(graph.backbone.layers), pp)), tp * cp
    ranks = draw(st.permutations(range(MAX_RANKS)))
    of_stages = [sorted(ranks[stage * dp * size : (stage + 1) * dp * size]) for stage in range(pp)]  # in the order of replicas
    stages = [
        tuple(Stage(tuple(of_stages[each][replica * size : (replica + 1) * size]), ranges[each]) for each in range(pp))
        for replica in range(dp)
    ]
    experts = draw(st.sampled_from([2, dp]))
    llm = UnitPlan(tuple(map(Replica, stages)), tp, cp, expert_parallel_size=experts)
    plan = renumber({name: llm if name == "llm" else unit for name, unit in plan.units.items()})
    source = RandomSource(graph, draw(samples((*graph.item_encoders, *graph.generators))), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    builder = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
    chosen = draw(st.sampled_from([(), (gather_parameters,), (reduce_by_layer,), (SplitStages(0),), (fill, split_backward)]))
    # Others are refused: where encoders and replicas of the LLM wait for each other in a circle, or orders differ (zb-h1).
    shape = even_out_replicas(assignment, plan=plan).shape(graph, plan)
    assume(_keeps_experts_together(builder, shape, chosen))
    layers = {"sequence_parallel": draw(st.booleans()), "recompute": draw(st.sampled_from([None, "selective", "full"]))}
    return GradientCase(graph, plan, assignment, source, builder=builder, passes=chosen, **layers)


def _keeps_experts_together(builder: str, shape: StepShape, passes: tuple[Pass, ...]) -> bool:
    try:
        check_expert_groups(build_schedule(BUILDERS[builder], shape, passes=passes))
    except ScheduleError:
        return False
    return True
