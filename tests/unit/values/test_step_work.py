from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ACTION_TABLE, Action, LayerRange, Resource
from multimodal.values.dependencies import dependencies
from multimodal.values.schedule import Schedule, read_cuts
from multimodal.values.step_graph import StepGraph
from multimodal.values.step_work import RESOURCE_NUMBERS, step_work
from tests.unit.schedule.built_schedules import cut_schedules, rewritten_schedules
from tests.unit.schedule.schedule_cases import golden_cases


def rows(starts: np.ndarray, values: np.ndarray) -> list[list[int]]:
    return [values[first:last].tolist() for first, last in pairwise(starts)]


@settings(max_examples=120)
@given(built=rewritten_schedules())
def test_the_numbers_say_what_dependencies_say_for_every_builder_and_pass(built: tuple[StepGraph, Schedule]) -> None:
    check_numbers(built[1])


@settings(max_examples=120)
@given(built=cut_schedules())
def test_the_numbers_say_what_dependencies_say_of_ranges_of_segments(built: tuple[StepGraph, Schedule]) -> None:
    check_numbers(built[1])


def check_numbers(schedule: Schedule) -> None:
    step, work = schedule.step, schedule.work
    assert step.cuts == read_cuts((action for lane in schedule.lanes for action in lane.actions), schedule.step.plan)
    for lowered in (False, True):
        actions = work.actions if lowered else work.computed
        assert [[work.actions[need] for need in row] for row in rows(*work.needs_in(lowered=lowered))] == [
            list(dependencies(action, step, lowered=lowered)) for action in actions
        ]
        assert [work.numbers(lowered=lowered)[action] for action in actions] == list(range(len(actions)))
    assert [work.stages[stage] for stage in work.stage_numbers] == [action[1:4] for action in work.actions]
    lanes = rows(*work.lanes_of(np.arange(len(work.actions))))
    assert lanes == [list(step.lanes_of(*action[1:4])) for action in work.actions]
    assert work.resources.tolist() == [RESOURCE_NUMBERS[ACTION_TABLE[action.kind].resource] for action in work.actions]
    collective_of, *members = work.collective_rows
    for number, (action, collective) in enumerate(zip(work.actions, collective_of.tolist(), strict=True)):
        is_collective = ACTION_TABLE[action.kind].resource is Resource.COLLECTIVE
        assert is_collective == (collective >= 0)
        if is_collective:
            together = [work.actions[member] for member in rows(*members)[collective]]
            assert action in together and number in rows(*members)[collective]
            assert sorted(together) == takers_of(action, step)


def takers_of(action: Action, step: StepGraph) -> list[Action]:
    """The collectives of all replicas that are one with an action: of the stage, or where replicas differ, of the layers."""
    unit = step.plan.units[action.unit]
    if not unit.is_unlike:
        return [action._replace(replica=replica) for replica in range(unit.data_parallel_size)]
    if not isinstance(action.covers, LayerRange):
        return [action]
    layers = step.plan.virtual_stage(*action[1:4]).layers[action.covers.first : action.covers.end]
    found = []
    for replica, each in enumerate(unit.replicas):
        (stage,) = (stage for stage in each.virtual_stages if layers.start in stage.layers)
        first = layers.start - stage.layers.start
        found.append(Action(action.kind, action.unit, replica, stage.index, covers=LayerRange(first, first + len(layers))))
    return sorted(found)


def test_work_is_numbered_once_for_all_steps_of_one_shape() -> None:
    step = golden_cases()["crossed_groupings"]
    schedule = BUILDERS["zb-h1"](step)
    assert schedule.work is not step_work(step)
    assert step_work(step.with_cuts(schedule.step.cuts)) is schedule.work
    other = schedule.for_step(replace(step))
    assert other.step is not schedule.step and other.work is schedule.work and other == schedule
