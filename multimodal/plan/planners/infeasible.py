"""Says why nothing fits, and what would."""

from dataclasses import replace

from multimodal.plan.planners.layer_times import PlanningTimes
from multimodal.plan.planners.memory_estimate import MemoryEstimate
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.unit_options import list_options
from multimodal.values.errors import PlanError

_LARGEST_SEARCH = 1 << 14
"""GPUs up to which a fitting number is searched."""


def infeasible(request: PlanningRequest, *, planner: str) -> PlanError:
    """Return the error of a planner that found nothing: which unit does not fit at all, or how many GPUs all units need."""
    wide = replace(request, num_gpus=_LARGEST_SEARCH)
    times, memory = PlanningTimes(wide), MemoryEstimate(wide)
    gigabytes = request.planned_memory_bytes / 1e9
    where = f"planner '{planner}': no plan on {request.num_gpus} GPUs fits {gigabytes:.3g} GB each"
    fewest = {}
    for unit in request.graph.unit_names:
        options = list_options(
            wide,
            times,
            memory,
            unit=unit,
            micro_batch_size=request.default_micro_batch_size,
            max_gpus=_LARGEST_SEARCH,
        )
        if not len(options):
            return PlanError(
                f"{where}: unit '{unit}' does not fit at any tensor, pipeline or data parallel size that is allowed; use GPUs "
                "with more memory, freeze it, lower the memory headroom, or unfix its sizes"
            )
        fewest[unit] = int(options.gpus.min())
    total = sum(fewest.values())
    needs = ", ".join(f"'{unit}' {count}" for unit, count in fewest.items())
    if total > request.num_gpus:
        return PlanError(f"{where}: the units need at least {needs}, {total} GPUs in all; use {total} or more")
    return PlanError(
        f"{where} under this planner's rules and the fixed sizes, though each unit alone would fit ({needs} GPUs); use more "
        "GPUs, another planner (disttrain, braid), or fewer fixed sizes"
    )
