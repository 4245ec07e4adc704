"""From the times of nodes back to a timeline of actions, as a run measures it."""

from collections import defaultdict

from multimodal.schedule.compile_schedule import CompiledSchedule
from multimodal.schedule.event_arrays import EventTimes, NodeKind
from multimodal.values.timeline import Timeline, TimelineEvent


def build_timeline(compiled: CompiledSchedule, times: EventTimes) -> Timeline:
    """Computations, sends, collectives and the time lanes stood still for receives; nothing of zero length. O(actions log)."""
    arrays, lanes = compiled.arrays, compiled.schedule.lanes
    nodes, entry_lanes = arrays.lane_nodes.tolist(), compiled.lane_of_entry.tolist()
    start, end = times.start_seconds.tolist(), times.end_seconds.tolist()
    events: list[TimelineEvent] = []
    for node, lane, position in zip(nodes, entry_lanes, compiled.lane_positions.tolist(), strict=True):
        if end[node] > start[node]:
            events.append(TimelineEvent(lanes[lane].actions[position], lane, start[node], end[node]))
    events += _waiting(compiled, times)
    ordered = sorted(events, key=lambda event: (event.start_seconds, event.lane, event.end_seconds))
    return Timeline(tuple(lane.ranks for lane in lanes), tuple(ordered))


def _waiting(compiled: CompiledSchedule, times: EventTimes) -> list[TimelineEvent]:
    """The receives that lanes stood still for: each from when the lane was free, or the one before it came, to its arrival."""
    arrays, lanes = compiled.arrays, compiled.schedule.lanes
    arrival = (times.end_seconds + arrays.latency_seconds).tolist()
    start, end, kinds = times.start_seconds.tolist(), times.end_seconds.tolist(), arrays.kinds.tolist()
    need_starts, needs = arrays.need_starts.tolist(), arrays.needs.tolist()
    computed = compiled.lane_of_entry[arrays.kinds[arrays.lane_nodes] == NodeKind.COMPUTE].tolist()
    nodes = arrays.lane_nodes[arrays.kinds[arrays.lane_nodes] == NodeKind.COMPUTE]
    of_lane: dict[int, list[int]] = defaultdict(list)
    for node, lane in zip(nodes.tolist(), computed, strict=True):
        of_lane[lane].append(node)
    found: list[TimelineEvent] = []
    for lane, members in of_lane.items():
        free_at = 0.0
        for node in sorted(members, key=lambda each: (start[each], end[each])):
            sends = [need for need in needs[need_starts[node] : need_starts[node + 1]] if kinds[need] == NodeKind.SEND]
            for send in sorted(sends, key=arrival.__getitem__):
                if arrival[send] > free_at:
                    there = int(compiled.receive_lanes[send]), int(compiled.receive_positions[send])
                    found.append(TimelineEvent(lanes[there[0]].actions[there[1]], lane, free_at, arrival[send]))
                    free_at = arrival[send]
            free_at = end[node]
    return found
