"""Random plans of up to eight ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan

MAX_RANKS = 8


@st.composite
def plans(
    draw: st.DrawFn, graph: ModelGraph, *, has_unlike_replicas: bool | None = None, num_state_copies: int | None = None
) -> Plan:
    """Each unit on any of up to eight ranks, in any order: apart, on the same ranks, or overlapping in part.

    Replicas of a unit may be unlike. num_state_copies: where weights have copies, replicas are a multiple of so many.
    """
    unlike = set(graph.unit_names) if has_unlike_replicas is None and draw(st.integers(0, 2)) == 0 else set()
    if has_unlike_replicas:
        unlike = {draw(st.sampled_from(graph.unit_names)), draw(st.sampled_from(graph.unit_names))}
    overlap = draw(st.sampled_from(["disjoint", "same", "any", *(["copies"] if graph.encoders else [])]))
    if overlap == "copies" and not unlike:
        return draw(plans_with_copies(graph, num_state_copies))
    units: dict[str, UnitPlan] = {}
    free = list(draw(st.permutations(range(MAX_RANKS)))) if draw(st.booleans()) else list(range(MAX_RANKS))
    for position, name in enumerate(graph.unit_names):
        num_units_left = len(graph.unit_names) - position - 1
        ranks = draw(st.permutations(range(MAX_RANKS))) if overlap == "any" else free
        budget = len(ranks) - (num_units_left if overlap == "disjoint" else 0)
        if overlap == "disjoint" and unlike & set(graph.unit_names[position + 1 :]):
            budget = max(1, budget - 3)
        if name in unlike and budget >= 3:
            units[name] = draw(unlike_unit_plans(graph.unit(name), ranks, budget))
        else:
            units[name] = draw(unit_plans(graph.unit(name), ranks, budget, num_state_copies))
        if overlap == "disjoint":
            free = [rank for rank in free if rank not in units[name].ranks]
    return renumber(units)


@st.composite
def plans_with_copies(draw: st.DrawFn, graph: ModelGraph, num_state_copies: int | None) -> Plan:
    """Whole copies of every encoder beside each stage of the LLM, in any order; generators on any of these ranks or others."""
    ranks = draw(st.permutations(range(MAX_RANKS)))
    units = {name: draw(unit_plans(graph.unit(name), ranks, MAX_RANKS, num_state_copies)) for name in (graph.backbone.name,)}
    stages = [stage.ranks for replica in units[graph.backbone.name].replicas for stage in replica.stages]
    for unit in graph.encoders:
        whole = ((0, len(unit.layers)),)
        replicas = tuple(Replica((Stage(ranks, whole),)) for ranks in draw(st.permutations(stages)))
        llm = units[graph.backbone.name]
        tp, cp = llm.tensor_parallel_size, llm.context_parallel_size
        sizes = [pair for pair in ((tp, cp), (cp, tp), (1, tp * cp)) if divides(pair[0], unit)]
        units[unit.name] = UnitPlan(replicas, *draw(st.sampled_from(sizes)))
    for unit in graph.generators:
        units[unit.name] = draw(unit_plans(unit, draw(st.permutations(range(MAX_RANKS))), MAX_RANKS, num_state_copies))
    return renumber({name: units[name] for name in graph.unit_names})


@st.composite
def unit_plans(draw: st.DrawFn, unit: Unit, ranks: Sequence[int], budget: int, num_state_copies: int | None = None) -> UnitPlan:
    """TP 1-3, CP 1-4, PP 1-3, DP 1-3 within `budget` ranks, from the front of `ranks`; layers cut anywhere, virtual stages."""
    allowed = [1, *(size for size in (2, 3) if divides(size, unit))]
    grid = itertools.product((1, 2, 3), (1, 2, 3), allowed, draw(st.sampled_from([(1,), (1, 2, 3, 4)])))
    sizes = [(dp, pp, tp, cp) for dp, pp, tp, cp in grid if dp * pp * tp * cp <= budget and pp <= len(unit.layers)]
    if num_state_copies is not None:
        sizes = [each for each in sizes if each[0] % num_state_copies == 0 or each[0] * each[-1] == 1]
    dp, pp, tp, cp = draw(st.sampled_from(sizes))
    ranges = draw(layer_ranges(len(unit.layers), pp))
    size = tp * cp
    taken = [tuple(sorted(ranks[index * size : (index + 1) * size])) for index in range(dp * pp)]
    replicas = [Replica(tuple(Stage(taken[replica * pp + stage], ranges[stage]) for stage in range(pp))) for replica in range(dp)]
    return UnitPlan(tuple(replicas), tp, cp)


@st.composite
def unlike_unit_plans(draw: st.DrawFn, unit: Unit, ranks: Sequence[int], budget: int) -> UnitPlan:
    """Two or three replicas within `budget` ranks, each with PP 1-3, stages of TP 1-4 (CP 1-2), cut anywhere, also virtual."""
    allowed = [size for size in (1, 2, 3, 4) if divides(size, unit)]
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


def divides(size: int, unit: Unit) -> bool:
    numbers = *unit.divided_widths.values(), unit.transformer.hidden_size
    return all(number % size == 0 for number in numbers)


def renumber(units: dict[str, UnitPlan]) -> Plan:
    used = sorted({rank for unit in units.values() for rank in unit.ranks})
    new = {rank: index for index, rank in enumerate(used)}

    def renumbered(stage: Stage) -> Stage:
        return replace(stage, ranks=tuple(sorted(new[rank] for rank in stage.ranks)))

    def moved(unit: UnitPlan) -> UnitPlan:
        replicas = tuple(Replica(tuple(map(renumbered, replica.stages))) for replica in unit.replicas)
        return replace(unit, replicas=replicas)

    return Plan({name: moved(unit) for name, unit in units.items()})
