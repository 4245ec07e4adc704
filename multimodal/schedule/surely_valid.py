"""Whether a schedule in numbers is beyond doubt: the validator's checks on whole arrays, which never say what is wrong."""

import numpy as np
from numpy.typing import NDArray

from multimodal.schedule.event_arrays import Integers
from multimodal.schedule.numbered_lanes import NumberedLanes
from multimodal.schedule.step_table import KIND_NUMBERS, StepTable, resource_number, take_rows
from multimodal.values.schedule import ActionKind, Resource

Bools = NDArray[np.bool_]


def is_surely_valid(numbered: NumberedLanes, *, forward_only: bool) -> bool:
    """Whether all actions stand where they belong, once, after what they need, and messages match; fillers are left out.

    False only says that the validator must look closer. O((actions + dependencies) log).
    """
    if forward_only and numbered.table.form.gathers_parameters:
        return False
    if not np.array_equal(numbered.keys[numbered.in_order_of_keys], _expected_keys(numbered, forward_only=forward_only)):
        return False
    return _follows_needs(numbered) and (not numbered.lowered or _matches_messages(numbered))


def _expected_keys(numbered: NumberedLanes, *, forward_only: bool) -> Integers:
    """`NumberedLanes.keys` of a schedule that has all of the step, in ascending order."""
    table = numbered.table
    wanted = _is_forward(table) if forward_only else np.ones(table.num_computed, bool)
    if numbered.lowered:
        wanted = np.concatenate((wanted, np.repeat(wanted[table.message_ends[1]], 2)))
    numbers = np.flatnonzero(wanted)
    starts, lanes = table.lanes_of_actions(numbers)
    return np.sort(np.repeat(numbers, np.diff(starts)) * numbered.num_lanes + lanes)


def _is_forward(table: StepTable) -> Bools:
    is_forward: Bools = table.computed_kinds == KIND_NUMBERS[ActionKind.FORWARD]
    return is_forward


def _follows_needs(numbered: NumberedLanes) -> bool:
    """Whether what an action needs never stands after it in the same lane; a receive only posts, and may."""
    table = numbered.table
    starts, needs = table.lowered_needs if numbered.lowered else (table.need_starts, table.needs)
    entries = np.flatnonzero(table.resources[numbered.lane_actions] != resource_number(Resource.RECEIVE))
    need_starts, needed = take_rows(starts, needs, numbered.lane_actions[entries])
    entries = np.repeat(entries, np.diff(need_starts))
    keys = needed * numbered.num_lanes + numbered.lane_of_entry[entries]
    ascending = numbered.keys[numbered.in_order_of_keys]
    places = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    is_later = numbered.in_order_of_keys[places] > entries
    return not bool(((ascending[places] == keys) & is_later).any())


def _matches_messages(numbered: NumberedLanes) -> bool:
    """Whether every lane posts its receives from every other one in the order of the other's sends."""
    table, num_lanes = numbered.table, numbered.num_lanes
    producers, consumers = table.message_ends
    resources = table.resources[numbered.lane_actions]
    columns = []
    for resource, others in ((Resource.SEND, consumers), (Resource.RECEIVE, producers)):
        entries = np.flatnonzero(resources == resource_number(resource))
        messages = (numbered.lane_actions[entries] - table.num_computed) // 2
        starts, other_lanes = table.lanes_of_actions(others[messages])
        messages, own_lanes = (np.repeat(each, np.diff(starts)) for each in (messages, numbered.lane_of_entry[entries]))
        source, target = (own_lanes, other_lanes) if resource is Resource.SEND else (other_lanes, own_lanes)
        pairs = source * num_lanes + target
        in_order = np.argsort(pairs, kind="stable")
        columns.append((pairs[in_order], messages[in_order]))
    (sent_pairs, sent), (received_pairs, received) = columns
    return np.array_equal(sent_pairs, received_pairs) and np.array_equal(sent, received)
