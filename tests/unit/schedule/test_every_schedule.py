"""What holds for every schedule: of any builder, after any passes, on any plan, for any samples."""

import math
import pickle
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise, product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.nccl_replay import run_kernels
from multimodal.cost.step_costs import ComputeCost, StepCosts
from multimodal.plan.communicators import track_of
from multimodal.references.simulate_events import simulate_events as simulate_events_reference
from multimodal.schedule import fill_idle_lanes as filling
from multimodal.schedule import list_schedule as listing
from multimodal.schedule import simulate_events as events
from multimodal.schedule.build_schedule import settle_fillers
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.compile_schedule import compile_schedule
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import BUBBLE_KINDS, simulate_schedule, timeline_of_unit_costs
from multimodal.schedule.simulate_events import NodeKind
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, Resource
from multimodal.values.schedule import Schedule
from tests.unit.schedule.built_schedules import RandomCosts, costs_of, cut_schedules
from tests.unit.schedule.nccl_replay import issue_all, replay
from tests.unit.schedule.schedule_cases import build_case, build_graph, built_cases, deal
from tests.unit.schedule.schedule_text import schedule_from_text, schedule_to_text
from tests.unit.schedule.test_simulate import assert_alike
from tests.unit.values.work.dependencies import dependencies

KERNEL_USERS = (events, filling, listing)


@dataclass(frozen=True)
class WaitingCosts(RandomCosts):
    """Only the LLM waits for collectives."""

    memory_bytes: float = math.inf

    def compute(self, action: Action) -> ComputeCost:
        found = super().compute(action)
        return found if action.unit == "llm" else found._replace(waits=())


@settings(max_examples=200)
@given(
    built=built_cases(),
    forward_only=st.booleans(),
    passes=st.lists(st.sampled_from(sorted(PASSES)), unique=True, max_size=3),
    num_queues=st.sampled_from([1, 2, 8, 33]),
    seed=st.integers(0, 1000),
    memory_bytes=st.sampled_from([math.inf, 1200.0]),
)
def test_any_builder_with_any_passes_on_any_plan(built, forward_only, passes, num_queues, seed, memory_bytes):
    case, name = built
    step = replace(case, forward_only=forward_only)
    num_waits = 2 if case.plan.units["llm"].tensor_parallel_size > 1 else 0
    costs = WaitingCosts(seed=seed, num_waits=num_waits, memory_bytes=memory_bytes)
    builder = BUILDERS[name].with_costs(costs)
    schedule = builder(step)
    assert_forwards_in_order(schedule)
    assert all(module.kernels is not None for module in KERNEL_USERS)
    with ExitStack() as stack:
        for module in KERNEL_USERS:
            stack.enter_context(patch.object(module, "kernels", None))
        assert builder(step) == schedule, "the kernels change nothing"
    validate_schedule(schedule, options=costs.options)
    assert_settled_where_they_run(insert_communication(PASSES["fill"](schedule)), RandomCosts(seed=seed))
    for name in () if forward_only or schedule.has_inside else passes:
        schedule = PASSES[name](schedule)
    check_both_dialects(schedule, num_queues=num_queues, seed=seed)


@settings(max_examples=60)
@given(built=cut_schedules(), num_queues=st.sampled_from([1, 33]), seed=st.integers(0, 1000))
def test_any_computations_in_any_ranges_of_segments(built, num_queues, seed):
    check_both_dialects(built[1], num_queues=num_queues, seed=seed)


def check_both_dialects(schedule: Schedule, *, num_queues: int, seed: int) -> None:
    lowered = insert_communication(schedule)
    for each in (schedule, lowered):
        validate_schedule(each)
        assert schedule_from_text(schedule_to_text(each), each.shape, lowered=each.lowered).lanes == each.lanes
        assert pickle.loads(pickle.dumps(each)) == each
        assert_run_by_its_reference(each)
        assert_compiled_by_the_rule_of_dependencies(each)
    if not schedule.has_fillers:
        durations = [timeline_of_unit_costs(each).duration_seconds for each in (schedule, lowered)]
        assert durations[0] == durations[1] > 0, "messages take no time"
    placed = insert_communication(schedule, RandomCosts(seed=seed))
    validate_schedule(placed)
    for each, tracks in product((lowered, placed), (as_run, by_pair, all_on_one)):
        assert not replay(each, num_queues=num_queues, track_of=tracks)
    assert_simulated_to_the_last_moment(lowered, RandomCosts(seed=seed))


def assert_forwards_in_order(schedule: Schedule) -> None:
    for lane in schedule.lanes:
        order = defaultdict(list)
        for action in lane.actions:
            if action.kind is ActionKind.FORWARD:
                order[action[1:4]].append(action.microbatch)
        assert all(microbatches == list(range(len(microbatches))) for microbatches in order.values())


def assert_run_by_its_reference(schedule: Schedule) -> None:
    times = np.array([0.1 * (len(each.unit) + 2 * each.stage + each.microbatch % 3) for each in schedule.work.computed])
    for seconds in (None, times):
        schedule.made.clear()
        assert_alike(schedule, seconds)


