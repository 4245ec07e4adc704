"""The layers of all units as one chain, the costs of every stage that it may be cut into, and the cut with the shortest step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from multimodal.kernels import kernels
from multimodal.plan.partition_layers import Range, unit_pieces
from multimodal.plan.planners.allowed_sizes import tensor_parallel_sizes
from multimodal.plan.planners.estimate.grid import chain_pieces
from multimodal.plan.planners.estimate.memory_estimate import heavy_count, layer_memory, working_bytes
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.planners.templates.template_set import Tolerance
from multimodal.values.arrays.rows import Floats, Integers, row_starts
from multimodal.values.errors import PlanError

TICKS = 2**36
"""Ticks of the whole chain on its slowest size: sums over millions of microbatches stay exact."""


class StageTables(NamedTuple):
    """Costs of stages of pieces [first, end) on a number of GPUs, [num_sizes, num_pieces, num_pieces + 1]."""

    forward: Integers
    """Ticks of one microbatch: whole numbers, so that sums do not depend on their order."""
    backward: Integers
    capacities: Integers
    """Microbatches in flight that fit into the memory; 0: not even one. Stages of more pieces have no larger capacity."""
    sizes: Integers
    """Number of GPUs of each size, ascending."""


@dataclass(frozen=True)
class Chain:
    """The layers of all units, in the graph's order. A stage may hold the last layers of one unit and the first of the next."""

    request: PlanningRequest
    """The request with a microbatch size, and with the run's `recompute`."""
    tolerance: Tolerance = field(default_factory=lambda: Tolerance(0))

    @cached_property
    def pieces(self) -> tuple[tuple[str, Range], ...]:
        """The smallest ranges of layers: each has one transformer layer, with the unit's first or last layer if next to it."""
        return tuple((unit.name, layers) for unit in self.request.graph.units for layers in unit_pieces(unit))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of GPUs that a stage of some unit may have."""
        return tuple(sorted(set().union(*(tensor_parallel_sizes(self.request, name) for name in self.request.graph.unit_names))))

    @cached_property
    def bounds(self) -> Integers:
        """[num_pieces + 1] the first layer of each piece, and the end; the layers of all units are numbered consecutively."""
        return row_starts([end - first for _, (first, end) in self.pieces])

    @cached_property
    def seconds(self) -> Floats:
        """[2, num_sizes, num_pieces]: of one microbatch's forward and backward; NaN if a piece's unit cannot have the size."""
        found = np.full((2, len(self.sizes), len(self.pieces)), np.nan)
        for row, size in enumerate(self.sizes):
            for column, piece in enumerate(chain_pieces(self.request, StageSize(size))):
                if size in tensor_parallel_sizes(self.request, piece.unit):
                    found[:, row, column] = piece.forward_seconds, piece.backward_seconds
        return found

    @cached_property
    def seconds_per_tick(self) -> float:
        """Seconds of a tick in the tables."""
        longest = float(np.nansum(self.seconds.sum(axis=0), axis=1).max())
        return (longest or 1.0) / TICKS

    @cached_property
    def tables(self) -> StageTables:
        """Return the ticks and bytes of every possible stage."""
        ticks = np.rint(_of_ranges(np.nan_to_num(self.seconds)) / self.seconds_per_tick).astype(np.int64)
        return StageTables(ticks[0], ticks[1], self._capacities(), np.array(self.sizes, np.int64))

    def _capacities(self) -> Integers:
        """Return the microbatches in flight that fit into every stage's memory, up to the number of pieces.

        Optimizer state is shared by at least the replicas per copy that are there at all times: it is not shared unless more
        replicas are requested than fault tolerance needs. Samples are assumed to be heavy together, as in `heavy_count`.
        """
        request, shape = self.request, (len(self.sizes), len(self.pieces))
        static, kept, working = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        units = np.array([unit for unit, _ in self.pieces])
        for row, size in enumerate(self.sizes):
            for column, (unit, (first, end)) in enumerate(self.pieces):
                layers = [layer_memory(request, unit, kind) for kind in request.graph.unit(unit).layers[first:end]]
                static[row, column] = sum(layer.static_bytes(self.tolerance.replicas_per_copy) for layer in layers) / size
                kept[row, column] = sum(layer.activation_bytes(size, 1) for layer in layers) / size
            for unit in request.graph.unit_names:
                working[row, units == unit] = working_bytes(request, unit, StageSize(size))
        fixed = _of_ranges(static) + _of_ranges(working, np.maximum)
        fixed[_of_ranges(np.isnan(self.seconds[0]).astype(np.float64)) > 0] = np.inf
        per_sample = {unit: _of_ranges(np.where(units == unit, kept, 0.0)) for unit in request.graph.unit_names}
        found = np.zeros(fixed.shape, np.int64)
        for in_flight in range(1, len(self.pieces) + 1):
            samples = in_flight * request.default_micro_batch_size
            activations = sum(each * heavy_count(request, unit, samples) for unit, each in per_sample.items())
            fits = fixed + activations <= request.planned_memory_bytes
            if not fits.any():
                break
            found += fits
        return found


def list_chain(request: PlanningRequest, tolerance: Tolerance) -> Chain:
    """Return the chain of a request; raises PlanError if sizes are fixed that templates do not have."""
    if request.sharding == "optim_grads_params":
        raise PlanError(
            "replicas of templates do not share weights; leave --data-parallel-sharding-strategy out, or set it to optim"
        )
    for name in request.graph.unit_names:
        fixed = request.fixed(name)
        for what, size in (
            ("cp", fixed.context_parallel_size),
            ("pp", fixed.pipeline_parallel_size),
            ("dp", fixed.data_parallel_size),
            ("v", fixed.virtual_pipeline_size),
        ):
            if size not in (None, 1) or (what in ("pp", "dp") and size is not None):
                raise PlanError(
                    f"unit '{name}': {what} {size} is fixed, but templates have as many stages and replicas as their nodes "
                    "ask for, and neither context parallelism nor virtual stages; fix tp only"
                )
    chain = Chain(request, tolerance)
    if tolerance.replicas_per_copy > 1 and len(chain.sizes) > 1:
        raise PlanError(
            f"stages may have {', '.join(map(str, chain.sizes))} GPUs, but replicas share optimizer state only where all have "
            "one tensor parallel size; fix the same tp for all units (--fix), or let every replica keep all of the state "
            "(--replicas-per-copy 1)"
        )
    return chain


def _of_ranges(values: Floats, combine: np.ufunc = np.add) -> Floats:
    """Return sums (or maxima) over all ranges [first, end) of the last axis, each from its first entry on: [..., first, end]."""
    count = values.shape[-1]
    rows = np.where(np.arange(count) >= np.arange(count)[:, None], values[..., None, :], 0.0)
    totals = combine.accumulate(rows, axis=-1)
    return np.concatenate((np.zeros((*totals.shape[:-1], 1)), totals), axis=-1)


class StageMapping(NamedTuple):
    """Stages in pipeline order."""

    ticks: int
    ends: tuple[int, ...]
    """For each stage, the piece after its last one."""
    gpus: tuple[int, ...]


def map_stages(
    tables: StageTables, *, num_gpus: Sequence[int], num_microbatches: Sequence[int]
) -> tuple[StageMapping | None, ...]:
    """Return, for each number of GPUs, the mapping of all pieces to stages on exactly that many with the shortest step.

    A step is that of 1F1B, T1 + T2 + T3 of Oobleck 2.4.1.2, but never less than the slowest stage works (docs/elasticity.md),
    with the given number of microbatches for each number of GPUs; stage s of S keeps S - s of them. None if no mapping fits. The
    result is exact (`csrc`). Raises PlanError if the C++ kernels are not built: it has no other form.
    """
    if kernels is None:
        raise PlanError(
            "templates are planned by the C++ kernels, which cannot be used here; run 'pip install -e .' where this copy of "
            "Braid lies, or choose another planner"
        )
    counts = np.array(num_gpus, np.int64), np.array(num_microbatches, np.int64)
    ticks, *rows = kernels.map_stages(*tables, num_gpus=counts[0], num_microbatches=counts[1])
    ends, gpus = ([tuple(row.tolist()) for row in np.split(values, starts[1:-1])] for starts, values in rows)
    return tuple(StageMapping(*each) if each[0] >= 0 else None for each in zip(ticks.tolist(), ends, gpus, strict=True))
