"""Random graphs, plans, assignments and samples for the master test."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from multimodal.attention.bitfield import MaskMode
from multimodal.balance.algorithms.distribute_tokens import TokenDistribution
from multimodal.balance.placement import even_out_replicas
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.expert_groups import check_expert_groups
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.defer_receives import defer_receives
from multimodal.schedule.passes.delay_forward import delay_forward
from multimodal.schedule.passes.fill import fill
from multimodal.schedule.passes.gather_parameters import gather_parameters
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import AudioInput, Experts, ImageInput, Lora, ModelGraph, Queries, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.step_graph import StepGraph
from tests.distributed.gradient_case import GradientCase
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.schedule_rewrites import CutMicrobatches, FillWithWeightGradients, RunInsideWaits, SplitStages

MAX_RANKS = 8
VOCAB_SIZE = 12
MAX_AUDIO_TOKENS = 6
PROJECTORS: list[dict[str, Any]] = [
    {},
    {"projector_hidden_size": 6},
    {"has_linear_projector": True, "projector_norm": "merged"},
    {"queries": Queries(3)},
    {"queries": Queries(2, 2, True, hidden_size=12, num_attention_heads=6, ffn_hidden_size=12), "projector_norm": "none"},
]


@st.composite
def gradient_cases(
    draw: st.DrawFn,
    *,
    has_unlike_replicas: bool | None = None,
    has_encoder_edges: bool | None = None,
    has_conditions: bool | None = None,
) -> GradientCase:
    """Anything that the runtime must get right.

    has_unlike_replicas: True: in the LLM or another unit; False: in none. has_encoder_edges: whether encoders feed encoders,
    has_conditions: generators, of which there are some then.
    """
    of_graph: dict[str, Any] = {"has_encoder_edges": has_encoder_edges, "has_conditions": has_conditions}
    if has_conditions:
        of_graph |= {"encoders": [("vision",), ("vision", "audio")], "generators": [("painter",), ("painter", "engraver")]}
    graph = draw(graphs(divisor=draw(st.sampled_from([2, 2, 3])), **of_graph))
    plan = draw(plans(graph, has_unlike_replicas=has_unlike_replicas))
    source = RandomSource(graph, draw(samples((*graph.item_encoders, *graph.generators))), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    step = StepGraph(graph, plan, assignment)
    return GradientCase(
        graph,
        plan,
        assignment,
        source,
        builder=draw(st.sampled_from([name for name in sorted(BUILDERS) if _can_build(name, step)])),
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from([None, "selective", "full"])),
        passes=draw(passes()),
        attention_mask=draw(st.sampled_from(MaskMode)),
        attention_backend=draw(st.sampled_from(["auto", "blocks"])),
        distribution=draw(st.sampled_from(list(TokenDistribution))),
        block_size=draw(st.sampled_from([4, 8, 128])),
        num_overlapped_parts=draw(st.sampled_from([1, 3])),
    )


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


@st.composite
def inside_cases(draw: st.DrawFn) -> GradientCase:
    """Encoders on the LLM's ranks, with sizes of their own, that run inside its waits for tensor parallel collectives."""
    divisor = draw(st.sampled_from([2, 2, 3]))
    graph = draw(graphs(encoders=[("vision",), ("vision", "audio")], generators=[()], divisor=divisor))
    plan = draw(plans_on_shared_ranks(graph))
    source = RandomSource(graph, draw(samples(graph.item_encoders)), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    step = StepGraph(graph, plan, assignment)
    sequence_parallel, recompute = draw(st.booleans()), draw(st.sampled_from([None, "selective", "full"]))
    options = RunOptions(transformer_impl="local", sequence_parallel=sequence_parallel, recompute=recompute)
    return GradientCase(
        graph,
        plan,
        assignment,
        source,
        builder=draw(st.sampled_from([name for name in ("1f1b", "optimus", "gpipe") if _can_build(name, step)])),
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        passes=(RunInsideWaits(draw(st.integers(0, 1000)), options, density=draw(st.sampled_from([0.2, 0.7, 1.0]))),),
    )


@st.composite
def plans_on_shared_ranks(draw: st.DrawFn, graph: ModelGraph) -> Plan:
    """The LLM with TP 2-4, PP 1-4, V 1-2 on up to 8 ranks; on these, encoders with a TP and a PP that divide its."""
    llm = graph.backbone
    sizes = [size for size in (2, 3, 4) if _divides(size, llm)]
    shapes = [(size, count) for size in sizes for count in range(1, 5) if size * count <= 8 and count <= len(llm.layers)]
    llm_size, num_stages = draw(st.sampled_from(shapes))
    groups = [tuple(range(first, first + llm_size)) for first in range(0, llm_size * num_stages, llm_size)]
    units: dict[str, UnitPlan] = {}
    for unit in graph.units:
        is_encoder = unit.role is Role.ENCODER
        own_sizes = [size for size in (1, 2, 3) if llm_size % size == 0 and _divides(size, unit)]
        size = draw(st.sampled_from(own_sizes)) if is_encoder else llm_size
        counts = [count for count in range(1, num_stages + 1) if num_stages % count == 0 and count <= len(unit.layers)]
        pipeline_size = draw(st.sampled_from(counts)) if is_encoder else num_stages
        ranges = draw(layer_ranges(len(unit.layers), pipeline_size))
        parts = [[group[first : first + size] for group in groups] for first in range(0, llm_size, size)]
        pipelines = [part[first : first + pipeline_size] for part in parts for first in range(0, num_stages, pipeline_size)]
        units[unit.name] = UnitPlan(tuple(Replica(tuple(map(Stage, pipeline, ranges))) for pipeline in pipelines), size)
    return Plan(units)


def _divides(size: int, unit: Unit) -> bool:
    """Return whether a unit can have this tensor parallel size."""
    numbers = *unit.divided_widths.values(), unit.transformer.hidden_size
    return all(number % size == 0 for number in numbers)


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    encoders: Sequence[tuple[str, ...]] = (("vision",), (), ("vision", "audio")),
    generators: Sequence[tuple[str, ...]] = ((), (), ("painter",), ("painter", "engraver")),
    divisor: int = 2,
    has_experts: bool | None = None,
    has_encoder_edges: bool | None = None,
    has_conditions: bool | None = None,
) -> ModelGraph:
    """The LLM alone, or behind one or two encoders, or before one or two generators, or all; anything frozen, but not all.

    divisor: a tensor parallel size that all units can have; has_experts: whether some of the LLM's layers have; None: sometimes.
    has_encoder_edges: whether encoders feed encoders, has_conditions: generators; None: sometimes.
    """
    names, generator_names = draw(st.sampled_from(encoders)), draw(st.sampled_from(generators))
    frozen = {name: draw(st.booleans()) for name in (*names, "llm", *generator_names)}
    frozen_projectors = {name: draw(st.booleans()) for name in (*names, *generator_names)}
    if all(frozen.values()) and all(frozen_projectors.values()):
        frozen[draw(st.sampled_from(sorted(frozen)))] = False
    adapters = {name: draw(loras(name)) for name in (*names, "llm", *generator_names)}
    encoder_units = [
        Unit(
            name,
            Role.ENCODER,
            draw(transformers(channels=(4, 8), divisor=divisor, has_rotary_positions=name != "audio")),
            ImageInput(patch_size=2, in_channels=1, merge_size=draw(st.sampled_from([1, 2]))) if name != "audio" else None,
            draw(sounds()) if name == "audio" else None,
            **draw(st.sampled_from(PROJECTORS)),
            lora=adapters[name],
            freeze_module=frozen[name],
            freeze_projector=frozen_projectors[name],
        )
        for name in names
    ]
    llm = Unit(
        "llm",
        Role.BACKBONE,
        draw(transformers(channels=(2, 4, 6), divisor=divisor)),
        untie_embeddings_and_output_weights=draw(st.booleans()),
        lora=adapters["llm"],
        freeze_module=frozen["llm"],
    )
    if draw(st.integers(0, 3)) == 0 if has_experts is None else has_experts:
        llm = draw(with_experts(llm))
    generator_units = [
        Unit(
            name,
            Role.GENERATOR,
            draw(transformers(channels=(4, 8), divisor=divisor)),
            ImageInput(patch_size=draw(st.sampled_from([1, 3])), in_channels=1, merge_size=draw(st.sampled_from([1, 2]))),
            lora=adapters[name],
            freeze_module=frozen[name],
            freeze_projector=frozen_projectors[name],
        )
        for name in generator_names
    ]
    edges = (*((name, "llm") for name in names), *(("llm", name) for name in generator_names))
    graph = ModelGraph((*encoder_units, llm, *generator_units), edges)
    chosen = names and (draw(st.integers(0, 4)) == 0 if has_encoder_edges is None else has_encoder_edges)
    graph = draw(encoder_edges(graph, divisor=divisor) if chosen else deepstacks(graph))
    pairs = [(source, target) for source in graph.upstream("llm") for target in generator_names]
    given = draw(st.integers(0, 2)) == 0 if has_conditions is None else has_conditions
    return replace(graph, edges=(*graph.edges, *(pair for pair in pairs if given and draw(st.integers(0, 3)))))


