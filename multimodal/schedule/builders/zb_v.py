"""ZB-V: no bubble if forward and both halves of the backward take equally long, on V-shaped stages (Qi et al., section 6)."""

from functools import lru_cache
from itertools import chain

import numpy as np

from multimodal.schedule.builders.interleaved_1f1b import Order, num_chunks, ordered_pieces, stages_that_share
from multimodal.schedule.builders.one_f_one_b import forward_floors, microbatch_spans, stage_counts, stage_limits, storage_limits
from multimodal.schedule.list_schedule import Policy, list_schedule, split_units
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.cuts import StageKey
from multimodal.values.plan import Replica, UnitPlan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, step_work


def build_zb_v(shape: StepShape) -> Schedule:
    """Build the ZB-V schedule over the unit graph, in the compute dialect.

    Stage s of P of a V-shaped unit holds virtual stages s and 2 P - 1 - s, so the first stage also ends the forward and starts
    the backward. With F = I = W and m >= 2 P - 1 microbatches, no lane is idle from its first action to its last, within the
    memory of 1F1B (2 P chunks of half a stage). Units and replicas of another shape run as in `zb-h1`; so do V-shaped units with
    consumers in other units, whose two chunks then share one memory limit.

    Raises ScheduleError if no unit is V-shaped.
    """
    graph, plan = shape.graph, shape.plan
    shaped = [unit for unit in graph.unit_names if is_v_shaped(plan.units[unit])]
    if not shaped:
        found = ", ".join(f"{name} {unit.describe_ranges()}" for name, unit in plan.units.items())
        raise ScheduleError(
            f"zb-v needs a unit whose stages each hold two layer ranges in the shape of a V (the first stage the first and the "
            f"last range, the second stage the second and the last but one, ...), found {found}; give the LLM such ranges in the "
            "plan, or choose zb-h1"
        )
    depths = stage_counts(plan)
    spans = microbatch_spans(shape, depths=depths)
    limits = stage_limits(depths, spans=spans)
    storage = storage_limits(shape, limits)
    groups: dict[StageKey, StageKey] = {}
    for unit in shaped:
        for stages, each, _ in stages_that_share(unit, shape, has_order=is_folded):  # the memory of 2 P chunks
            limits[stages[0]] = storage[stages[0]] = 2 * len(each.stages) + sum(spans[stage] for stage in stages)
            groups.update(dict.fromkeys(stages, stages[0]))
    split = split_units(shape, graph.unit_names)
    last = [unit for unit in shaped if not graph.downstream(unit)]
    orders = (ordered_pieces(unit, step_work(split), has_order=is_folded, orders_of=_orders_of_stage) for unit in last)
    policy = Policy(
        forward_limits=limits,
        forward_floors=forward_floors(shape.plan, limits),
        storage_limits=storage,
        group_of=groups,
        forwards_go_first=True,
        orders=list(chain.from_iterable(orders)),
    )
    return list_schedule(split, policy)


def is_v_shaped(unit: UnitPlan) -> bool:
    """Return True if stage s of P holds virtual stages s and 2 P - 1 - s in any replica of the unit."""
    return any(map(is_folded, unit.replicas))


def is_folded(replica: Replica) -> bool:
    """Return True if stage s of its P stages holds virtual stages s and 2 P - 1 - s."""
    last, stages = 2 * len(replica.stages) - 1, replica.virtual_stages
    return num_chunks(replica) == 2 and all(each.stage_index == min(each.index, last - each.index) for each in stages)


@lru_cache(maxsize=256)
def _orders_of_stage(stage_index: int, num_stages: int, _: int, num_microbatches: int) -> tuple[Order]:
    """Return the order of one stage as published with the paper; with fewer than 2 P - 1 microbatches the rest is left out."""
    forward, gradient, weight = FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
    num_full, num_left = max(2 * num_stages - 1, num_microbatches), num_stages - stage_index
    steady = [(gradient, 0), (weight, 0), (forward, 1), (gradient, 1), (weight, 1)]
    steps = [
        *[(forward, 0)] * (2 * num_left - 1),
        *[(forward, 1), (forward, 0)] * stage_index,
        *[(forward, 1), (gradient, 1), (weight, 1)] * num_left,
        *[(forward, 0), *steady] * (num_full - num_stages - num_left + 1),
        *steady * (num_left - 1),
        *[(gradient, 0), (gradient, 1)] * stage_index,
        *[(gradient, 0), (weight, 0)] * num_left,
        *[(weight, 1)] * stage_index,
        *[(weight, 0)] * stage_index,
    ]
    rows, microbatches = np.array(steps), np.zeros(len(steps), np.int64)
    # Each of the six steps is there once for each microbatch, in the order of these.
    microbatches[np.lexsort(rows.T)] = np.tile(np.arange(num_full), 6)
    return (Order(*np.column_stack((rows, microbatches))[microbatches < num_microbatches].T),)
