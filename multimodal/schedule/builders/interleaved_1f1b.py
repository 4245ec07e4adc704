"""Interleaved 1F1B (Narayanan et al., Efficient Large-Scale Language Model Training, 2.2); interleaved ZB splits backwards."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from operator import add
from typing import NamedTuple

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.one_f_one_b import MEMORY_SHARE, Depths, forward_floors, microbatch_spans, stage_limits
from multimodal.schedule.encoder_ranges import reduced_units, split_in_line
from multimodal.schedule.fill_pipelines import Movable, fill_pipelines
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.action import Action
from multimodal.values.arrays.rows import Integers, integers
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.cuts import StageKey
from multimodal.values.plan import Plan, Replica, UnitPlan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import BACKWARD, FORWARD, KINDS, StepWork, step_work


class Order(NamedTuple):
    """The actions of one physical stage, as columns."""

    kinds: Integers
    """`KIND_NUMBERS`."""
    chunks: Integers
    """Indices among the stage's layer ranges, counted from upstream."""
    microbatches: Integers


def num_chunks(replica: Replica) -> int:
    """Return the layer ranges per stage if all stages have equally many; else 0."""
    counts = {len(stage.layer_ranges) for stage in replica.stages}
    return counts.pop() if len(counts) == 1 else 0


def build_interleaved_1f1b(shape: StepShape) -> Schedule:
    """Build the interleaved 1F1B schedule over the unit graph, in the compute dialect.

    A unit whose P stages hold v > 1 chunks each, dealt in turn (chunk c of stage s is virtual stage c P + s), runs Megatron's
    order: microbatches go through the chunks in groups of P; stage s runs 2 (P - s - 1) + (v - 1) P forwards, then forwards and
    backwards in turn, then the remaining backwards. The bubble is (P - 1) / (v m) of the work of m microbatches. When m is not a
    multiple of P, groups are at least P and as even as can be (torch.distributed.pipelining's, where those are equal).

    Where other units consume the unit's output, forwards keep their order and backwards keep theirs, and the limit in flight
    decides between the two. Units and replicas without such chunks run 1F1B. Where all units lie on one grid whose lanes hold the
    whole chain of their layers in turn (Megatron-LM balanced), the chain runs Megatron's order as if it were one unit.
    """
    graph, plan = shape.graph, shape.plan
    if orders := list(_chain_orders(shape)):
        return list_schedule(shape, Policy(orders=orders))
    interleaved = {unit: is_interleaved(plan.units[unit]) for unit in graph.unit_names}
    depths, spans = _depths(shape), interleaved_spans(shape)
    limits = stage_limits(depths, spans=spans)
    groups: dict[StageKey, StageKey] = {}
    orders = []
    for unit in (unit for unit in interleaved if interleaved[unit]):
        # A stage's chunks share a limit: the warm-up, one more, and the microbatches that downstream units need in each.
        for stages, each, stage_index in stages_that_share(unit, shape, has_order=is_dealt):
            num_warmup = _num_warmup(stage_index, len(each.stages), len(stages), shape.num_microbatches(*stages[0][:2]))
            limits[stages[0]] = num_warmup + 1 + sum(spans[stage] for stage in stages)
            groups.update(dict.fromkeys(stages, stages[0]))
        orders_of = partial(_orders_of_stage, is_exact=not shape.forward_only and not graph.downstream(unit))
        orders += ordered_pieces(unit, step_work(shape), has_order=is_dealt, orders_of=orders_of)
    policy = Policy(forward_limits=limits, forward_floors=forward_floors(shape.plan, limits), group_of=groups, orders=orders)
    return list_schedule(shape, policy)


def interleaved_spans(shape: StepShape) -> dict[StageKey, int]:
    """Return, for each stage, the microbatches that the units downstream of it keep in flight there (`microbatch_spans`)."""
    replicas = {name: unit.replicas for name, unit in shape.plan.units.items()}
    buffered = {unit: list(map(add, depths, map(_num_buffered, replicas[unit]))) for unit, depths in _depths(shape).items()}
    return microbatch_spans(shape, depths=buffered)


def _depths(shape: StepShape) -> Depths:
    """Return the depths of a step's units."""
    counts = {name: int(shape.counts[name].counts.max()) for name in shape.plan.units}
    return {
        name: [
            _depth(len(each.stages), num_chunks(each), counts[name]) if is_dealt(each) else len(each.virtual_stages)
            for each in unit.replicas
        ]
        for name, unit in shape.plan.units.items()
    }


