"""A schedule's lanes as numbers of a step's actions: the form in which whole schedules are checked and run fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import cast

import numpy as np

from multimodal.schedule.event_arrays import Integers
from multimodal.schedule.kept_by_identity import KeptByIdentity
from multimodal.schedule.step_table import StepTable, step_table
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.schedule_form import ScheduleForm, form_of


@dataclass(frozen=True)
class NumberedLanes:
    """The lanes of a schedule, all of whose actions belong to the step."""

    table: StepTable
    lowered: bool
    lane_starts: Integers
    """[num_lanes + 1] into `lane_actions`."""
    lane_actions: Integers
    """What every lane does, as numbers of the table's actions."""

    @property
    def num_lanes(self) -> int:
        """Lanes of the plan."""
        return len(self.lane_starts) - 1

    @cached_property
    def lane_of_entry(self) -> Integers:
        """Per entry of `lane_actions` its lane."""
        return np.repeat(np.arange(self.num_lanes), np.diff(self.lane_starts))

    @cached_property
    def keys(self) -> Integers:
        """Per entry a number of its action and lane together."""
        return self.lane_actions * self.num_lanes + self.lane_of_entry

    @cached_property
    def in_order_of_keys(self) -> Integers:
        """The entries by ascending key."""
        return np.argsort(self.keys, kind="stable")

    @cached_property
    def is_regular(self) -> bool:
        """Whether every action stands only in lanes of its stage, and at most once in each."""
        starts, lanes = self.table.lane_rows
        owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) * self.num_lanes + lanes
        found = self.table.stage_numbers[self.lane_actions] * self.num_lanes + self.lane_of_entry
        ascending = self.keys[self.in_order_of_keys]
        return bool(np.isin(found, owners).all() and (ascending[1:] != ascending[:-1]).all())


def number_lanes(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool
) -> NumberedLanes | None:
    """Look every action up; None where one does not belong to the step in this dialect. O(actions)."""
    table = step_table(graph, plan, assignment, form=known_form(schedule))
    _, lanes = table.kept_lanes.find(
        schedule, like=lambda made: made[0] == lowered, make=lambda: (lowered, _number(schedule, table, lowered))
    )
    return cast(NumberedLanes | None, lanes)


def keep_numbers(lowered: Schedule, table: StepTable, lanes: Sequence[Integers]) -> None:
    """Remember the numbers of a lowered schedule that was made of them, lane by lane."""
    starts = np.concatenate(([0], np.cumsum([len(lane) for lane in lanes])))
    numbered = NumberedLanes(table, True, starts, np.concatenate([np.zeros(0, np.int64), *lanes]))
    table.kept_lanes.find(lowered, like=lambda made: made[0], make=lambda: (True, numbered))
    _FORMS.find(lowered, like=lambda _: True, make=lambda: table.form)


def known_form(schedule: Schedule) -> ScheduleForm:
    """`form_of` a schedule, read from its actions once."""
    return _FORMS.find(schedule, like=lambda _: True, make=lambda: form_of(schedule))


_FORMS: KeptByIdentity[Schedule, ScheduleForm] = KeptByIdentity()


def _number(schedule: Schedule, table: StepTable, lowered: bool) -> NumberedLanes | None:
    if len(schedule.lanes) != len(table.plan.lanes) or (lowered and not table.has_distinct_messages):
        return None
    numbers = table.numbers if lowered else table.computed_numbers
    found = list(map(numbers.get, chain.from_iterable(lane.actions for lane in schedule.lanes)))
    if None in found:
        return None
    lengths = [len(lane.actions) for lane in schedule.lanes]
    return NumberedLanes(table, lowered, np.concatenate(([0], np.cumsum(lengths))), np.array(found, np.int64))
