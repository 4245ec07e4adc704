"""The engine of the builders: a deterministic list scheduler on a discrete clock."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multimodal.kernels import kernels
from multimodal.references.list_schedule import HAS_GRADIENT, HAS_WEIGHT_GRADIENT, IS_FORWARD, IS_GRADIENT, IS_WEIGHT_GRADIENT
from multimodal.references.list_schedule import list_schedule as reference
from multimodal.schedule.execute_lanes import can_finish, unit_costs
from multimodal.schedule.inside_slots import InsideSlots
from multimodal.values.action import Action
from multimodal.values.arrays.rows import Bytes, Integers, group_rows, integers, order_by, row_numbers
from multimodal.values.parts.cuts import StageKey, StageSplit
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCTION, WEIGHT_GRADIENT, StepWork, step_work

_GRADIENTS = [BACKWARD, INPUT_GRADIENT]


@dataclass(frozen=True)
class Policy:
    """A builder's rules beyond the dependencies: limits, order and urgency."""

    forward_limits: Mapping[StageKey, int] = field(default_factory=dict)
    """Most microbatches in flight per stage, or per group of stages; stages without an entry are unlimited."""
    forward_floors: Mapping[StageKey, int] = field(default_factory=dict)
    """Per stage or group: a backward waits while fewer microbatches are in flight and forwards are left to start."""
    storage_limits: Mapping[StageKey, int] = field(default_factory=dict)
    """Most microbatches between forward and weight gradient, per stage or group; for split backwards."""
    group_of: Mapping[StageKey, StageKey] = field(default_factory=dict)
    """Stage -> the stage that represents the group sharing its limit; by default every stage is its own group."""
    phase: Callable[[StepWork], Integers] | None = None
    """[num_computed] phases: a lane finishes each before the next; no action may have a later phase than one that needs it."""
    orders: Sequence[Integers] = ()
    """Pieces that run exactly in this order; together with the dependencies the orders must not form a circle."""
    forwards_go_first: bool = False
    """True if forwards within their limits are more urgent than backwards (with tight limits, strictly in turns)."""
    urgent: frozenset[Action] = frozenset()
    """Actions that precede all others once they are ready."""
    rank: Callable[[StepWork], Sequence[Integers]] | None = None
    """Order of equally urgent actions: lower ranks go first. Columns of [num_computed], the most significant first."""


def list_schedule(shape: StepShape, policy: Policy) -> Schedule:
    """Build a compute-dialect schedule by letting every lane always take its most urgent ready action.

    An action is ready when its dependencies are done; forwards of one stage go in microbatch order. Backwards are more urgent
    than forwards (or the other way round, see `Policy`), and both more than weight gradients, which thus fill idle time; then
    downstream units come before upstream ones, then lower microbatches. An action of several lanes starts when it is the most
    urgent one in all of them: the order is the same everywhere, so the lanes never wait for each other in a circle.

    A microbatch is in flight in a stage from its forward to its backward (or input gradient) or, if there is none, to its
    consumers' forwards; it is stored until its weight gradient. A forward beyond its stage's limits waits, and so does a backward
    below its stage's floor: with equal floor and limit a stage alternates strictly, whatever the clock says. When nothing else is
    left to do, the earliest such backward, or else forward, is admitted nevertheless, so every assignment finishes.
    `place_reductions` places the reductions of gradients.

    Runs as a C++ kernel, with the same result, if the kernels are built. O((actions + dependencies) log actions).
    """
    listed, arrays = _list_pieces(shape, policy)
    run = reference if kernels is None else kernels.list_schedule
    lane_starts, order = run(**arrays, num_lanes=len(shape.plan.lanes))
    assert len(order) == len(arrays["lanes"]), "the policy's orders contradict the dependencies"
    return place_reductions(Schedule.in_line(shape, lane_starts, listed[order]))


def forwards_first(work: StepWork) -> Integers:
    """Return the phases of a schedule whose lanes run all forwards before any backward, [num_computed]."""
    return (work.kinds != FORWARD).astype(np.int64)


def split_units(shape: StepShape, units: Collection[str]) -> StepShape:
    """Return the step with these units' backwards cut into input gradients and, if weights are trained, weight gradients."""
    counts = {
        stage: shape.num_microbatches(*stage[:2])
        for stage in shape.stages
        if stage[0] in units and shape.backward_need(*stage).has_backward
    }
    split = StageSplit({stage: count for stage, count in counts.items() if count})
    return shape.with_cuts(replace(shape.cuts, split=split))


