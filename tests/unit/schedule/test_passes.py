"""Passes: text before and after, and what a simulated step gains."""

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.passes.move_actions import duration_of
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.simulate import simulate_schedule, timeline_of_unit_costs
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, LayerRange
from multimodal.values.schedule import Lane, Schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.built_schedules import UniformCosts
from tests.unit.schedule.schedule_cases import build_case, build_graph, built_cases, deal
from tests.unit.values.work.dependencies import dependencies, needs_message


def deferred() -> StepShape:
    """Entrain's case: sample 1 of the encoder's first microbatch runs in the LLM's second one."""
    return build_case(
        build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": [[[0, 1], [2]]], "llm": [[[0], [1, 2]]]}
    )


def check(schedule: Schedule) -> None:
    """Both dialects are valid: no action is lost, none stands twice, and nothing waits in a circle."""
    validate_schedule(schedule)
    validate_schedule(insert_communication(schedule))


def llm(*, dp: int = 2, num_microbatches: int = 2, **layout: int) -> StepShape:
    groupings = {"llm": deal(num_microbatches * dp, dp)}
    return build_case(build_graph(), {"llm": (dp, 1, 1)}, groupings, layouts={"llm": layout})


@pytest.mark.parametrize("whole", [0.4, 2.0, 8.0])
def test_a_cut_reduction_hides_behind_the_last_backward(whole: float) -> None:
    """With F = 1 and B = 2: what is not hidden is the last layer, or what takes longer than the backward."""
    case = llm(dp=3, num_microbatches=4)
    shares = {None: 1.0, LayerRange(0, 1): 0.25, LayerRange(1, 10): 0.75}
    costs = UniformCosts(collective=lambda action: whole * shares[action.covers])

    def seconds(*, by_layer: bool) -> float:
        schedule = BUILDERS["1f1b"](case)
        if by_layer:
            schedule = reduce_by_layer(schedule)
        return simulate_schedule(insert_communication(schedule), costs).iteration_seconds

    assert seconds(by_layer=False) == pytest.approx(12 + whole)
    assert seconds(by_layer=True) == pytest.approx(12 + max(0.25 * whole, whole - 2))


UNDONE = [(name, later) for name, row in PASSES.items() for later in row.undone_by]
PAIRS = [pair for pair in itertools.permutations(PASSES, 2) if pair not in UNDONE]


def seconds(schedule: Schedule) -> list[float]:
    """Return how long a schedule takes under unit costs with fillers in line and, if it has any, with fillers in waits."""
    in_line = duration_of(schedule)
    assert in_line < math.inf
    if not any(lane.fillers for lane in schedule.lanes):
        return [in_line, 0.0]
    return [in_line, timeline_of_unit_costs(schedule).duration_seconds]


def assert_kept(case: StepShape, before: Schedule, after: Schedule) -> None:
    """What `before` cuts, splits, gathers and fills, `after` does, too."""
    was, now = before.shape.cuts, after.shape.cuts
    assert was.split <= now.split
    assert was.num_subsets.items() <= now.num_subsets.items()
    assert was.reduced_by_layer <= now.reduced_by_layer
    assert was.gathers_parameters <= now.gathers_parameters
    for old, new in zip(before.lanes, after.lanes, strict=True):
        assert num_leading_gathers(old.actions) <= num_leading_gathers(new.actions)
        alike = {name for name, unit in case.plan.units.items() if not unit.is_unlike}
        assert_halves_of_reductions_stand_by_their_backward(tuple(action for action in new.actions if action.unit in alike))
        if old.actions == new.actions:
            assert old.fillers <= new.fillers
    for lane, position in unfilled(before, after):
        assert not waits_for_message(case, after, lane, position), "a filler is lost"


def unfilled(before: Schedule, after: Schedule) -> Iterator[tuple[Lane, int]]:
    """Where fillers of `before` stand in line; the parts of one that is cut count as the whole."""
    filled = [{lane.actions[position]._replace(covers=None) for position in lane.fillers} for lane in before.lanes]
    for index, lane in enumerate(after.lanes):
        for position, action in enumerate(lane.actions):
            if position not in lane.fillers and filled[index] & {action, action._replace(covers=None)}:
                yield lane, position


def waits_for_message(case: StepShape, schedule: Schedule, lane: Lane, position: int) -> bool:
    """True if what follows, but for weight gradients, is a computation that needs a message."""
    rest = [action for action in lane.actions[position:] if action.kind is not ActionKind.WEIGHT_GRADIENT]
    if not rest:
        return False
    needs = dependencies(rest[0], schedule.shape)
    return any(needs_message(need, rest[0], case.plan) for need in needs)


def num_leading_gathers(actions: tuple[Action, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda action: action.kind is ActionKind.GATHER_PARAMETERS, actions))


def assert_halves_of_reductions_stand_by_their_backward(actions: tuple[Action, ...]) -> None:
    for position, action in enumerate(actions):
        if action.kind is ActionKind.REDUCE_GRADIENTS and action.covers not in (None, LayerRange(0, 1)):
            rest, first_layer = actions[position + 1 : position + 3], action._replace(covers=LayerRange(0, 1))
            assert first_layer in rest
            assert rest[0] == first_layer or rest[0].kind is ActionKind.BACKWARD


def is_taken(names: list[str]) -> bool:
    """True unless a pass of them would undo an earlier one."""
    return not any(pair in UNDONE for pair in itertools.combinations(names, 2))


def warm_ups(schedule: Schedule) -> list[int]:
    backwards = ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT
    kinds = ([action.kind for action in lane.actions if action.unit == "llm"] for lane in schedule.lanes)
    first = [itertools.takewhile(lambda kind: kind not in backwards, lane) for lane in kinds]
    return [sum(kind is ActionKind.FORWARD for kind in lane) for lane in first]


@settings(max_examples=25)
@given(built=built_cases(), triple=st.permutations(sorted(PASSES)))
def test_a_pass_keeps_what_those_before_it_did(built: tuple[StepShape, str], triple: list[str]) -> None:
    case, builder = built
    for names in (*PAIRS, *([tuple(triple[:3])] if is_taken(triple[:3]) else [])):
        schedule = BUILDERS[builder](case)
        for name in names:
            after = PASSES[name](schedule)
            check(after)
            assert_kept(case, schedule, after)
            if name in ("defer-receives", "delay-forward"):
                assert all(new <= old for new, old in zip(seconds(after), seconds(schedule), strict=True))
            elif names[0] == "delay-forward":
                assert warm_ups(after) == warm_ups(schedule)
            schedule = after


@settings(max_examples=40)
@given(built=built_cases(), name=st.sampled_from(sorted(PASSES)))
def test_a_pass_twice_changes_nothing_or_makes_nothing_longer(built: tuple[StepShape, str], name: str) -> None:
    """The two that move actions into waits may find more the second time; `--schedule-passes` refuses a name given twice."""
    case, builder = built
    once = PASSES[name](BUILDERS[builder](case))
    twice = PASSES[name](once)
    if name in ("defer-receives", "delay-forward"):
        check(twice)
        assert seconds(twice) <= seconds(once)
    else:
        assert twice == once
