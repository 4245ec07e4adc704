"""What the validator accepts finishes on GPUs, where messages are not buffered and streams share hardware queues."""

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.plan.communicators import track_of
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.values.action import Action
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.built_schedules import rewritten_schedules
from tests.unit.schedule.nccl_replay import replay
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal


def by_pair(action: Action) -> Hashable:
    """A communicator for each pair of stages and direction."""
    assert action.peer is not None
    return action.kind.value[-1], frozenset((action.place[:3], action.peer[:3]))


def as_run(action: Action) -> Hashable:
    """The communicators of a run."""
    assert action.peer is not None
    return track_of("forward" if action.kind.value.endswith("F") else "backward", action.place, action.peer)


def all_on_one(action: Action) -> Hashable:
    """One communicator."""
    return ""


TRACKS = {each.__name__: each for each in (as_run, by_pair, all_on_one)}


@settings(max_examples=100)
@given(built=rewritten_schedules(), num_queues=st.sampled_from([1, 2, 8, 33]), tracks=st.sampled_from(sorted(TRACKS)))
def test_every_schedule_finishes_on_any_number_of_queues_and_communicators(
    built: tuple[StepShape, Schedule], num_queues: int, tracks: str
) -> None:
    lowered = insert_communication(built[1])
    assert not replay(lowered, num_queues=num_queues, track_of=TRACKS[tracks])


@pytest.mark.parametrize("builder", ["1f1b", "gpipe", "eager-1f1b", "zb-h1"])
def test_receives_posted_long_before_their_time_deadlock(builder: str) -> None:
    """The model finds what it is there to find: a receive in the one queue before what its sender waits for."""
    case = build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 2, 1)}, {"vision": deal(6, 1), "llm": deal(6, 1)})
    lowered = insert_communication(BUILDERS[builder](case))
    assert not replay(lowered, num_queues=1, track_of=by_pair)
    assert replay(lowered, num_queues=1, track_of=by_pair, posted_ahead=8)
