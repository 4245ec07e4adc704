"""The one validator of schedules: what it accepts, the executor can run to its end."""

from collections import defaultdict
from collections.abc import Callable

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.expected_actions import expected_actions
from multimodal.schedule.lane_execution import execute_lanes
from multimodal.schedule.numbered_lanes import known_form, number_lanes
from multimodal.schedule.place_grid import show_places
from multimodal.schedule.surely_valid import is_surely_valid
from multimodal.schedule.text import action_to_text
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, Lane, Resource, Schedule
from multimodal.values.schedule_form import ScheduleForm, parts_of


def validate_schedule(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool, forward_only: bool = False
) -> None:
    """Check that a schedule does each action of the step once, where it belongs, in an order that can finish.

    Checked in turn: the lanes are the plan's; every action belongs to the step, stands in its lanes, and stands there once; none
    is missing; no lane has an action before one that it needs; between two lanes, receives are posted in the order of the
    sends; no lanes wait for each other in a circle (the schedule is executed symbolically).

    All of it is first looked at in numbers (`is_surely_valid`); action by action only where that finds something.

    Raises ScheduleError that names the action and shows its surroundings. O((actions + dependencies) log actions).
    """
    _check_lanes(schedule, plan)
    form = known_form(schedule)
    if form.num_parts:
        _check_parts(schedule, form, graph, assignment)
    numbered = number_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered)
    if numbered is not None and is_surely_valid(numbered, forward_only=forward_only):
        _check_fillers(schedule, lambda action: dependencies(action, graph, plan, assignment, lowered=lowered, form=form))
        execution = execute_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered)
        if not execution.stuck(schedule):
            return
    _check_actions_one_by_one(
        schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered, forward_only=forward_only, form=form
    )


def _check_actions_one_by_one(
    schedule: Schedule,
    *,
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    lowered: bool,
    forward_only: bool,
    form: ScheduleForm,
) -> None:
    expected = expected_actions(graph, plan, assignment, lowered=lowered, forward_only=forward_only, form=form)
    positions = _check_actions(schedule, plan, frozenset(expected), dialect="lowered" if lowered else "compute")
    _check_missing(schedule, plan, expected, positions)
    needs = {action: dependencies(action, graph, plan, assignment, lowered=lowered, form=form) for action in expected}
    _check_order(schedule, needs, positions)
    _check_fillers(schedule, needs.__getitem__)
    if lowered:
        _check_message_order(schedule, plan, positions)
    _check_progress(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered, needs=needs)


def _check_lanes(schedule: Schedule, plan: Plan) -> None:
    found = tuple(lane.ranks for lane in schedule.lanes)
    if found != plan.lanes:
        raise ScheduleError(
            f"the schedule's lanes have ranks {_ranks(found)}, the plan's {_ranks(plan.lanes)}; build it for this plan"
        )


def _ranks(lanes: tuple[tuple[int, ...], ...]) -> str:
    return " | ".join(",".join(map(str, ranks)) for ranks in lanes)


def _check_parts(schedule: Schedule, form: ScheduleForm, graph: ModelGraph, assignment: Assignment) -> None:
    """Check that sample subsets are those that the assignment's routes make, all of them, in an encoder."""
    counts: dict[MicrobatchPlace, int] = {}
    for lane, actions in enumerate(lane.actions for lane in schedule.lanes):
        for position, action in enumerate(actions):
            if action.part < 0 or not ACTION_TABLE[action.kind].has_microbatch:
                continue
            place = MicrobatchPlace(action.unit, action.replica, action.microbatch)
            if place not in counts:
                is_known = action.unit in graph.unit_names and graph.unit(action.unit).role is Role.ENCODER
                counts[place] = len(parts_of(place, graph, assignment)) if is_known else 0
            if action.part >= counts[place]:
                problem = (
                    f"unknown part: its microbatch has {counts[place]} sample subsets (one per consumer, encoders only); "
                    "number them from 0, or leave the part out"
                )
                raise _error(action, problem, schedule, {lane: position})
            if form.num_parts[place] < counts[place]:
                problem = (
                    f"missing part: its microbatch has {counts[place]} sample subsets (one per consumer) but the schedule runs "
                    f"the backwards of {form.num_parts[place]}; add the others"
                )
                raise _error(action, problem, schedule, {lane: position})


def _check_fillers(schedule: Schedule, needs_of: Callable[[Action], tuple[Action, ...]]) -> None:
    """Check that every filler is a computation before a carrier that does not need it."""
    for lane, each in enumerate(schedule.lanes):
        for position in sorted(each.fillers):
            filler = each.actions[position]
            if ACTION_TABLE[filler.kind].resource is not Resource.COMPUTE:
                raise _error(filler, "not a filler: only computations fill; run it by itself", schedule, {lane: position})
            between = _up_to_carrier(each, position)
            if between is None:
                raise _error(filler, "no carrier: a computation must follow it in its lane", schedule, {lane: position})
            if needed := [action for action in between if filler in needs_of(action)]:
                problem = f"it fills {action_to_text(between[-1])} but {action_to_text(needed[0])} needs it; run it by itself"
                raise _error(filler, problem, schedule, {lane: position})


