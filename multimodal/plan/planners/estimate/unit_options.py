"""The parallelisms (tp, cp, dp, pp) that one unit may have, as arrays: GPUs, seconds, and limits from memory."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from multimodal.plan.planners.allowed_sizes import data_parallel_sizes, pipeline_parallel_sizes, stage_sizes
from multimodal.plan.planners.estimate.memory_estimate import LayerMemory, layer_memory, samples_within, working_bytes
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout, layer_times
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.arrays.rows import Bools, Floats, Integers
from multimodal.values.errors import NothingFitsError
from multimodal.values.model_graph import Unit

_UNLIMITED = 1e12
_BLOCK = 256


@dataclass(frozen=True)
class UnitOptions:
    """Columns of equal length, one row per parallelism; seconds are of one microbatch, forward and backward."""

    tensor: Integers
    context: Integers
    data: Integers
    pipeline: Integers
    gpus: Integers
    stage_seconds: Floats
    """Seconds of the slowest stage if the layers are cut evenly (`split_layers`)."""
    chain_seconds: Floats
    """Seconds of all stages together."""
    in_flight_downstream: Floats
    """Microbatches, over all its replicas, that memory allows units downstream to keep in flight."""

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: Integers | Bools) -> "UnitOptions":
        """Return some of the rows."""
        return UnitOptions(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def layout(self, row: int, unit: Unit, *, virtual_stages: int = 1) -> UnitLayout:
        """Return the unit's layout for a row, with layers cut evenly."""
        tensor, context, data, pipeline = (int(column[row]) for column in (self.tensor, self.context, self.data, self.pipeline))
        return even_layout(unit, StageSize(tensor, context), data, pipeline, virtual_stages)


def list_options(request: PlanningRequest, unit: str, *, max_gpus: int) -> UnitOptions:
    """List the parallelisms of a unit that fit `max_gpus` and, with nothing downstream in flight, the memory.

    Data parallel sizes divide the number of microbatches. The first stage (an embedding, the most layers, P microbatches in
    flight under 1F1B) and the last one (projector or head) determine the memory. O(tp x cp x dp x pp).
    """
    axes = np.array(data_parallel_sizes(request, unit)), np.array(pipeline_parallel_sizes(request, unit))
    data, pipeline = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    sizes = [size for size in stage_sizes(request, unit) if size.num_ranks <= max_gpus or size.context == 1]
    columns = [_of_stage_size(request, unit, size, data, pipeline) for size in sizes]
    merged = UnitOptions(*map(np.concatenate, zip(*(vars(part).values() for part in columns), strict=True)))
    return merged.take((merged.gpus <= max_gpus) & (merged.in_flight_downstream >= 0))


def _of_stage_size(request: PlanningRequest, unit: str, size: StageSize, data: Integers, pipeline: Integers) -> UnitOptions:
    """Return the options of one tp and cp; data, pipeline: all combinations of the other sizes, flat."""
    seconds = layer_times(request, unit, size).total
    num_layers = len(seconds) - 2
    most, least = -(-num_layers // pipeline), num_layers // pipeline
    slowest_body = max(seconds[1:-1], default=0.0)
    first, last = seconds[0] + most * slowest_body, seconds[-1] + least * slowest_body
    slowest = np.where(pipeline == 1, sum(seconds), np.maximum(first, last))
    kinds = request.graph.unit(unit).layers
    one, allows = np.ones_like(pipeline), partial(_in_flight_downstream, request, unit, size, data)
    of_ends = np.minimum(allows((kinds[0],), most, pipeline), allows((kinds[-1],), least, one))
    allowed = np.where(pipeline == 1, allows((kinds[0], kinds[-1]), most, one), of_ends)
    tensor, context, chain = size.tensor * one, size.context * one, np.full(len(slowest), sum(seconds))
    gpus, in_flight = tensor * context * data * pipeline, np.where(allowed >= 0, allowed, -1.0)
    return UnitOptions(tensor, context, data, pipeline, gpus, slowest, chain, in_flight)


def _in_flight_downstream(
    request: PlanningRequest,
    unit: str,
    size: StageSize,
    data: Integers,
    outer_kinds: tuple[str, ...],
    num_body: Integers,
    in_flight: Integers,
) -> Floats:
    """Return the microbatches that downstream units may keep in flight for a stage to fit; -1 if it does not fit at all.

    Solves static + working + activations(own + downstream / dp microbatches) <= memory for the downstream microbatches.
    outer_kinds, num_body: the unit's outermost layers that a first or last stage holds, and its number of others, all assumed to
    be of the heaviest kind; in_flight: microbatches in flight of the unit itself under 1F1B.
    """
    outer = [layer_memory(request, unit, kind) for kind in outer_kinds]
    bodies = [layer_memory(request, unit, kind) for kind in dict.fromkeys(request.graph.unit(unit).inner_layers)]
    copies, position = np.unique(data * size.context, return_inverse=True)

    def static_bytes(layer: LayerMemory) -> Floats:
        return np.array([layer.static_bytes(count) for count in copies.tolist()])[position]

    static = num_body * np.maximum.reduce([*map(static_bytes, bodies)]) + sum(map(static_bytes, outer))
    per_body = max(layer.activation_bytes(*size) for layer in bodies)
    per_sample = num_body * per_body + sum(layer.activation_bytes(*size) for layer in outer)
    free_bytes = (request.planned_memory_bytes - working_bytes(request, unit, size)) * size.tensor - static
    kept = np.where(per_sample > 0, per_sample, 1.0)
    capacity = np.where(per_sample > 0, samples_within(request, unit, np.maximum(free_bytes, 0.0) / kept), _UNLIMITED)
    micro_batch_size = request.default_micro_batch_size
    in_step = request.num_microbatches / data
    downstream = (capacity / micro_batch_size - np.minimum(in_flight, in_step)) * data
    return np.where(free_bytes < 0, -1.0, np.where(capacity >= in_step * micro_batch_size, _UNLIMITED, downstream))


def pareto_rows(*columns: Floats | Integers) -> Integers:
    """Return the rows that none beats or equals in all columns (smaller is better), one of each set of equals. O(n x kept)."""
    values = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    order = np.lexsort(values.T[::-1])
    kept = np.zeros((0, values.shape[1] - 1))
    kept_rows: list[Integers] = []
    for start in range(0, len(order), _BLOCK):
        rows = order[start : start + _BLOCK]
        block = values[rows, 1:]
        is_beaten = np.all(kept[None, :, :] <= block[:, None, :], axis=2)
        is_open = ~np.any(is_beaten, axis=1)
        rows, block = rows[is_open], block[is_open]
        beats = np.tril(np.all(block[None, :, :] <= block[:, None, :], axis=2), k=-1)
        is_kept = ~np.any(beats, axis=1)
        kept = np.concatenate([kept, block[is_kept]])
        kept_rows.append(rows[is_kept])
    return np.concatenate([np.zeros(0, dtype=np.int64), *kept_rows])


def infeasible(request: PlanningRequest) -> NothingFitsError:
    """Return the error of a planner that found nothing; `plan_or_advise` adds advice."""
    return NothingFitsError(f"no plan on {request.num_gpus} GPU{'s' * (request.num_gpus != 1)} fits {request.memory_text}")