@st.composite
def encoder_edges(draw: st.DrawFn, graph: ModelGraph, *, divisor: int) -> ModelGraph:
    """The same with an encoder behind that of images, which may take features or tokens of a second one as well."""
    first, rest = graph.encoders[0], graph.units[1:]
    join = draw(st.sampled_from(["features", "sequence"]))
    entries, shape = [first], draw(transformers(channels=(4, 8), divisor=divisor))
    if draw(st.integers(0, 2)) == 0:
        shape = replace(shape, num_layers=0)
    if draw(st.booleans()):
        other = draw(transformers(channels=(4, 8), divisor=divisor))
        entries.append(replace(first, name="second", transformer=other, freeze_module=draw(st.booleans()), lora=None))
    if join == "features" and (len(entries) > 1 or draw(st.booleans())):
        norm = draw(st.sampled_from(["patches", "none"]))
        plain = {"has_projector": False, "has_linear_projector": False, "projector_hidden_size": None, "queries": None}
        entries = [replace(each, **plain, freeze_projector=False, projector_norm=norm, lora=None) for each in entries]
        shape = replace(shape, hidden_size=sum(each.merged_size for each in entries))
    last = Unit(
        "joint",
        Role.ENCODER,
        shape,
        join=join,
        **draw(st.sampled_from(PROJECTORS)),
        freeze_module=draw(st.booleans()),
        freeze_projector=draw(st.booleans()),
    )
    inner = [(each.name, last.name) for each in entries]
    kept = [edge for edge in graph.edges if edge[0] != first.name]
    return ModelGraph((*entries, last, *rest), (*inner, (last.name, graph.backbone.name), *kept))