def is_interleaved(unit: UnitPlan) -> bool:
    """Return True if layers are dealt in turn to the stages, several chunks to each, in any replica of a unit."""
    return any(map(is_dealt, unit.replicas))


def is_dealt(replica: Replica) -> bool:
    """Return True if a replica's layers are dealt to its stages in turn, several chunks to each."""
    num_stages = len(replica.stages)
    return num_chunks(replica) > 1 and all(each.stage_index == each.index % num_stages for each in replica.virtual_stages)


def interleaves(graph: ModelGraph, plan: Plan) -> bool:
    """Return True if a plan interleaves a unit (chunks dealt in turn), or a chain of units dealt to one grid."""
    replicas = range(plan.units[graph.backbone.name].data_parallel_size)
    return any(is_interleaved(unit) for unit in plan.units.values()) or any(
        dealt_positions(graph.unit_names, plan, replica) for replica in replicas
    )


@lru_cache(maxsize=256)
def interleaved_order(stage_index: int, *, num_stages: int, chunks: int, num_microbatches: int) -> Order:
    """Return the order of one stage."""
    sizes = _group_sizes(num_stages, num_microbatches)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    chunk, microbatch = np.divmod(np.arange(chunks * num_microbatches), max(1, num_microbatches))
    in_turn = np.argsort(groups[microbatch] * chunks + chunk, kind="stable")
    chunk, microbatch = chunk[in_turn], microbatch[in_turn]
    forwards = np.stack((np.full_like(chunk, FORWARD), chunk, microbatch))
    backwards = np.stack((np.full_like(chunk, BACKWARD), chunks - 1 - chunk, microbatch))
    num_warmup = min(_num_warmup(stage_index, num_stages, chunks, num_microbatches), len(chunk))
    num_steady = len(chunk) - num_warmup
    steady = np.stack((forwards[:, num_warmup:], backwards[:, :num_steady]), axis=2).reshape(3, -1)
    return Order(*np.concatenate((forwards[:, :num_warmup], steady, backwards[:, num_steady:]), axis=1))