def assert_compiled_by_the_rule_of_dependencies(schedule: Schedule) -> None:
    """Every node needs what its action does (a receive: its send), of any replica where that is a collective."""

    def any_replica(action: Action) -> Action:
        return action._replace(replica=0) if action.kind.resource is Resource.COLLECTIVE else action

    def needs(action: Action) -> list[Action]:
        found = dependencies(action, schedule.shape, lowered=schedule.lowered)
        receives = [need.kind.resource is Resource.RECEIVE for need in found]
        return [needs(need)[0] if is_receive else any_replica(need) for need, is_receive in zip(found, receives, strict=True)]

    compiled = compile_schedule(schedule)
    arrays, node_actions = compiled.arrays, [schedule.work.actions[piece] for piece in compiled.pieces.tolist()]
    rows = list(pairwise(arrays.need_starts.tolist()))
    for node in np.flatnonzero(arrays.kinds != NodeKind.COLLECTIVE).tolist():
        found = arrays.needs[slice(*rows[node])].tolist()
        assert [any_replica(node_actions[need]) for need in found] == needs(node_actions[node])
    for piece, node in zip(schedule.pieces[compiled.slots].tolist(), arrays.lane_nodes.tolist(), strict=True):
        action = schedule.work.actions[piece]
        assert node_actions[node] == action or action.kind.resource is Resource.COLLECTIVE


def assert_simulated_to_the_last_moment(lowered: Schedule, costs: RandomCosts) -> None:
    """Kernel and reference agree to the last bit, and lane time is busy or idle of one kind."""
    found = simulate_schedule(lowered, costs)
    start, end, positions = simulate_events_reference(**vars(found.compiled.arrays))
    assert not np.isnan(start).any()
    assert (found.times.start_seconds.tobytes(), found.times.end_seconds.tobytes()) == (start.tobytes(), end.tobytes())
    assert found.times.positions.tolist() == positions.tolist()
    assert tuple(found.bubble) == BUBBLE_KINDS and min(found.bubble.values()) >= 0
    if found.iteration_seconds:
        assert sum(found.bubble.values()) + found.busy_fraction == pytest.approx(1.0, abs=1e-9)
        assert max(found.timeline.duration_seconds, found.ideal_seconds) <= found.iteration_seconds * (1 + 1e-12)


def assert_settled_where_they_run(lowered: Schedule, costs: RandomCosts) -> None:
    """Fillers that got their places from costs take as long in line."""
    settled = settle_fillers(lowered, costs)
    validate_schedule(settled)
    assert not any(lane.fillers for lane in settled.lanes)
    assert [set(lane.actions) for lane in settled.lanes] == [set(lane.actions) for lane in lowered.lanes]
    seconds = [simulate_schedule(each, costs).iteration_seconds for each in (lowered, settled)]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-9)


def as_run(action: Action) -> Hashable:
    assert action.peer is not None
    return track_of("forward" if action.kind.value.endswith("F") else "backward", action.place, action.peer)


def by_pair(action: Action) -> Hashable:
    """A communicator for each pair of stages and direction."""
    assert action.peer is not None
    return action.kind.value[-1], frozenset((action.place[:3], action.peer[:3]))


def all_on_one(action: Action) -> Hashable:
    return ""


def spinning_share(schedule: Schedule, costs: StepCosts) -> tuple[float, float]:
    """The most of the step that a rank of the LLM computes beside a receive that waits for its sender, and the step's seconds."""
    ranks = issue_all(schedule, track_of=as_run, seconds_of=lambda action: costs.compute(action).seconds)
    replayed = run_kernels({rank: issued.kernels for rank, issued in ranks.items()}, num_queues=33)
    assert not replayed.stuck
    seconds = []
    for rank in schedule.shape.plan.units["llm"].ranks:
        computed = [(each.started_at, each.started_at + each.seconds) for each in ranks[rank].computed]
        spinning = [(each.started_at, each.met_at) for each in ranks[rank].kernels if each not in ranks[rank].computed]
        spans = pairwise(sorted({time for span in (*computed, *spinning) for time in span}))
        both = [end - start for start, end in spans if all(_covers(each, start, end) for each in (computed, spinning))]
        seconds.append(sum(both))
    return max(seconds) / replayed.seconds, replayed.seconds


def _covers(spans: Sequence[tuple[float, float]], start: float, end: float) -> bool:
    return any(first <= start and end <= last for first, last in spans)


@pytest.mark.parametrize(("replicas", "slowness"), [(2, 3.0), (4, 6.0)])
@pytest.mark.parametrize("builder", ["1f1b", "zb-h1"])
def test_receives_placed_by_durations_spin_half_as_long_at_most(builder, replicas, slowness):
    """Where encoders are slow and unit costs have receives about half the step beside computations; no step takes longer."""
    sizes, samples = {"vision": (replicas, 1, 1), "llm": (1, 2, 1)}, {"vision": deal(16, replicas), "llm": deal(16, 1)}
    schedule = BUILDERS[builder](build_case(build_graph("vision", frozen=("vision",)), sizes, samples))
    costs = costs_of(vision=slowness, llm=1.0)
    lowered = insert_communication(schedule), insert_communication(schedule, costs)
    (early_share, whole), (share, seconds) = (spinning_share(each, costs) for each in lowered)
    assert share < early_share / 2 and early_share >= 0.5
    assert seconds <= whole


@pytest.mark.parametrize("builder", ["1f1b", "zb-h1"])
def test_receives_posted_long_before_their_time_deadlock(builder):
    """The model of GPUs finds what it is there to find: a receive in the one queue before what its sender waits for."""
    case = build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 2, 1)}, {"vision": deal(6, 1), "llm": deal(6, 1)})
    lowered = insert_communication(BUILDERS[builder](case))
    assert not replay(lowered, num_queues=1, track_of=by_pair)
    assert replay(lowered, num_queues=1, track_of=by_pair, posted_ahead=8)