@st.composite
def with_experts(draw: st.DrawFn, llm: Unit) -> Unit:
    """The same LLM with four experts in all of its layers, or in some."""
    experts = Experts(
        num_experts=4,
        router_topk=draw(st.integers(1, 3)),
        ffn_hidden_size=draw(st.sampled_from([None, 12])),
        shared_expert_intermediate_size=draw(st.sampled_from([None, 12])),
        aux_loss_coeff=draw(st.sampled_from([0.0, 0.5])),
        router_pre_softmax=draw(st.booleans()),
    )
    shape = replace(llm.transformer, experts=experts, add_bias_linear=False)
    count = shape.num_layers
    dense = draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    kinds = ("token_embedding", *("transformer" if each in dense else "moe_transformer" for each in range(count)), "head")
    lora = llm.lora
    if lora is not None:
        attention = [name for name in lora.modules("transformer") if name in ("linear_qkv", "linear_proj")]
        lora = replace(lora, targets=(*lora.targets, *(f"moe_transformer.{name}" for name in attention)))
    return replace(llm, transformer=shape, layer_kinds=kinds, lora=lora)


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
    plan = _renumber({name: llm if name == "llm" else unit for name, unit in plan.units.items()})
    source = RandomSource(graph, draw(samples((*graph.item_encoders, *graph.generators))), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    builder = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
    chosen = draw(st.sampled_from([(), (gather_parameters,), (reduce_by_layer,), (SplitStages(0),), (fill, split_backward)]))
    # Others are refused: where encoders and replicas of the LLM wait for each other in a circle, or orders differ (zb-h1).
    step = StepGraph(graph, plan, even_out_replicas(assignment, plan=plan))
    assume(_keeps_experts_together(builder, step, chosen))
    return GradientCase(
        graph,
        plan,
        assignment,
        source,
        builder=builder,
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from([None, "selective", "full"])),
        passes=chosen,
    )


