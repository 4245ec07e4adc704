"""The time of a step in closed form: warm-up, the slowest stage's steady phase, gradient reduction (Entrain, Eq. 4.2)."""

from collections.abc import Mapping

from multimodal.cost.communication import collective_seconds
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.memory import GRADIENT_BYTES
from multimodal.plan.planners.candidate import Candidate, num_unit_microbatches
from multimodal.plan.planners.layer_times import PlanningTimes, stage_times
from multimodal.plan.planners.length_spread import LengthSpread
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.unit_layout import UnitLayout
from multimodal.values.backward_need import layers_backward_need


def unit_stage_seconds(times: PlanningTimes, candidate: Candidate) -> Mapping[str, tuple[float, ...]]:
    """Unit -> seconds of each of its stages per microbatch, forward and backward; sharded weights have to come in time."""
    found = {}
    for unit, layout in candidate.layouts.items():
        computing = stage_times(times.of_layout(unit, layout, num_samples=candidate.micro_batch_size), layout.stages)
        least = 0.0
        if times.request.zero_stage == 3:
            # Twice the weights, and once the gradients.
            per_weight = 2 * times.request.cluster.bytes_per_element + GRADIENT_BYTES
            least = per_weight / GRADIENT_BYTES * reduction_seconds(times.request, unit, layout)
        found[unit] = tuple(max(seconds, least) for seconds in computing)
    return found


def lower_bound_seconds(request: PlanningRequest, times: PlanningTimes, candidate: Candidate) -> float:
    """Return the busiest lane's work: no schedule of average microbatches is shorter."""
    stages = unit_stage_seconds(times, candidate)
    busy = {unit: num_unit_microbatches(request, candidate, unit) * max(seconds) for unit, seconds in stages.items()}
    return max(sum(busy[unit] for unit in group) for group in candidate.all_groups)


def estimate_seconds(
    request: PlanningRequest, times: PlanningTimes, candidate: Candidate, *, spread: LengthSpread | None = None
) -> float:
    """Return the time of a step of average microbatches under 1F1B.

    Sum of tau over the longest chain of units, and (n_u - 1) beta_u of the slowest group of units, where unit u's replicas run
    n_u microbatches each; with equally many everywhere and ranks of its own for each unit, this is Eq. 4.2. Encoders on ranks of
    their own work side by side, so only the slowest one's stages count in the chain. Virtual stages divide a unit's warm-up.
    spread: with it, pipelines wait for their heaviest microbatches, and no step is shorter than its heaviest sample.
    """
    stages = unit_stage_seconds(times, candidate)
    warmup = {
        unit: sum(seconds) / chunks + max(seconds) * (1 - 1 / chunks)
        for unit, seconds in stages.items()
        for chunks in [candidate.layouts[unit].virtual_stages]
    }
    encoders = {unit.name for unit in request.graph.encoders}
    chain = sum(seconds for unit, seconds in warmup.items() if unit not in encoders)
    chain += max((sum(warmup[unit] for unit in group if unit in encoders) for group in candidate.all_groups), default=0.0)
    depth = _depth(candidate)
    waits = {
        unit: spread.slowdown(unit, micro_batch_size=candidate.micro_batch_size, num_stages=depth) if spread else 1.0
        for unit in stages
    }
    steady = max(
        sum((num_unit_microbatches(request, candidate, unit) - 1) * max(stages[unit]) * waits[unit] for unit in group)
        for group in candidate.all_groups
    )
    heaviest = max(spread.heaviest_seconds(unit, layout) for unit, layout in candidate.layouts.items()) if spread else 0.0
    is_sharded = request.zero_stage == 3
    reduction = 0.0 if is_sharded else max(reduction_seconds(request, unit, each) for unit, each in candidate.layouts.items())
    return max(chain + steady, heaviest) + reduction


def _depth(candidate: Candidate) -> int:
    """Stages that a microbatch passes one after another on ranks that differ; 1 where all units share all ranks in one stage."""
    stages = {unit: layout.pipeline_parallel_size for unit, layout in candidate.layouts.items()}
    return sum(max(stages[unit] for unit in group) for group in candidate.all_groups)


def reduction_seconds(request: PlanningRequest, unit: str, layout: UnitLayout) -> float:
    """Seconds in which the heaviest stage's gradients are reduced over the unit's replicas and context parallel shares.

    Gathering what the optimizer updated hides better, so it is left out.
    """
    if layout.weight_copies == 1:
        return 0.0
    described = request.graph.unit(unit)
    needs = {kind: described.layers.index(kind) for kind in described.layers}
    weights = {
        kind: describe_layer(request.graph, described, kind, vocab_size=request.vocab_size).num_weights
        if layers_backward_need(request.graph, unit, range(index, index + 1)).trains_weights
        else 0
        for kind, index in needs.items()
    }
    heaviest = max(
        sum(weights[kind] for first, end in ranges for kind in described.layers[first:end]) for ranges in layout.stages
    )
    size = layout.tensor_parallel_size
    return collective_seconds(
        GRADIENT_BYTES * heaviest / size,
        ranks=range(0, layout.weight_copies * size, size),
        cluster=request.cluster,
    )