def place_reductions(schedule: Schedule) -> Schedule:
    """Put the gradient reductions into a compute-dialect schedule that has none.

    A lane only starts a reduction at its slot, so that it hides behind the lane's later computations. The slot is right behind
    the stage's last backward or weight gradient in the lane, but behind the lane's earlier reductions in one order for all lanes:
    downstream units first, then later stages (the order in which backwards end); units without microbatches last. A stage without
    microbatches on this replica reduces at the lane's end: earlier, it would hold the lane up until the other replicas come.

    If lanes would wait for each other in a circle when reductions block, all reductions are at the lanes' ends.
    O(actions + dependencies).
    """
    work = schedule.work
    pieces = np.flatnonzero(work.kinds == REDUCTION)
    if not len(pieces):
        return schedule
    stages = work.computed_stages[pieces]
    is_idle = np.array([unit.counted.num_microbatches == 0 for unit in work.pieces.units.values()], bool)
    units, indices = work.pieces.unit_of_stage[stages], work.pieces.index_of_stage[stages]
    order = np.lexsort((work.pieces.parts[pieces], work.replicas[pieces], -indices, -units, is_idle[units]))
    lanes, reductions = work.by_lane(pieces[order])
    insert = partial(schedule.with_inserted, schedule.shape, lanes=lanes, pieces=reductions)
    placed = insert(before=1 + _early_slots(schedule, lanes, reductions))
    return placed if can_finish(placed) else insert(before=schedule.lane_starts[lanes + 1])


def _early_slots(schedule: Schedule, lanes: Integers, reductions: Integers) -> Integers:
    """Return the slots behind which reductions may stand: the stage's last in the lane, but none before an earlier reduction."""
    work = schedule.work
    last = np.full(len(work.lane_rows[1]), -1)
    ends_in = np.arange(len(schedule.pieces))
    if schedule.has_inside:
        inside = InsideSlots.of(schedule)
        ends_in[inside.slots] = inside.carrier_slots
    last[work.stage_lanes(work.computed_stages[schedule.pieces], schedule.lane_of_slot)] = ends_in
    own = last[work.stage_lanes(work.computed_stages[reductions], lanes)]
    return np.maximum.accumulate(np.where(own < 0, schedule.lane_starts[lanes + 1] - 1, own))


def _list_pieces(shape: StepShape, policy: Policy) -> tuple[Integers, dict[str, NDArray[Any]]]:
    """Sort a step's computations by urgency and link them: their numbers, and the kernel's arguments (csrc/list_schedule.h)."""
    work = step_work(shape)
    chosen = np.flatnonzero(work.kinds != REDUCTION)
    listed = chosen[_by_urgency(work, chosen, policy)]
    flags = _flags(work, listed)
    lane_starts, lanes = work.lanes_of(listed)
    pieces = np.concatenate([np.zeros(0, np.int64), *policy.orders])
    is_last = np.zeros(len(pieces), bool)
    is_last[np.cumsum(list(map(len, filter(len, policy.orders))), dtype=np.int64) - 1] = True
    before, after = pieces[~is_last], pieces[1:][~is_last[:-1]]  # all pairs of consecutive pieces in the orders
    microbatches = work.microbatches[listed]
    link = link_actions if kernels is None else kernels.link_actions
    links = link(listed, work.need_starts, work.needs, flags, microbatches, before, after)
    follower_starts, followers, release_starts, releases = links
    # Each action's group of stages; per group the limit in flight, the limit stored (-1: none), the floor.
    numbers: dict[StageKey, int] = {}
    of_stage = integers(numbers.setdefault(policy.group_of.get(stage, stage), len(numbers)) for stage in work.stages)
    limits = policy.forward_limits, policy.storage_limits
    forward_limits, storage_limits = (
        integers(max(0, each[group]) if group in each else -1 for group in numbers) for each in limits
    )
    return listed, {
        "lane_starts": lane_starts,
        "lanes": lanes,
        "costs": unit_costs(shape)[listed],
        "microbatches": microbatches,
        "groups": of_stage[work.computed_stages[listed]],
        "flags": flags,
        "follower_starts": follower_starts,
        "followers": followers,
        "release_starts": release_starts,
        "releases": releases,
        "phases": policy.phase(work)[listed] if policy.phase else np.zeros(0, np.int64),
        "forward_limits": forward_limits,
        "storage_limits": storage_limits,
        "forward_floors": integers(policy.forward_floors.get(group, 0) for group in numbers),
    }