@st.composite
def deepstacks(draw: st.DrawFn, graph: ModelGraph) -> ModelGraph:
    """The same with learned positions of images, and with layers of their encoder that go to the LLM, or without."""

    def changed(unit: Unit) -> Unit:
        if unit.role is not Role.ENCODER or unit.image is None:
            return unit
        in_both = min(unit.transformer.num_layers, graph.backbone.transformer.num_layers)
        most = 0 if unit.has_linear_projector or unit.queries else in_both
        layers = draw(st.sets(st.integers(0, unit.transformer.num_layers - 1), max_size=most)) if most else ()
        position_grid = draw(st.sampled_from([None, 3]))
        return replace(unit, image=replace(unit.image, position_grid=position_grid, deepstack_layers=tuple(sorted(layers))))

    return replace(graph, units=tuple(map(changed, graph.units)))


@st.composite
def sounds(draw: st.DrawFn) -> AudioInput:
    """Whole clips with learned positions, or chunks."""
    return AudioInput(
        num_mel_bins=3,
        merge_factor=draw(st.sampled_from([1, 2])),
        merge=draw(st.sampled_from(["joined", "averaged"])),
        max_tokens=MAX_AUDIO_TOKENS,
        chunk_tokens=draw(st.sampled_from([None, 2, 3])),
    )


@st.composite
def loras(draw: st.DrawFn, unit: str) -> Lora | None:
    """Adapters of none, some or all linear layers, the projector's among them."""
    attention, mlp = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
    chosen = draw(st.sampled_from([(), (), (), attention + mlp, attention[:1] + mlp[1:], attention[1:] + mlp[:1]]))
    if not chosen:
        return None
    projector = draw(st.sampled_from([(), mlp, mlp[1:]])) if unit in ("vision", "audio") else ()
    targets = (*(f"transformer.{name}" for name in chosen), *(f"projector.{name}" for name in projector))
    return Lora(draw(st.sampled_from([1, 3])), draw(st.sampled_from([None, 2.0])), targets)


@st.composite
def transformers(draw: st.DrawFn, *, channels: Sequence[int], divisor: int = 2, has_rotary_positions: bool = True) -> Transformer:
    """Any small shape that a tensor parallel size divides."""
    num_heads = draw(st.sampled_from([divisor, 2 * divisor]))
    head_channels = draw(st.sampled_from(channels))
    return Transformer(
        num_layers=draw(st.integers(1, 4)),
        hidden_size=draw(st.sampled_from([num_heads * head_channels, 4 * divisor, 10 * divisor])),
        num_attention_heads=num_heads,
        ffn_hidden_size=draw(st.sampled_from([4 * divisor, 7 * divisor])),
        num_query_groups=draw(st.sampled_from([None, divisor])),
        kv_channels=head_channels,
        normalization=draw(st.sampled_from(["RMSNorm", "LayerNorm"])),
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
        add_bias_linear=draw(st.booleans()),
        add_qkv_bias=draw(st.booleans()),
        has_rotary_positions=has_rotary_positions,
        init_method_std=0.3,
    )


