"""A step's actions by urgency and what holds them back, as the arrays that the list scheduler's kernel takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multimodal.schedule.event_arrays import Bytes, Integers
from multimodal.schedule.policy import Policy, StageKey
from multimodal.schedule.split_form import split_form
from multimodal.schedule.step_table import KIND_NUMBERS, StepTable, step_table
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind
from multimodal.values.schedule_form import PLAIN

_FORWARD, _WEIGHT_GRADIENT = KIND_NUMBERS[ActionKind.FORWARD], KIND_NUMBERS[ActionKind.WEIGHT_GRADIENT]
_GRADIENTS = [KIND_NUMBERS[ActionKind.BACKWARD], KIND_NUMBERS[ActionKind.INPUT_GRADIENT]]
_IS_FORWARD, _IS_GRADIENT, _IS_WEIGHT_GRADIENT, _HAS_GRADIENT, _HAS_WEIGHT_GRADIENT = 1, 2, 4, 8, 16
"""Bits of `flags`; csrc/list_schedule.h."""


@dataclass(frozen=True)
class ListedActions:
    """The most urgent action first; a position here is what the kernel knows an action by."""

    actions: Sequence[Action]
    arrays: dict[str, NDArray[Any]]
    """The kernel's arguments, see csrc/list_schedule.h."""


def list_actions(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, policy: Policy, forward_only: bool = False
) -> ListedActions:
    """Sort a step's computations by urgency (`list_schedule` says how) and link them. O(actions log actions + dependencies)."""
    form = split_form(graph, plan, assignment) if policy.splits_backwards else PLAIN
    table = step_table(graph, plan, assignment, form=form)
    kinds = table.computed_kinds
    chosen = np.flatnonzero(kinds == _FORWARD if forward_only else kinds != KIND_NUMBERS[ActionKind.REDUCE_GRADIENTS])
    listed = chosen[_by_urgency(table, chosen, policy)]
    actions = [table.computed[number] for number in listed.tolist()]
    flags = _flags(table, listed)
    lane_starts, lanes = table.lanes_of_actions(listed)
    follower_starts, followers, release_starts, releases = _links(table, listed, flags, policy)
    groups, *limits = _groups(table, listed, policy)
    return ListedActions(
        actions,
        {
            "lane_starts": lane_starts,
            "lanes": lanes,
            "costs": table.unit_costs[listed],
            "microbatches": table.microbatches[listed],
            "groups": groups,
            "flags": flags,
            "follower_starts": follower_starts,
            "followers": followers,
            "release_starts": release_starts,
            "releases": releases,
            "phases": np.array([] if policy.phase is None else list(map(policy.phase, actions)), np.int64),
            "forward_limits": limits[0],
            "storage_limits": limits[1],
            "forward_floors": limits[2],
        },
    )


def _by_urgency(table: StepTable, chosen: Integers, policy: Policy) -> Integers:
    kinds = table.computed_kinds[chosen]
    urgency = np.full(len(chosen), 2)
    urgency[kinds == _FORWARD] = 1 if policy.forwards_go_first else 3
    urgency[kinds == _WEIGHT_GRADIENT] = 4
    if policy.urgent:
        first = [table.computed_numbers[action] for action in policy.urgent if action in table.computed_numbers]
        urgency[np.isin(chosen, first)] = 0
    ranks = [()] if policy.rank is None else [policy.rank(table.computed[number]) for number in chosen.tolist()]
    places = {rank: place for place, rank in enumerate(sorted(set(ranks)))}
    rank = np.broadcast_to(np.array([places[each] for each in ranks], np.int64), chosen.shape)
    unit_position = {unit: index for index, unit in enumerate(table.graph.unit_names)}
    keys = np.array([(-unit_position[unit], -stage) for unit, _, stage in table.stages], np.int64).reshape(-1, 2)
    unit, stage = keys[table.computed_stages[chosen]].T
    return np.lexsort((table.replicas[chosen], stage, table.microbatches[chosen], unit, rank, urgency))


def _flags(table: StepTable, listed: Integers) -> Bytes:
    kinds, places = table.computed_kinds[listed], table.places[listed]
    is_forward, is_gradient, is_weight = kinds == _FORWARD, np.isin(kinds, _GRADIENTS), kinds == _WEIGHT_GRADIENT
    has_gradient, has_weight = (np.isin(places, places[found]) for found in (is_gradient, is_weight))
    bits = (
        (is_forward, _IS_FORWARD),
        (is_gradient, _IS_GRADIENT),
        (is_weight, _IS_WEIGHT_GRADIENT),
        (is_forward & has_gradient, _HAS_GRADIENT),
        (is_forward & has_weight, _HAS_WEIGHT_GRADIENT),
    )
    return sum((np.where(found, bit, 0) for found, bit in bits), np.zeros(len(listed), np.int64)).astype(np.uint8)


def _links(table: StepTable, listed: Integers, flags: Bytes, policy: Policy) -> tuple[Integers, Integers, Integers, Integers]:
    """Who follows whom, and what every action releases: starts and positions of both."""
    position = np.full(table.num_computed, -1)
    position[listed] = np.arange(len(listed))
    owners, needs = position[table.need_owners], position[table.needs]
    owners, needs = owners[owners >= 0], needs[owners >= 0]
    in_order = np.argsort(owners, kind="stable")
    owners, needs = owners[in_order], needs[in_order]
    # Forwards of one stage go in microbatch order; they have consecutive numbers.
    later = np.flatnonzero((flags & _IS_FORWARD > 0) & (table.microbatches[listed] > 0))
    firsts, thens = np.concatenate((needs, position[listed[later] - 1])), np.concatenate((owners, later))
    told = np.argsort(thens, kind="stable")
    wanted = [list(map(table.computed_numbers.__getitem__, order)) for order in policy.orders]
    ordered = position[np.array(list(chain.from_iterable(map(pairwise, wanted))), np.int64).reshape(-1, 2)]
    assert (ordered >= 0).all() and (firsts >= 0).all(), "what is waited for is not scheduled"
    firsts = np.concatenate((firsts[told], ordered[:, 0]))
    thens = np.concatenate((thens[told], ordered[:, 1]))
    is_released = (flags[needs] & _IS_FORWARD > 0) & ((flags[owners] & _IS_GRADIENT > 0) | (flags[needs] & _HAS_GRADIENT == 0))
    return *_rows(firsts, thens, len(listed)), *_rows(owners[is_released], needs[is_released], len(listed))


def _rows(owners: Integers, values: Integers, num_rows: int) -> tuple[Integers, Integers]:
    """Group values by their owners, in the order in which they stand."""
    starts = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=num_rows))))
    return starts, values[np.argsort(owners, kind="stable")]


def _groups(table: StepTable, listed: Integers, policy: Policy) -> tuple[Integers, Integers, Integers, Integers]:
    """Per action the group whose limits hold for it; per group the limit in flight, the limit stored (-1: none), the floor."""
    numbers: dict[StageKey, int] = {}
    of_stage = [numbers.setdefault(policy.group_of.get(stage, stage), len(numbers)) for stage in table.stages]
    forward, storage = (
        np.array([max(0, limits[group]) if group in limits else -1 for group in numbers], np.int64)
        for limits in (policy.forward_limits, policy.storage_limits)
    )
    floors = np.array([policy.forward_floors.get(group, 0) for group in numbers], np.int64)
    return np.array(of_stage, np.int64)[table.computed_stages[listed]], forward, storage, floors
