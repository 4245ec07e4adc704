"""What all actions of a step need: `dependencies`, asked once per stage where it answers alike for all microbatches."""

from collections.abc import Mapping, Sequence

import numpy as np

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.event_arrays import Integers
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind
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

    Between stages of one unit, microbatch k needs microbatch k, whichever it is; so one microbatch is asked for there. Where
    routes lead elsewhere, and where a schedule cuts backwards of some microbatches only, every one is.
    O(actions + dependencies).
    """
    blocks: dict[_Block, list[int]] = {}
    for number, action in enumerate(computed):
        blocks.setdefault(action[:4], []).append(number)
    rows = {block: np.array(members) for block, members in blocks.items()}
    is_even = _is_even(form, blocks)
    owners: list[Integers] = [np.zeros(0, np.int64)]
    needs: list[Integers] = [np.zeros(0, np.int64)]
    asked_owners: list[int] = []
    asked_needs: list[int] = []
    for block, members in rows.items():
        if is_even and _stays_in_unit(block, plan):
            first = dependencies(computed[int(members[0])], graph, plan, assignment, form=form)
            columns = [_column(need, rows, members) for need in first]
            if columns:
                owners.append(np.repeat(members, len(columns)))
                needs.append(np.column_stack(columns).ravel())
            continue
        for number in members.tolist():
            found = [numbers[need] for need in dependencies(computed[number], graph, plan, assignment, form=form)]
            asked_owners += [number] * len(found)
            asked_needs += found
    owner = np.concatenate((*owners, np.array(asked_owners, np.int64)))
    need = np.concatenate((*needs, np.array(asked_needs, np.int64)))
    starts = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(computed)))))
    return starts, need[np.argsort(owner, kind="stable")]


def _column(need: Action, rows: Mapping[_Block, Integers], members: Integers) -> Integers:
    """The numbers of one need of every microbatch."""
    found = rows[need[:4]]
    assert len(found) in (1, len(members)), f"not all microbatches need {need}"
    return np.broadcast_to(found, members.shape)


def _is_even(form: ScheduleForm, blocks: Mapping[_Block, list[int]]) -> bool:
    """Whether the backwards of a stage are all whole or all split, and a microbatch has but one per stage."""
    if form.num_parts or form.repeats_encoders:
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
