"""Strategies for schedules of every builder and pass, and for broken ones."""

from hypothesis import strategies as st

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.values.schedule import Lane, Schedule, lane_of
from multimodal.values.step_graph import StepGraph
from tests.unit.schedule.schedule_cases import built_cases


@st.composite
def rewritten_schedules(draw: st.DrawFn) -> tuple[StepGraph, Schedule]:
    """A random case and a compute-dialect schedule for it, of any builder, with any passes."""
    case, builder = draw(built_cases())
    passes = draw(st.lists(st.sampled_from(sorted(PASSES)), unique=True, max_size=3))
    schedule = BUILDERS[builder](case)
    for name in passes:
        schedule = PASSES[name](schedule)
    return case, schedule


@st.composite
def built_schedules(draw: st.DrawFn) -> tuple[StepGraph, Schedule, bool]:
    """A random case, a schedule for it in either dialect, and whether it is lowered."""
    case, schedule = draw(rewritten_schedules())
    lowered = draw(st.booleans())
    if lowered:
        schedule = insert_communication(schedule)
    return case, schedule, lowered


@st.composite
def broken_schedules(draw: st.DrawFn) -> tuple[StepGraph, tuple[Lane, ...], bool]:
    """As `built_schedules`, but actions of a lane change places, are missing, stand twice, or in another lane."""
    case, schedule, lowered = draw(built_schedules())
    lanes = [list(lane.actions) for lane in schedule.lanes]
    for _ in range(draw(st.integers(1, 3))):
        lane = draw(st.sampled_from([index for index, actions in enumerate(lanes) if actions] or [0]))
        actions = lanes[lane]
        if not actions:
            continue
        first, second = (draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        match draw(st.sampled_from(["swap", "swap", "swap", "drop", "repeat", "move"])):
            case "swap":
                actions[first], actions[second] = actions[second], actions[first]
            case "drop":
                actions.pop(first)
            case "repeat":
                actions.insert(second, actions[first])
            case "move":
                lanes[draw(st.integers(0, len(lanes) - 1))].append(actions.pop(first))
    kept = zip(schedule.lanes, lanes, strict=True)
    return case, tuple(lane_of(lane.ranks, actions, lane.fillers) for lane, actions in kept), lowered