@st.composite
def plans(draw: st.DrawFn, graph: ModelGraph, *, has_unlike_replicas: bool | None = None) -> Plan:
    """Each unit on any of up to eight ranks, in any order: apart, on the same ranks, or overlapping in part.

    Replicas of a unit may be unlike.
    """
    unlike = set(graph.unit_names) if has_unlike_replicas is None and draw(st.integers(0, 2)) == 0 else set()
    if has_unlike_replicas:
        unlike = {draw(st.sampled_from(graph.unit_names)), draw(st.sampled_from(graph.unit_names))}
    overlap = draw(st.sampled_from(["disjoint", "same", "any", *(["copies"] if graph.encoders else [])]))
    if overlap == "copies" and not unlike:
        return draw(plans_with_copies(graph))
    units: dict[str, UnitPlan] = {}
    free = list(draw(st.permutations(range(MAX_RANKS)))) if draw(st.booleans()) else list(range(MAX_RANKS))
    for position, name in enumerate(graph.unit_names):
        num_units_left = len(graph.unit_names) - position - 1
        ranks = draw(st.permutations(range(MAX_RANKS))) if overlap == "any" else free
        budget = len(ranks) - (num_units_left if overlap == "disjoint" else 0)
        if overlap == "disjoint" and unlike & set(graph.unit_names[position + 1 :]):
            budget = max(1, budget - 3)
        build = unlike_unit_plans if name in unlike and budget >= 3 else unit_plans
        units[name] = draw(build(graph.unit(name), ranks, budget))
        if overlap == "disjoint":
            free = [rank for rank in free if rank not in units[name].ranks]
    return _renumber(units)


@st.composite
def plans_with_copies(draw: st.DrawFn, graph: ModelGraph) -> Plan:
    """Whole copies of every encoder beside each stage of the LLM, in any order; generators on any of these ranks or others."""
    ranks = draw(st.permutations(range(MAX_RANKS)))
    units = {name: draw(unit_plans(graph.unit(name), ranks, MAX_RANKS)) for name in (graph.backbone.name,)}
    stages = [stage.ranks for replica in units[graph.backbone.name].replicas for stage in replica.stages]
    for unit in graph.encoders:
        whole = ((0, len(unit.layers)),)
        replicas = tuple(Replica((Stage(ranks, whole),)) for ranks in draw(st.permutations(stages)))
        llm = units[graph.backbone.name]
        tp, cp = llm.tensor_parallel_size, llm.context_parallel_size
        sizes = [pair for pair in ((tp, cp), (cp, tp), (1, tp * cp)) if _divides(pair[0], unit)]
        units[unit.name] = UnitPlan(replicas, *draw(st.sampled_from(sizes)))
    for unit in graph.generators:
        units[unit.name] = draw(unit_plans(unit, draw(st.permutations(range(MAX_RANKS))), MAX_RANKS))
    return _renumber({name: units[name] for name in graph.unit_names})


@st.composite
def unit_plans(draw: st.DrawFn, unit: Unit, ranks: Sequence[int], budget: int) -> UnitPlan:
    """TP 1-3, CP 1-4, PP 1-3, DP 1-3 within `budget` ranks, from the front of `ranks`; layers cut anywhere, and into virtual
    stages."""
    allowed = [1, *(size for size in (2, 3) if _divides(size, unit))]
    grid = itertools.product((1, 2, 3), (1, 2, 3), allowed, draw(st.sampled_from([(1,), (1, 2, 3, 4)])))
    sizes = [(dp, pp, tp, cp) for dp, pp, tp, cp in grid if dp * pp * tp * cp <= budget and pp <= len(unit.layers)]
    dp, pp, tp, cp = draw(st.sampled_from(sizes))
    ranges = draw(layer_ranges(len(unit.layers), pp))
    size = tp * cp
    taken = [tuple(sorted(ranks[index * size : (index + 1) * size])) for index in range(dp * pp)]
    replicas = [Replica(tuple(Stage(taken[replica * pp + stage], ranges[stage]) for stage in range(pp))) for replica in range(dp)]
    return UnitPlan(tuple(replicas), tp, cp)


