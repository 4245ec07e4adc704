"""Megatron-LM's one grid for all units."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice, product

from multimodal.plan.planners import allowed_sizes
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_run
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
    return choose_run(request, _megatron_grids(request, replicates=replicates))


def _megatron_grids(request: PlanningRequest, *, replicates: bool) -> Iterator[Candidate]:
    graph, backbone = request.graph, request.graph.backbone.name
    tensor_sharing = [name for name in graph.unit_names if name == backbone or not request.fixed(name).tensor_parallel_size]
    data_sharing = [name for name in graph.unit_names if name == backbone or not request.fixed(name).data_parallel_size]
    alike = [backbone] if replicates else tensor_sharing
    sizes = allowed_sizes.shared_stage_sizes(request, alike, context_of=graph.unit_names)

    def is_even(layouts: Mapping[str, UnitLayout]) -> bool:  # every replica gets equally many microbatches
        return all(each.data_parallel_size in allowed_sizes.data_parallel_sizes(request, unit) for unit, each in layouts.items())

    data_sizes = allowed_sizes.shared_data_parallel_sizes(request, [backbone] if replicates else data_sharing)
    for extra, size in product(range(1, MOST_EXTRA_STAGES + 1), sizes):
        for pipeline in allowed_sizes.pipeline_parallel_sizes(request, backbone):
            lay_out = partial(_on_grid, request, size=size, extra=extra, pipeline=pipeline, replicates=replicates)
            llm_gpus = size.num_ranks * pipeline
            largest_first = [data for data in reversed(data_sizes) if data * llm_gpus <= request.num_gpus]
            grids = ({unit.name: lay_out(unit, data=data) for unit in graph.units} for data in largest_first)
            fitting = (each for each in map(Candidate, filter(is_even, grids)) if each.num_gpus <= request.num_gpus)
            yield from reversed([*islice(fitting, 2)])  # as in `largest_fitting`


def _on_grid(
    request: PlanningRequest, unit: Unit, *, size: StageSize, extra: int, pipeline: int, data: int, replicates: bool
) -> UnitLayout:
    """Lay a unit out on the grid, or as its fixed sizes say."""
    if unit.role is Role.BACKBONE:
        return even_layout(unit, size, data, pipeline)
    fixed = request.fixed(unit.name)
    stages = fixed.pipeline_parallel_size or min(extra, unit.num_inner_layers)
    tensor = fixed.tensor_parallel_size or (1 if replicates else size.tensor)
    copies = data * (size.tensor if replicates else 1)
    return even_layout(unit, StageSize(tensor, size.context), fixed.data_parallel_size or copies, stages)
