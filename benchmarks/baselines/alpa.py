"""Alpa: every unit's stages on meshes of its own, by a pipeline's latency (Optimus 5 compares with it)."""

from collections.abc import Iterator, Mapping

import numpy as np

from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_options import UnitOptions, infeasible, list_options
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.arrays.rows import Integers

_NUM_LIMITS = 64
"""Limits of the slowest stage that are tried: Alpa skips those that are too close to the one before."""


def plan_alpa(request: PlanningRequest) -> PlannedRun:
    """Minimise T = sum_i t_i + (B - 1) max_j t_j, with t the stages' latencies per microbatch, and B microbatches.

    For every limit of max_j t_j, the stages within it with the least sum are found by dynamic programming over units and GPUs
    (Alpa, Eq. 3 and Alg. 1); the first T whose plan fits into the memory is taken. O(limits x units x GPUs x meshes). As in Alpa,
    reductions over replicas and uneven lengths are ignored. Raises PlanError if nothing fits.
    """
    units = request.graph.units
    options = {unit.name: list_options(request, unit.name, max_gpus=request.num_gpus - len(units) + 1) for unit in units}
    if all(map(len, options.values())):
        for seconds, rows in sorted(_pipelines(options, request), key=lambda each: each[0]):
            layouts = {unit.name: options[unit.name].layout(row, unit) for unit, row in zip(units, rows, strict=True)}
            candidate = Candidate(layouts)
            if candidate.fits(request):
                return candidate.to_run(request, seconds=seconds)
    raise infeasible(request)


def _pipelines(options: Mapping[str, UnitOptions], request: PlanningRequest) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the best pipeline for every limit that allows one, in the order of the limits: T, and a row for each unit."""
    latencies = np.unique(np.concatenate([each.stage_seconds / each.data for each in options.values()]))
    limits = latencies[np.unique(np.linspace(0, len(latencies) - 1, _NUM_LIMITS).round().astype(np.int64))]
    for limit in limits.tolist():
        rows = _least_sum(list(options.values()), limit=limit, num_gpus=request.num_gpus)
        if rows is not None:
            chosen = [(each, row) for each, row in zip(options.values(), rows, strict=True)]
            total = sum(float(each.chain_seconds[row] / each.data[row]) for each, row in chosen)
            slowest = max(float(each.stage_seconds[row] / each.data[row]) for each, row in chosen)
            yield total + (request.num_microbatches - 1) * slowest, rows


def _least_sum(units: list[UnitOptions], *, limit: float, num_gpus: int) -> tuple[int, ...] | None:
    """Return each unit's row with the least sum of latencies whose stages keep the limit; None if there are too few GPUs."""
    least = np.zeros(num_gpus + 1)  # by the number of GPUs used
    chosen: list[Integers] = []
    for options in units:
        before, least, rows = least, np.full(num_gpus + 1, np.inf), np.full(num_gpus + 1, -1)
        latency = options.chain_seconds / options.data
        allowed = np.flatnonzero(options.stage_seconds / options.data <= limit)
        order = allowed[np.lexsort((latency[allowed], options.gpus[allowed]))]
        first_of_gpus = order[np.unique(options.gpus[order], return_index=True)[1]] if len(order) else order
        for row in first_of_gpus.tolist():
            count = int(options.gpus[row])
            with_row = before[: len(before) - count] + latency[row]
            is_less = with_row < least[count:]
            least[count:][is_less] = with_row[is_less]
            rows[count:][is_less] = row
        chosen.append(rows)
    used = int(np.argmin(least))
    if not np.isfinite(least[used]):
        return None
    found: list[int] = []
    for options, rows in zip(reversed(units), reversed(chosen), strict=True):
        found.insert(0, int(rows[used]))
        used -= int(options.gpus[found[0]])
    return tuple(found)