def _group_sizes(num_stages: int, num_microbatches: int) -> Integers:
    """Return the numbers of microbatches that pass one chunk before the next chunk begins."""
    num_groups = max(1, num_microbatches // num_stages)
    size, surplus = divmod(num_microbatches, num_groups)
    return size + (np.arange(num_groups) < surplus)


def _num_warmup(stage_index: int, num_stages: int, chunks: int, num_microbatches: int) -> int:
    return 2 * (num_stages - stage_index - 1) + (chunks - 1) * int(_group_sizes(num_stages, num_microbatches)[0])


def _num_buffered(replica: Replica) -> int:
    """Return the microbatches that an upstream unit must be further ahead because a group is not consumed at an even pace.

    The first chunk consumes a whole group in 1 / v of the group's time, and returns its gradients in as much time; an upstream
    unit that works evenly must have 1 - 1 / v of the group ready before. 0 where nothing is interleaved.
    """
    chunks = num_chunks(replica) if is_dealt(replica) else 1
    return -(-len(replica.stages) * (chunks - 1) // chunks)


@lru_cache(maxsize=256)
def _depth(num_stages: int, chunks: int, num_microbatches: int) -> int:
    """Return the most microbatches in flight in the first chunk of the first stage."""
    order = interleaved_order(0, num_stages=num_stages, chunks=chunks, num_microbatches=num_microbatches)
    return int(np.where(order.kinds == FORWARD, 1, -1)[order.chunks == 0].cumsum().max(initial=1))


@lru_cache(maxsize=256)
def _orders_of_stage(
    stage_index: int, num_stages: int, chunks: int, num_microbatches: int, *, is_exact: bool
) -> tuple[Order, ...]:
    """Return the order of one stage, or those of its forwards and of its backwards."""
    order = interleaved_order(stage_index, num_stages=num_stages, chunks=chunks, num_microbatches=num_microbatches)
    if is_exact:
        return (order,)
    return tuple(Order(*(column[order.kinds == kind] for column in order)) for kind in (FORWARD, BACKWARD))


def _chain_orders(shape: StepShape) -> Iterator[Integers]:
    """Yield the order of every lane if all units form one interleaved chain; nothing if they do not."""
    graph, plan = shape.graph, shape.plan
    busy = [unit for unit in graph.unit_names if shape.counts[unit].num_microbatches]
    sizes = {plan.units[unit].data_parallel_size for unit in busy}
    if len(graph.units) == 1 or len(sizes) != 1:
        return
    replicas = range(sizes.pop())
    chains = list(takewhile(bool, (chain_of_replica(shape, replica) for replica in replicas)))
    if len(chains) < len(replicas):
        return
    numbers = step_work(shape).computed_numbers
    for replica, positions in enumerate(chain for chain in chains if chain):
        num_lanes = len({plan.lanes_of_stage(unit, replica, stage) for position in positions for unit, stage in position})
        sizes_of_lane = {"num_stages": num_lanes, "chunks": len(positions) // num_lanes}
        num_microbatches = shape.num_microbatches(graph.backbone.name, replica)
        for lane in range(num_lanes):
            order = interleaved_order(lane, **sizes_of_lane, num_microbatches=num_microbatches)
            actions = (
                Action(KINDS[kind], unit, replica, stage, microbatch)
                for kind, chunk, microbatch in zip(*(column.tolist() for column in order), strict=True)
                for unit, stage in positions[chunk * num_lanes + lane][:: 1 if kind == FORWARD else -1]
            )
            yield integers(numbers[action] for action in actions if action in numbers)


Position = tuple[tuple[str, int], ...]
"""The (unit, virtual stage) pairs that a lane runs in sequence as one chunk: several if one unit ends in it."""


def chain_of_replica(shape: StepShape, replica: int) -> tuple[Position, ...] | None:
    """Return the virtual stages of all units as one chain if lanes hold them in turn as Megatron deals model chunks; else None.

    Position c P + s of the chain is chunk c of lane s of P lanes (Optimus, Appendix B). All units must lie on these lanes
    together, have the same microbatches in this replica, and more than one chunk in each lane. Units without microbatches do
    not count, unless none has any.
    """
    held = [name for name in shape.graph.unit_names if replica < shape.plan.units[name].data_parallel_size]
    units = [name for name in held if shape.num_microbatches(name, replica)] or held
    is_coupled = len({shape.num_microbatches(unit, replica) for unit in units}) == 1
    is_coupled = is_coupled and all(_is_straight(shape, *edge) for edge in shape.graph.edges)
    return dealt_positions(units, shape.plan, replica) if is_coupled else None


def dealt_positions(units: Sequence[str], plan: Plan, replica: int) -> tuple[Position, ...] | None:
    """Return the virtual stages of units, upstream first, as one chain dealt to one grid of lanes in turn; else None."""
    if any(replica >= plan.units[name].data_parallel_size for name in units):
        return None
    lanes_in_turn: list[int] = []
    positions: list[list[tuple[str, int]]] = []
    stages = ((name, stage.index) for name in units for stage in plan.units[name].replicas[replica].virtual_stages)
    for unit, stage in stages:
        lanes = plan.lanes_of_stage(unit, replica, stage)
        if len(lanes) > 1:
            return None
        if not positions or lanes[0] != lanes_in_turn[-1]:
            positions.append([])
            lanes_in_turn.append(lanes[0])
        positions[-1].append((unit, stage))
    num_lanes = len(set(lanes_in_turn))
    is_dealt = lanes_in_turn == lanes_in_turn[:num_lanes] * (len(positions) // num_lanes)
    if not is_dealt or len(positions) == num_lanes or num_lanes == 1:
        return None
    return tuple(tuple(position) for position in positions)


def _is_straight(shape: StepShape, source: str, target: str) -> bool:
    """Return True if each microbatch of one unit leads only to the microbatch of the same number of another one."""
    ends = shape.routes.of_edge(source, target)
    counts = [shape.counts[unit] for unit in (source, target)]
    return all(
        np.array_equal(*(getattr(counted, name)[end] for counted, end in zip(counts, ends, strict=True)))
        for name in ("replica_of_microbatch", "index_in_replica")
    )


MORE_IN_FLIGHT = (1, 4, 8, 16, 32)
"""Microbatches of layer ranges that a lane may keep beyond those of interleaved 1F1B."""
_LEAST_GAIN = 1e-3
"""Share of the pipelines' time by which keeping more must shorten it to be worthwhile."""


def build_interleaved_zb(shape: StepShape, costs: StepCosts) -> Schedule:
    """Build interleaved 1F1B with weight gradients where a lane would be idle, in the compute dialect.

    Layer ranges of several units, or of a unit and its ends, take different times, so lanes wait for each other in every group of
    microbatches. Forwards and input gradients keep the order of interleaved 1F1B. Weight gradients go where the lane would be
    idle for their duration, by the durations of `costs`; before forwards for which they must make room; and, if their gradients
    are reduced, before their stage's last one, which keeps its place, so that reductions by layer start about as early as in
    interleaved 1F1B. Lanes keep more microbatches as far as this shortens the pipelines and fits into the memory of `costs`. Qi
    et al. (ZB-H1) have one layer range per stage, equal durations and no reductions. If the pipelines would not end earlier, the
    schedule is interleaved 1F1B.
    """
    in_line = build_interleaved_1f1b(shape)
    best = fill_pipelines(in_line, costs, Movable.of(in_line))
    if shape.forward_only:
        return best.schedule
    split, reduced = split_in_line(in_line, shape.graph.unit_names), reduced_units(shape, costs)
    room = MEMORY_SHARE * costs.memory_bytes - np.array([costs.static_bytes(lane) for lane in range(in_line.num_lanes)])
    for num_more in MORE_IN_FLIGHT:
        filled = fill_pipelines(split, costs, Movable.of(split, reduced=reduced, num_more=num_more))
        if filled.end >= (1 - _LEAST_GAIN) * best.end or (_most_kept(filled.schedule, costs) > room).any():
            break
        best = filled
    return best.schedule


def _most_kept(schedule: Schedule, costs: StepCosts) -> Integers:
    """Return [num_lanes] the most bytes per rank that microbatches keep at one time."""
    work, kept = schedule.work, np.zeros(schedule.work.num_computed, np.int64)
    for grid in work.pieces.units.values():
        is_kept = grid.is_there & (grid.width > 0)
        forwards, ends = grid.forward[is_kept], (grid.backward + grid.width - 1)[is_kept]
        kept[forwards] = costs.kept_bytes(work, forwards)
        kept[ends] = -kept[forwards]
    is_computed = schedule.pieces < work.num_computed
    sizes, lanes = kept[schedule.pieces[is_computed]], schedule.lane_of_slot[is_computed]
    ends = np.searchsorted(lanes, np.arange(1, schedule.num_lanes))
    return np.array([np.cumsum(row).max(initial=0) for row in np.split(sizes, ends)])


def chunk_stages(replica: Replica) -> tuple[tuple[int, ...], ...]:
    """Return the virtual stages that each physical stage holds, upstream first."""
    held: list[list[int]] = [[] for _ in replica.stages]
    for stage in replica.virtual_stages:
        held[stage.stage_index].append(stage.index)
    return tuple(map(tuple, held))


def stages_that_share(
    name: str, shape: StepShape, *, has_order: Callable[[Replica], bool]
) -> Iterator[tuple[list[StageKey], Replica, int]]:
    """Yield the layer ranges of each physical stage that have a backward, if several have, with its replica and its index.

    They share a limit in flight; ranges without a backward keep nothing, and have their own. has_order: see `ordered_pieces`.
    """
    for replica, each in enumerate(shape.plan.units[name].replicas):
        for stage_index, held in enumerate(chunk_stages(each) if has_order(each) else ()):
            stages = [(name, replica, stage) for stage in held if shape.backward_need(name, replica, stage).has_backward]
            if len(stages) > 1:
                yield stages, each, stage_index


def ordered_pieces(
    name: str, work: StepWork, *, has_order: Callable[[Replica], bool], orders_of: Callable[[int, int, int, int], Iterable[Order]]
) -> list[Integers]:
    """Return the pieces of each order of a unit's physical stages; actions that a stage does not have (frozen) are left out.

    has_order: False for replicas whose stages keep no such order; orders_of: the orders of a stage, from its index and the
    numbers of stages, chunks and microbatches.
    """
    counts = work.pieces.units[name].counted.counts.tolist()
    orders = [
        (order, replica, held)
        for replica, each in enumerate(work.plan.units[name].replicas)
        for stage_index, held in enumerate(chunk_stages(each) if has_order(each) else ())
        for order in orders_of(stage_index, len(each.stages), num_chunks(each), counts[replica])
    ]
    if not orders:
        return []
    columns = [(order.kinds, np.array(held)[order.chunks], order.microbatches) for order, _, held in orders]
    kinds, stages, microbatches = map(np.concatenate, zip(*columns, strict=True))
    sizes = [len(order.kinds) for order, _, _ in orders]
    replicas = np.repeat([replica for _, replica, _ in orders], sizes)
    found = work.pieces.find(name, kinds=kinds, replicas=replicas, stages=stages, microbatches=microbatches)
    return [pieces[pieces >= 0] for pieces in np.split(found, np.cumsum(sizes)[:-1])]
