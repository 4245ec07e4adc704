"""Megatron-LM: one rigid grid, in which encoders and generators are extra pipeline stages beside the LLM's (DistTrain 2.1)."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product

from multimodal.plan.planners.allowed_sizes import (
    data_parallel_sizes,
    pipeline_parallel_sizes,
    shared_data_parallel_sizes,
    shared_stage_sizes,
)
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.model_graph import Role, Unit

MOST_EXTRA_STAGES = 8
"""Most stages that an encoder or a generator is cut into if it does not fit into fewer."""


def plan_megatron(request: PlanningRequest, *, replicates: bool = False) -> PlannedRun:
    """Plan one grid: the same tp, cp and dp for all units, transformer layers cut evenly, one stage for every other unit.

    An encoder or a generator gets as few stages as memory allows (usually 1), and the LLM the number that makes the step
    shortest, so the baseline is as good as tuning makes it. A fixed tp, pp or dp of an encoder or a generator replaces the
    grid's. replicates: True gives every rank of an encoder's or a generator's tensor parallel group the whole unit, for other
    images (DistTrain's baseline): dp is tp times the grid's, tp is 1. Raises PlanError if nothing fits.
    """
    chosen, seconds = choose_candidates(request, _candidates(request, replicates=replicates))[0]
    return chosen.to_run(request, seconds=seconds)


def _candidates(request: PlanningRequest, *, replicates: bool) -> Iterator[Candidate]:
    graph, backbone = request.graph, request.graph.backbone.name
    tensor_sharing = [name for name in graph.unit_names if name == backbone or not request.fixed(name).tensor_parallel_size]
    data_sharing = [name for name in graph.unit_names if name == backbone or not request.fixed(name).data_parallel_size]
    sizes = shared_stage_sizes(request, [backbone] if replicates else tensor_sharing, context_of=graph.unit_names)

    def is_even(layouts: Mapping[str, UnitLayout]) -> bool:  # every replica gets equally many microbatches
        return all(each.data_parallel_size in data_parallel_sizes(request, unit) for unit, each in layouts.items())

    data_sizes = shared_data_parallel_sizes(request, [backbone] if replicates else data_sharing)
    for extra, size in product(range(1, MOST_EXTRA_STAGES + 1), sizes):
        for pipeline in pipeline_parallel_sizes(request, backbone):
            lay_out = partial(_lay_out, request, size=size, extra=extra, pipeline=pipeline, replicates=replicates)
            grids = ({unit.name: lay_out(unit, data=data) for unit in graph.units} for data in data_sizes)
            even = map(Candidate, filter(is_even, grids))
            yield from [each for each in even if each.num_gpus <= request.num_gpus][-2:]  # as in `largest_fitting`


def _lay_out(
    request: PlanningRequest, unit: Unit, *, size: StageSize, extra: int, pipeline: int, data: int, replicates: bool
) -> UnitLayout:
    """Lay a unit out on the grid, or as its fixed sizes say."""
    if unit.role is Role.BACKBONE:
        return even_layout(unit, size.tensor, data, pipeline, context=size.context)
    fixed = request.fixed(unit.name)
    stages = fixed.pipeline_parallel_size or min(extra, unit.num_inner_layers)
    tensor = fixed.tensor_parallel_size or (1 if replicates else size.tensor)
    copies = data * (size.tensor if replicates else 1)
    return even_layout(unit, tensor, fixed.data_parallel_size or copies, stages, context=size.context)
