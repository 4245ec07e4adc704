"""The order in which replicas that share experts compute: the same in all of them."""

import numpy as np

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.schedule.align_replicas import align_replicas, exchanges_tokens, kind_of_exchange
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Integers
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from multimodal.values.work.step_work import KIND_NUMBERS, StepWork

_BACKWARD, _INPUT_GRADIENT = (KIND_NUMBERS[kind] for kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT))
_EXCHANGING = [KIND_NUMBERS[ActionKind.FORWARD], _BACKWARD, _INPUT_GRADIENT]


def check_expert_groups(schedule: Schedule) -> None:
    """Raise ScheduleError if replicas that share experts would wait for each other forever.

    In every layer with experts they exchange tokens, so the i-th computation of a stage must be of one kind and microbatch in all
    replicas, and some order of the whole step must bring all of them there together. O(actions + dependencies).
    """
    units = schedule.shape.plan.units_with_shared_experts
    for unit in units:
        plan = schedule.shape.plan.units[unit]
        for stage in range(plan.num_virtual_stages):
            orders = [
                [
                    (kind_of_exchange(action), action[4:])
                    for action in schedule.lanes[schedule.shape.plan.lanes_of_stage(unit, replica, stage)[0]].actions
                    if action[1:4] == (unit, replica, stage) and exchanges_tokens(action)
                ]
                for replica in range(plan.data_parallel_size)
            ]
            for replica, order in enumerate(orders):
                if order != orders[0]:
                    raise ScheduleError(_problem(unit, f"stage {stage} of replicas 0 and {replica} computes in different orders"))
    if units and any(align_replicas(schedule, units)):
        raise ScheduleError(_problem(units[0], "other units keep its replicas from computing together"))


def computed_together(work: StepWork) -> Integers | None:
    """Return, for every piece, the first replica's piece that it is computed together with; None if no experts are shared.

    Pieces are computed together if they are forwards or backwards of the same number in stages with shared experts. O(pieces
    log).
    """
    if not work.plan.units_with_shared_experts:
        return None
    joined = np.arange(work.num_pieces(lowered=True))
    stages, pieces = work.computed_stages, work.pieces
    has_experts = []
    for unit, replica, index in work.stages:
        layers = work.plan.virtual_stage(unit, replica, index).layers
        names = work.graph.unit(unit).layers[layers.start : layers.stop]
        has_experts.append(any(name in LAYER_KINDS and LAYER_KINDS[name].exchanges_tokens for name in names))
    sizes = np.array([work.plan.units[name].expert_parallel_size for name in pieces.units])[pieces.unit_of_stage[stages]]
    chosen = np.flatnonzero(np.array(has_experts)[stages] & (sizes > 1) & np.isin(work.kinds, _EXCHANGING))
    kinds = np.where(work.kinds == _INPUT_GRADIENT, _BACKWARD, work.kinds).astype(np.int64)
    groups = work.replicas // sizes
    first_stages = stages - work.replicas  # the numbers of a stage's replicas are consecutive
    columns = (first_stages, groups, kinds, work.microbatches, pieces.parts)
    keys = np.stack([np.asarray(column, np.int64)[chosen] for column in columns])
    _, first, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    joined[chosen] = chosen[first[group.ravel()]]
    return joined


def _problem(unit: str, found: str) -> str:
    return (
        f"unit '{unit}': {found}, and replicas that share experts exchange tokens in every layer; use --schedule 1f1b, or "
        "--expert-model-parallel-size 1"
    )
