"""What all actions of a step need: `dependencies`, asked once per stage where it answers alike for all microbatches."""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat

import numpy as np

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.event_arrays import Integers
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Place
from multimodal.values.schedule_form import ScheduleForm

_Block = tuple[ActionKind, str, int, int]
"""(kind, unit, replica, stage)."""


def needs_by_stage(
    computed: Sequence[Action],
    numbers: Mapping[Action, int],
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    form: ScheduleForm,
) -> tuple[Integers, Integers]:
    """Return, per action of `compute_actions`, what it needs: starts ([num_actions + 1]) and numbers, in `dependencies`' order.

    Between stages of one unit, microbatch k needs microbatch k, whichever it is; so one microbatch is asked for there, and a
    reduction needs all of its stage. Where routes lead elsewhere, and where a schedule cuts backwards of some microbatches only,
    every action is asked for.
    O(actions + dependencies).
    """
    rows: dict[_Block, list[int]] = {}
    for number, action in enumerate(computed):
        rows.setdefault(action[:4], []).append(number)
    is_even = _is_even(form, rows)
    owners: list[int] = []
    needs: list[int] = []
    for block, members in rows.items():
        if is_even and _stays_in_unit(block, plan):
            # Flat lists: blocks are many and short, so arrays would cost more.
            found = dependencies(computed[members[0]], graph, plan, assignment, form=form)
            columns = [_column(need, rows, len(members)) for need in found]
            owners += chain.from_iterable(repeat(number, len(columns)) for number in members)
            needs += chain.from_iterable(zip(*columns, strict=True))
            continue
        if is_even and _is_whole_reduction(block, form):
            backwards = rows.get(_last_backwards(block, form), [])
            owners += chain.from_iterable(repeat(number, len(backwards)) for number in members)
            needs += backwards * len(members)
            continue
        for number in members:
            asked = dependencies(computed[number], graph, plan, assignment, form=form)
            owners += repeat(number, len(asked))
            needs += map(numbers.__getitem__, asked)
    owner, need = np.array(owners, np.int64), np.array(needs, np.int64)
    starts = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(computed)))))
    return starts, need[np.argsort(owner, kind="stable")]


def _column(need: Action, rows: Mapping[_Block, list[int]], num_members: int) -> list[int]:
    """The numbers of one need of every microbatch."""
    found = rows[need[:4]]
    assert len(found) in (1, num_members), f"not all microbatches need {need}"
    return found if len(found) == num_members else found * num_members


def _is_even(form: ScheduleForm, blocks: Mapping[_Block, list[int]]) -> bool:
    """Whether the backwards of a stage are all whole or all split, and a microbatch has but one per stage."""
    if form.num_parts:
        return False
    return not form.split or not any(kind is ActionKind.BACKWARD for kind, *_ in blocks)


def _stays_in_unit(block: _Block, plan: Plan) -> bool:
    """Whether what it needs are other stages of its unit, or its own."""
    kind, unit, _, stage = block
    if kind is ActionKind.FORWARD:
        return stage > 0
    if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        return stage < plan.units[unit].num_virtual_stages - 1
    return kind is ActionKind.WEIGHT_GRADIENT


def _is_whole_reduction(block: _Block, form: ScheduleForm) -> bool:
    kind, unit, _, stage = block
    return kind is ActionKind.REDUCE_GRADIENTS and (unit, stage) not in form.reduced_by_layer


def _last_backwards(block: _Block, form: ScheduleForm) -> _Block:
    """What ends the gradients of a stage, microbatch by microbatch."""
    _, unit, replica, stage = block
    return form.last_kind(Place(unit, replica, stage, 0)), unit, replica, stage