def link_actions(
    listed: Integers,
    need_starts: Integers,
    needs: Integers,
    flags: Bytes,
    microbatches: Integers,
    before: Integers,
    after: Integers,
) -> tuple[Integers, Integers, Integers, Integers]:
    """Return who is told of each action's end: the actions that wait for it, and the forwards whose activations it releases.

    Both are rows (starts, numbers of actions); actions are numbered by their position in `listed`. The C++ kernel has the same
    result. O(pieces + needs).

    listed: [num_actions] pieces; need_starts, needs: what each piece of the step needs; flags, microbatches: [num_actions];
    before, after: pairs of pieces, the first of which ends before the second begins. Forwards of one stage, whose pieces follow
    each other, go in the order of microbatches. An action that follows a forward and uses its activations releases it.
    """
    position = np.full(len(need_starts) - 1, -1)
    position[listed] = np.arange(len(listed))
    owners = position[row_numbers(need_starts)]
    needed, owners = position[needs[owners >= 0]], owners[owners >= 0]
    # Forwards of one stage go in microbatch order; they have consecutive numbers.
    later = np.flatnonzero((flags & IS_FORWARD > 0) & (microbatches > 0))
    firsts, thens = np.concatenate((needed, position[listed[later] - 1])), np.concatenate((owners, later))
    starts, told = group_rows(thens, np.arange(len(thens)), len(listed))
    firsts, thens = firsts[told], row_numbers(starts)
    before, after = position[before], position[after]
    if min(column.min(initial=0) for column in (firsts, before, after)) < 0:
        raise IndexError("what is waited for is not scheduled")
    of_first, of_then = flags[firsts], flags[thens]
    is_released = (of_first & IS_FORWARD > 0) & ((of_then & IS_GRADIENT > 0) | (of_first & HAS_GRADIENT == 0))
    is_released &= told < len(needed)
    followers = group_rows(np.concatenate((firsts, before)), np.concatenate((thens, after)), len(listed))
    return *followers, *group_rows(thens[is_released], firsts[is_released], len(listed))


def _by_urgency(work: StepWork, chosen: Integers, policy: Policy) -> Integers:
    kinds = work.kinds[chosen]
    urgency = np.full(len(chosen), 2)
    urgency[kinds == FORWARD] = 1 if policy.forwards_go_first else 3
    urgency[kinds == WEIGHT_GRADIENT] = 4
    if policy.urgent:
        first = [work.computed_numbers[action] for action in policy.urgent if action in work.computed_numbers]
        urgency[np.isin(chosen, first)] = 0
    ranks = [column[chosen] - column.min(initial=0) for column in policy.rank(work)] if policy.rank else []
    stages = work.computed_stages[chosen]
    unit, stage = (column.max() - column for column in (work.pieces.unit_of_stage, work.pieces.index_of_stage))
    microbatches, replicas = np.maximum(work.microbatches[chosen], 0), work.pieces.replica_of_stage
    of_unit = unit[stages] * (1 + microbatches.max(initial=0)) + microbatches
    return order_by(urgency, *ranks, of_unit, (stage * (1 + replicas.max()) + replicas)[stages])


def _flags(work: StepWork, listed: Integers) -> Bytes:
    kinds, places = work.kinds[listed], work.places[listed]
    is_forward, is_gradient, is_weight = kinds == FORWARD, np.isin(kinds, _GRADIENTS), kinds == WEIGHT_GRADIENT
    has_gradient, has_weight = np.zeros((2, int(places.max(initial=0)) + 1), bool)
    has_gradient[places[is_gradient]] = has_weight[places[is_weight]] = True
    has_gradient, has_weight = has_gradient[places], has_weight[places]
    bits = (
        (is_forward, IS_FORWARD),
        (is_gradient, IS_GRADIENT),
        (is_weight, IS_WEIGHT_GRADIENT),
        (is_forward & has_gradient, HAS_GRADIENT),
        (is_forward & has_weight, HAS_WEIGHT_GRADIENT),
    )
    return sum((np.where(has, bit, 0) for has, bit in bits), np.zeros(len(listed), np.int64)).astype(np.uint8)