@st.composite
def unlike_unit_plans(draw: st.DrawFn, unit: Unit, ranks: Sequence[int], budget: int) -> UnitPlan:
    """Two or three replicas within `budget` ranks, each with PP 1-3, and stages of TP 1-4, cut anywhere, also into virtual
    stages; CP 1-2."""
    allowed = [size for size in (1, 2, 3, 4) if _divides(size, unit)]
    cp = draw(st.sampled_from([1, 1, 1, 2])) if budget >= 6 else 1
    replicas: list[Replica] = []
    free = list(ranks[:budget])
    for index in range(draw(st.integers(2, 3))):
        grid = itertools.product((1, 2, 3), allowed)
        kept = cp if index == 0 else 0
        sizes = [(pp, tp) for pp, tp in grid if pp * tp * cp + kept <= len(free) and pp <= len(unit.layers)]
        if not sizes:
            break
        pp, tp = draw(st.sampled_from(sizes))
        stages: list[Stage] = []
        for ranges in draw(layer_ranges(len(unit.layers), pp)):
            own = tp if draw(st.booleans()) else draw(st.sampled_from([size for size in allowed if size <= tp]))
            taken, free = free[: own * cp], free[own * cp :]
            stages.append(Stage(tuple(sorted(taken)), ranges, own))
        replicas.append(Replica(tuple(stages)))
    return UnitPlan(tuple(replicas), context_parallel_size=cp)


@st.composite
def layer_ranges(draw: st.DrawFn, num_layers: int, num_stages: int) -> list[tuple[tuple[int, int], ...]]:
    """Any cut of the layers; each stage holds one range, or two (interleaved, or there and back again)."""
    order = list(range(num_stages))
    if 2 * num_stages <= num_layers:
        order += draw(st.sampled_from([[], order, order[::-1]]))
    inner = draw(st.permutations(range(1, num_layers)))[: len(order) - 1]
    cuts = [0, *sorted(inner), num_layers]
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    for stage, pair in zip(order, itertools.pairwise(cuts), strict=True):
        ranges[stage].append(pair)
    return [tuple(stage) for stage in ranges]


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
    return Assignment({name: draw(_groupings(atoms[name], plan.units[name].data_parallel_size)) for name in graph.unit_names})


@st.composite
def _groupings(draw: st.DrawFn, atoms: Sequence[Atom], num_replicas: int) -> tuple[tuple[Microbatch, ...], ...]:
    replicas: list[list[list[Atom]]] = [[] for _ in range(num_replicas)]
    for atom in draw(st.permutations(atoms)):
        replica = replicas[draw(st.integers(0, num_replicas - 1))]
        if not replica or draw(st.booleans()):
            replica.append([])
        replica[-1].append(atom)
    return tuple(tuple(map(tuple, replica)) for replica in replicas)


def _can_build(builder: str, step: StepGraph) -> bool:
    """Return whether a run may have the schedule and its builder allows the plan; most allow every plan."""
    row = BUILDERS[builder]
    if not row.can_train or not (row.is_folded or row.fewest_encoders > 1 or not row.takes_fed_encoders):
        return row.can_train
    try:
        BUILDERS[builder](step)
    except ScheduleError:
        return False
    return True


def _keeps_experts_together(builder: str, step: StepGraph, passes: tuple[Pass, ...]) -> bool:
    try:
        check_expert_groups(build_schedule(BUILDERS[builder], step, passes=passes))
    except ScheduleError:
        return False
    return True


def _renumber(units: dict[str, UnitPlan]) -> Plan:
    used = sorted({rank for unit in units.values() for rank in unit.ranks})
    new = {rank: index for index, rank in enumerate(used)}

    def renumbered(stage: Stage) -> Stage:
        return replace(stage, ranks=tuple(sorted(new[rank] for rank in stage.ranks)))

    def moved(unit: UnitPlan) -> UnitPlan:
        replicas = tuple(Replica(tuple(map(renumbered, replica.stages))) for replica in unit.replicas)
        return replace(unit, replicas=replicas)

    return Plan({name: moved(unit) for name, unit in units.items()})
