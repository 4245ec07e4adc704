import gc
import weakref
from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.expected_actions import expected_actions
from multimodal.schedule.numbered_lanes import known_form, number_lanes
from multimodal.schedule.step_table import resource_number, step_table
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment
from multimodal.values.schedule import ACTION_TABLE, Resource, Schedule
from multimodal.values.schedule_form import form_of
from tests.unit.schedule.built_schedules import rewritten_schedules
from tests.unit.schedule.schedule_cases import Case, golden_cases


def rows(starts, values):
    return [values[first:last].tolist() for first, last in pairwise(starts)]


@settings(max_examples=120)
@given(built=rewritten_schedules())
def test_the_table_says_what_dependencies_say_for_every_builder_and_pass(built: tuple[Case, Schedule]) -> None:
    (graph, plan, assignment), schedule = built
    form = form_of(schedule)
    table = step_table(graph, plan, assignment, form=form)
    assert table.actions == expected_actions(graph, plan, assignment, lowered=True, form=form)
    assert table.computed == expected_actions(graph, plan, assignment, lowered=False, form=form)
    for lowered, found in (
        (False, rows(table.need_starts, table.needs)),
        (True, rows(*table.lowered_needs)),
    ):
        actions = table.actions if lowered else table.computed
        assert [[table.actions[need] for need in row] for row in found] == [
            list(dependencies(action, graph, plan, assignment, lowered=lowered, form=form)) for action in actions
        ]
    assert table.has_distinct_messages
    assert [table.numbers[action] for action in table.actions] == list(range(len(table.actions)))
    assert [table.stages[stage] for stage in table.stage_numbers] == [action[1:4] for action in table.actions]
    lanes = rows(*table.lanes_of_actions(np.arange(len(table.actions))))
    assert lanes == [list(plan.lanes_of_stage(*action[1:4])) for action in table.actions]
    assert table.resources.tolist() == [resource_number(ACTION_TABLE[action.kind].resource) for action in table.actions]
    assert table.unit_costs.tolist() == [unit_cost(action, graph, plan) for action in table.computed]
    collective_of, *members = table.collective_rows
    for number, (action, collective) in enumerate(zip(table.actions, collective_of.tolist(), strict=True)):
        is_collective = ACTION_TABLE[action.kind].resource is Resource.COLLECTIVE
        assert is_collective == (collective >= 0)
        if is_collective:
            together = [table.actions[member] for member in rows(*members)[collective]]
            assert action in together and number in rows(*members)[collective]
            assert together == [action._replace(replica=replica) for replica in range(plan.units[action.unit].data_parallel_size)]


def test_a_table_is_made_once_and_goes_with_its_assignment() -> None:
    graph, plan, assignment = case = golden_cases()["crossed_groupings"]
    schedule = BUILDERS["zb-h1"](*case)
    table = step_table(graph, plan, assignment, form=form_of(schedule))
    assert step_table(graph, plan, assignment, form=known_form(schedule)) is table
    assert step_table(graph, plan, assignment) is not table
    own = Assignment(assignment.units)
    numbered = number_lanes(schedule, graph=graph, plan=plan, assignment=own, lowered=False)
    assert numbered is not None and numbered.table is not table
    assert number_lanes(schedule, graph=graph, plan=plan, assignment=own, lowered=False) is numbered
    gone = weakref.ref(numbered.table)
    del numbered, own
    gc.collect()
    assert gone() is None
