"""The idle time of a simulated step, by kind (Optimus, Table 1)."""

from collections.abc import Mapping

import numpy as np

from multimodal.schedule.compile_schedule import CompiledSchedule
from multimodal.schedule.simulate_events import EventTimes, NodeKind
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Floats
from multimodal.values.work.step_work import KIND_NUMBERS

BUBBLE_KINDS = ("dp_all_gather", "dp_reduce_scatter", "pp_warmup", "pp_cooldown", "pp_other", "tp")


def bubble_fractions(compiled: CompiledSchedule, times: EventTimes, *, iteration_seconds: float) -> Mapping[str, float]:
    """Return kind -> fraction of lane time (lanes x iteration); every moment of every lane belongs to at most one kind.

    A lane's idle time before its first computation is warm-up, and between two computations `pp_other`; in both, the time until
    the parameters of the next computation are gathered is `dp_all_gather` instead. After its last computation a lane cools down
    until the last computation in its pipeline (its component), then waits for the reduction of gradients, its own or slower
    replicas'; without reductions, all of it is cool-down. A lane without computations is idle for `pp_other`. `tp` is the part of
    computations in which a lane waits for a collective inside a layer and runs nothing else.
    """
    arrays = compiled.arrays
    num_lanes = arrays.num_lanes
    is_computed = arrays.kinds[arrays.lane_nodes] == NodeKind.COMPUTE
    nodes, lanes = arrays.lane_nodes[is_computed], compiled.lane_of_entry[is_computed]
    order = np.lexsort((times.end_seconds[nodes], times.start_seconds[nodes], lanes))
    nodes, lanes = nodes[order], lanes[order]
    start, end = times.start_seconds[nodes], times.end_seconds[nodes]
    is_first = np.diff(lanes, prepend=-1) != 0
    is_last = np.diff(lanes, append=num_lanes) != 0
    free_at = np.where(is_first, 0.0, np.concatenate(([0.0], end[:-1]))) if len(nodes) else end
    gathering = np.clip(np.minimum(_gathered_at(compiled, times)[nodes], start) - free_at, 0.0, None)
    waiting = start - free_at - gathering
    computed_at = np.zeros(int(compiled.component_of_lane.max(initial=-1)) + 1)
    np.maximum.at(computed_at, compiled.component_of_lane[lanes], end)
    pipeline_end = computed_at[compiled.component_of_lane[lanes[is_last]]]
    after = float(np.sum(iteration_seconds - pipeline_end))
    collectives = compiled.pieces[arrays.kinds == NodeKind.COLLECTIVE]
    reduces = bool((compiled.schedule.work.kinds[collectives] == KIND_NUMBERS[ActionKind.REDUCE_GRADIENTS]).any())
    num_idle_lanes = num_lanes - int(is_last.sum())
    seconds = {
        "dp_all_gather": float(gathering.sum()),
        "dp_reduce_scatter": after if reduces else 0.0,
        "pp_warmup": float(waiting[is_first].sum()),
        "pp_cooldown": float(np.sum(pipeline_end - end[is_last])) + (0.0 if reduces else after),
        "pp_other": float(waiting[~is_first].sum()) + num_idle_lanes * iteration_seconds,
        "tp": float(compiled.unfilled_seconds[is_computed].sum()),
    }
    lane_time = num_lanes * iteration_seconds
    return {kind: seconds[kind] / lane_time if lane_time else 0.0 for kind in BUBBLE_KINDS}


def _gathered_at(compiled: CompiledSchedule, times: EventTimes) -> Floats:
    """Return the time at which the parameters that each node needs are gathered; 0 if it needs none."""
    arrays = compiled.arrays
    gathered_at = np.zeros(arrays.num_nodes)
    owners = np.repeat(np.arange(arrays.num_nodes), np.diff(arrays.need_starts))
    is_collective = arrays.kinds[arrays.needs] == NodeKind.COLLECTIVE
    np.maximum.at(gathered_at, owners[is_collective], times.end_seconds[arrays.needs[is_collective]])
    return gathered_at
