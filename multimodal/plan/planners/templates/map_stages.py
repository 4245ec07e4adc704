"""The mapping of a chain of layers to stages and GPUs with the shortest 1F1B step, for many numbers of GPUs at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from multimodal.kernels import kernels
from multimodal.values.arrays.rows import Integers
from multimodal.values.errors import PlanError


class StageTables(NamedTuple):
    """A chain of pieces, and the costs of a stage of pieces [first, end) on a number of GPUs.

    The tables are [num_sizes, num_pieces, num_pieces + 1], by size, first and end.
    """

    forward: Integers
    """Ticks of one microbatch: whole numbers, so that sums do not depend on their order."""
    backward: Integers
    capacities: Integers
    """Microbatches in flight that fit into the memory; 0: not even one. Stages of more pieces have no larger capacity."""
    sizes: Integers
    """Number of GPUs of each size, ascending."""


class StageMapping(NamedTuple):
    """Stages in pipeline order."""

    ticks: int
    """Length of a step."""
    ends: tuple[int, ...]
    """For each stage, the piece after its last one."""
    gpus: tuple[int, ...]


def map_stages(
    tables: StageTables, *, num_gpus: Sequence[int], num_microbatches: Sequence[int]
) -> tuple[StageMapping | None, ...]:
    """Return, for each number of GPUs, the mapping of all pieces to stages on exactly that many with the shortest step.

    A step is that of 1F1B, T1 + T2 + T3 of Oobleck 2.4.1.2, but never less than the slowest stage works (docs/elasticity.md),
    with the given number of microbatches for each number of GPUs; stage s of S keeps S - s of them. None if no mapping fits. The
    result is exact. Suffixes of the pipeline with the same first piece, number of GPUs and number of stages differ only in two
    figures, the ticks of their step and of one microbatch through them, and a step grows with both; so a suffix is dropped if
    another one beats it in both, or if its step with the fastest possible first stages exceeds a limit. The limit is the step of
    a mapping from a search that keeps one suffix of each kind. Raises PlanError if the C++ kernels are not built: it has no other
    form.
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