def _up_to_carrier(lane: Lane, position: int) -> tuple[Action, ...] | None:
    """What may run before a filler though it stands after it: everything up to its carrier; None where it has no carrier."""
    for index in range(position + 1, len(lane.actions)):
        if index not in lane.fillers and ACTION_TABLE[lane.actions[index].kind].resource is Resource.COMPUTE:
            return tuple(lane.actions[at] for at in range(position + 1, index + 1) if at not in lane.fillers)
    return None


def _check_actions(schedule: Schedule, plan: Plan, expected: frozenset[Action], *, dialect: str) -> dict[Action, dict[int, int]]:
    """Check each action by itself; returns action -> lane -> position."""
    positions: dict[Action, dict[int, int]] = {}
    for lane, actions in enumerate(lane.actions for lane in schedule.lanes):
        for position, action in enumerate(actions):
            if action not in expected:
                problem = f"unknown action: no such action belongs to this step in the {dialect} dialect; remove it"
                raise _error(action, problem, schedule, {lane: position})
            if lane not in (own := _lanes(action, plan)):
                problem = f"wrong lane: it stands in lane {lane} but belongs to lane {', '.join(map(str, own))}; move it there"
                raise _error(action, problem, schedule, {lane: position})
            if lane in positions.setdefault(action, {}):
                problem = f"duplicate: it stands in lane {lane} at positions {positions[action][lane]} and {position}; keep one"
                raise _error(action, problem, schedule, {lane: position})
            positions[action][lane] = position
    return positions


def _check_missing(schedule: Schedule, plan: Plan, expected: tuple[Action, ...], positions: dict[Action, dict[int, int]]) -> None:
    for action in expected:
        for lane in _lanes(action, plan):
            if lane not in positions.get(action, {}):
                problem = f"missing: lane {lane} must do it and does not; add it there"
                raise _error(action, problem, schedule, {lane: len(schedule.lanes[lane].actions)})


def _check_order(schedule: Schedule, needs: dict[Action, tuple[Action, ...]], positions: dict[Action, dict[int, int]]) -> None:
    for action, needed in needs.items():
        if ACTION_TABLE[action.kind].resource is Resource.RECEIVE:
            continue  # A receive only posts: it may stand before its send in the same lane.
        for need in needed:
            for lane, position in positions[action].items():
                if positions[need].get(lane, -1) > position:
                    problem = f"wrong order: in lane {lane} it stands before {action_to_text(need)}, which it needs; swap them"
                    raise _error(action, problem, schedule, {lane: position})


def _check_message_order(schedule: Schedule, plan: Plan, positions: dict[Action, dict[int, int]]) -> None:
    """Check that the sends of one lane to another stand in the order of the other's receives from it."""
    sent: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for action, places in positions.items():
        resource = ACTION_TABLE[action.kind].resource
        if action.peer is None or resource is Resource.COMPUTE:
            continue
        for lane, position in places.items():
            for peer_lane in plan.lanes_of_stage(*action.peer[:3]):
                if resource is Resource.SEND:
                    sent[lane, peer_lane].append((position, action))
                else:
                    received[peer_lane, lane].append((position, action))
    for (source, target), sends in sorted(sent.items()):
        for (send_at, send), (receive_at, receive) in zip(sorted(sends), sorted(received[source, target]), strict=True):
            if (send.place, send.peer) != (receive.peer, receive.place):
                problem = (
                    f"wrong message order: lane {target} receives it when lane {source} sends {action_to_text(send)}; "
                    "messages between two lanes match by order, so post receives in the order of the sends"
                )
                marked = {target: receive_at} if source == target else {source: send_at, target: receive_at}
                raise _error(receive, problem, schedule, marked)


def _check_progress(
    schedule: Schedule,
    *,
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    lowered: bool,
    needs: dict[Action, tuple[Action, ...]],
) -> None:
    execution = execute_lanes(
        schedule,
        graph=graph,
        plan=plan,
        assignment=assignment,
        lowered=lowered,
    )
    if not (stuck := execution.stuck(schedule)):
        return
    lane = min(stuck)
    action = schedule.lanes[lane].actions[stuck[lane]]
    sources = [needs[need][0] if ACTION_TABLE[need.kind].resource is Resource.RECEIVE else need for need in needs[action]]
    unmet = [source for source in sources if source not in execution.done]
    awaited = ", ".join(map(action_to_text, unmet[:3])) or "the other lanes that do it together"
    problem = f"deadlock: lane {lane} waits in it for {awaited}; each of these lanes waits for another, so reorder one of them"
    raise _error(action, problem, schedule, stuck)


def _lanes(action: Action, plan: Plan) -> tuple[int, ...]:
    return plan.lanes_of_stage(action.unit, action.replica, action.stage)


def _error(action: Action, problem: str, schedule: Schedule, marked: dict[int, int]) -> ScheduleError:
    return ScheduleError(f"{action_to_text(action)}: {problem}\n{show_places(schedule, marked=marked)}")
