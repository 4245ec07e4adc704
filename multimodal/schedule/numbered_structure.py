"""The structure of a component of lanes from a schedule in numbers: what `build_structure` says, on whole arrays."""

from collections.abc import Sequence

import numpy as np

from multimodal.schedule.event_arrays import Bytes, Integers, NodeKind
from multimodal.schedule.numbered_lanes import NumberedLanes
from multimodal.schedule.schedule_structure import CollectiveKey, ScheduleStructure
from multimodal.schedule.step_table import KIND_NUMBERS, resource_number, take_rows
from multimodal.values.schedule import ActionKind, Lane, Resource

_COMPUTE, _RECEIVE = resource_number(Resource.COMPUTE), resource_number(Resource.RECEIVE)
_LACKING = np.iinfo(np.int64).min


def number_structure(numbered: NumberedLanes, lanes: Sequence[int], own: Sequence[Lane]) -> ScheduleStructure | None:
    """Return what `build_structure` returns for these lanes; None where an action needs one that they lack.

    numbered: of the whole schedule, regular. own: the lanes themselves, for their fillers. O(actions + dependencies).
    """
    table = numbered.table
    rows = [numbered.lane_actions[numbered.lane_starts[lane] : numbered.lane_starts[lane + 1]] for lane in lanes]
    actions = np.concatenate([np.zeros(0, np.int64), *rows])
    lane_of_entry = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    position_of_entry = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(row)) for row in rows)])
    resources = table.resources[actions]
    is_receive, collective_of = resources == _RECEIVE, table.collective_rows[0][actions]
    nodes, first = _in_order(actions, np.flatnonzero(~is_receive & (collective_of < 0)))
    collectives, _ = _in_order(collective_of, np.flatnonzero(collective_of >= 0))
    members, _ = _in_order(actions, np.flatnonzero(collective_of >= 0))

    codes = np.full(len(table.resources), _LACKING)
    codes[nodes] = np.arange(len(nodes))
    index_of_collective = np.zeros(len(table.collective_rows[1]), np.int64)
    index_of_collective[collectives] = np.arange(len(collectives))
    codes[members] = -1 - index_of_collective[table.collective_rows[0][members]]
    receives = np.flatnonzero(is_receive)
    codes[actions[receives]] = codes[actions[receives] - 1]  # Whoever needs the receive waits for what is sent.

    by_collective = members[np.argsort(-1 - codes[members], kind="stable")]
    num_needs, needs = _needs(numbered, nodes, codes)
    num_member_needs, collective_needs = _needs(numbered, by_collective, codes)
    sends = codes[actions[receives]]
    if any((found == _LACKING).any() for found in (needs, collective_needs, sends)):
        return None
    in_order = np.argsort(sends, kind="stable")
    received, first_receive = np.unique(sends, return_index=True)
    receive_lanes, receive_positions = lane_of_entry[receives], position_of_entry[receives]
    kept = np.flatnonzero(~is_receive)
    cuts = np.cumsum(np.bincount(lane_of_entry[kept], minlength=len(rows)))[:-1]
    lane_codes = np.split(codes[actions[kept]], cuts)
    lane_positions = np.split(position_of_entry[kept], cuts)
    is_compute = table.resources[nodes] == _COMPUTE
    place_of_node, forward_of_place = _places(numbered, nodes, is_compute)
    return ScheduleStructure(
        collectives=tuple(_collective_key(numbered, collective) for collective in collectives.tolist()),
        lane_codes=tuple(lane_codes),
        lane_fillers=_fillers(own, lane_codes, lane_positions, len(nodes)),
        lane_positions=tuple(lane_positions),
        kinds=np.where(is_compute, NodeKind.COMPUTE, NodeKind.SEND).astype(np.uint8),
        first_lanes=lane_of_entry[first],
        first_positions=position_of_entry[first],
        num_needs=num_needs,
        needs=needs,
        num_collective_needs=np.bincount(-1 - codes[by_collective], num_member_needs, len(collectives)).astype(np.int64),
        collective_needs=collective_needs,
        num_receivers=np.bincount(sends, minlength=len(nodes)),
        receivers=receive_lanes[in_order],
        receive_lanes=_scattered(received, receive_lanes[first_receive], len(nodes)),
        receive_positions=_scattered(received, receive_positions[first_receive], len(nodes)),
        place_of_node=place_of_node,
        forward_of_place=forward_of_place,
    )


def _in_order(values: Integers, entries: Integers) -> tuple[Integers, Integers]:
    """The different values of some entries in the order in which they come first, and the entries where they do."""
    found, first = np.unique(values[entries], return_index=True)
    in_order = np.argsort(first)
    return found[in_order], entries[first[in_order]]


def _needs(numbered: NumberedLanes, actions: Integers, codes: Integers) -> tuple[Integers, Integers]:
    """Per action how many nodes it needs, and the codes of all of them."""
    table = numbered.table
    starts, needs = table.lowered_needs if numbered.lowered else (table.need_starts, table.needs)
    found_starts, found = take_rows(starts, needs, actions)
    return np.diff(found_starts), codes[found]


def _places(numbered: NumberedLanes, nodes: Integers, is_compute: np.ndarray) -> tuple[Integers, Integers]:
    """Per node the number of its place, and the forward of every place."""
    table = numbered.table
    computed = np.flatnonzero(is_compute)
    places, first, inverse = np.unique(table.places[nodes[computed]], return_index=True, return_inverse=True)
    number_of = np.argsort(np.argsort(first))
    place_of_node = np.full(len(nodes), -1)
    place_of_node[computed] = number_of[inverse.ravel()]
    forward_of_place = np.full(len(places), -1)
    forwards = computed[table.computed_kinds[nodes[computed]] == KIND_NUMBERS[ActionKind.FORWARD]]
    forward_of_place[place_of_node[forwards]] = forwards
    return place_of_node, forward_of_place


def _fillers(
    lanes: Sequence[Lane], lane_codes: Sequence[Integers], lane_positions: Sequence[Integers], num_nodes: int
) -> tuple[Bytes, ...]:
    num_lanes = np.bincount(np.concatenate([np.zeros(0, np.int64), *(row[row >= 0] for row in lane_codes)]), minlength=num_nodes)
    fillers = []
    for lane, codes, positions in zip(lanes, lane_codes, lane_positions, strict=True):
        is_alone = not lane.fillers or not (num_lanes[codes[codes >= 0]] > 1).any()
        found = np.isin(positions, sorted(lane.fillers)) if is_alone and lane.fillers else np.zeros(len(positions), bool)
        fillers.append(found.astype(np.uint8))
    return tuple(fillers)


def _collective_key(numbered: NumberedLanes, collective: int) -> CollectiveKey:
    _, starts, members = numbered.table.collective_rows
    action = numbered.table.computed[int(members[starts[collective]])]
    return action.kind, action.unit, action.stage, action.part


def _scattered(places: Integers, values: Integers, size: int) -> Integers:
    """An array of -1 but for these values at these places."""
    array = np.full(size, -1)
    array[places] = values
    return array
