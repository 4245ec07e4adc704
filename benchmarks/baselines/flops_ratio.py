"""Every unit on GPUs of its own, in proportion to its FLOPs (DistTrain 4.2 compares with it)."""

from collections.abc import Mapping

import numpy as np

from multimodal.cost.flops import unit_flops
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import estimate_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout
from multimodal.plan.planners.estimate.unit_options import UnitOptions, infeasible, list_options
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.stable_batch import proportional_gpus
from multimodal.values.model_graph import Role


def plan_flops_ratio(request: PlanningRequest) -> PlannedRun:
    """Give every unit GPUs in proportion to its FLOPs (frozen parts considered), and the fastest parallelism of its own in them.

    This ignores what DistTrain's allocation is about: tensor parallelism costs communication, so equal FLOPs per GPU are not
    equal times. A unit gets at least the fewest GPUs that it fits in. Raises PlanError if nothing fits.
    """
    names = request.graph.unit_names
    options = {name: list_options(request, name, max_gpus=request.num_gpus) for name in names}
    layouts = _divide_gpus(request, options)
    if layouts is None:
        raise infeasible(request)
    candidate = Candidate({name: layouts[name] for name in names})
    return candidate.to_run(request, seconds=estimate_seconds(request, candidate))


def _divide_gpus(request: PlanningRequest, options: Mapping[str, UnitOptions]) -> dict[str, UnitLayout] | None:
    """Divide GPUs and choose each unit's parallelism, from the last unit back; None if they do not fit together.

    An encoder that must keep activations for the microbatches in flight behind it may need more GPUs than its share: then it gets
    them, and the division starts again.
    """
    loads, vocab_size = request.loads, request.vocab_size
    work = {name: unit_flops(request.graph, name, vocab_size=vocab_size).of(loads.of_average(name, 1)) for name in options}
    fewest = {name: int(each.gpus.min()) if len(each) else request.num_gpus + 1 for name, each in options.items()}
    while sum(fewest.values()) <= request.num_gpus:
        budgets = proportional_gpus(work, fewest=fewest, num_gpus=request.num_gpus)
        layouts: dict[str, UnitLayout] = {}
        in_flight = 0.0
        for unit in reversed(request.graph.units):
            chosen = options[unit.name]
            row = _fastest(chosen, budgets[unit.name], in_flight, request.num_microbatches)
            if row is None:
                enough = chosen.gpus[chosen.in_flight_downstream >= in_flight]
                if not len(enough):
                    return None
                fewest = {**fewest, unit.name: int(enough.min())}
                break
            layout = layouts[unit.name] = chosen.layout(row, unit)
            if unit.role is not Role.ENCODER:
                in_flight += layout.pipeline_parallel_size * layout.data_parallel_size
        else:
            return layouts
    return None


def _fastest(options: UnitOptions, max_gpus: int, in_flight: float, num_microbatches: int) -> int | None:
    """Return the row with the shortest time by itself: warm-up and its own microbatches."""
    is_possible = (options.gpus <= max_gpus) & (options.in_flight_downstream >= in_flight)
    if not is_possible.any():
        return None
    counts = np.ceil(num_microbatches / options.data)
    seconds = options.chain_seconds + (counts - 1) * options.stage_seconds
    return int(np.lexsort((options.gpus, np.where(is_possible, seconds, np.inf)))[0])
