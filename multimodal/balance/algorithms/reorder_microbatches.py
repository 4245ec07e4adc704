"""Orders the microbatches of one pipeline so that its stages wait little (DistTrain 5.2, Alg. 3)."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.kernels import kernels
from multimodal.schedule.builders.interleaved_1f1b import interleaved_order
from multimodal.values.arrays.rows import Floats, Integers
from multimodal.values.work.step_work import FORWARD


class PipelineStep(NamedTuple):
    """One forward or backward of one microbatch."""

    is_forward: bool
    virtual_stage: int
    """Chunk c of stage s is virtual stage c * num_stages + s."""
    position: int
    """Index of the microbatch in the order in which the pipeline runs them."""

    def needed(self, num_virtual_stages: int) -> "PipelineStep | None":
        """Return the step whose output this one takes, or None; a last backward's own forward is on the same stage."""
        needed = self.virtual_stage - 1 if self.is_forward else self.virtual_stage + 1
        return self._replace(virtual_stage=needed) if 0 <= needed < num_virtual_stages else None


@lru_cache(maxsize=16)
def pipeline_steps(num_stages: int, num_chunks: int, num_microbatches: int) -> tuple[PipelineStep, ...]:
    """Return all steps of (interleaved) 1F1B, each after the one it needs; those of a stage in execution order. O(steps)."""
    waiting = []
    for stage in range(num_stages):
        queue = deque(_one_f_one_b(stage, num_stages, num_microbatches))
        if num_chunks > 1:
            order = interleaved_order(stage, num_stages=num_stages, chunks=num_chunks, num_microbatches=num_microbatches)
            columns = (order.kinds == FORWARD, order.chunks * num_stages + stage, order.microbatches)
            queue = deque(map(PipelineStep, *(column.tolist() for column in columns)))
        waiting.append(queue)
    done: dict[PipelineStep, None] = {}
    while any(waiting):
        num_before = len(done)
        for queue in waiting:
            while queue and ((needed := queue[0].needed(num_stages * num_chunks)) is None or needed in done):
                done[queue.popleft()] = None
        assert len(done) > num_before, "the orders of the stages wait for each other in a circle"
    return tuple(done)


def _one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Sequence[PipelineStep]:
    num_ahead = min(num_stages - stage - 1, num_microbatches)
    steps = [PipelineStep(True, stage, position) for position in range(num_ahead)]
    for position in range(num_microbatches):
        if position + num_ahead < num_microbatches:
            steps.append(PipelineStep(True, stage, position + num_ahead))
        steps.append(PipelineStep(False, stage, position))
    return steps


def reorder_microbatches(
    forward_seconds: npt.ArrayLike, *, backward_seconds: npt.ArrayLike, num_stages: int, num_swaps: int | None = None
) -> tuple[int, ...]:
    """Return an order of the microbatches in which 1F1B (interleaved, if stages hold several chunks) ends early.

    DistTrain's order competes with the given order and with those by ascending and descending time of a microbatch. The best is
    improved by exchanges; an order that ends no earlier than the given one is not taken. Messages between stages are assumed to
    take no time. Equal microbatches are ordered by index. O((num_microbatches + num_swaps) x steps). All searching is the C++
    kernel's (csrc/reorder_microbatches.cpp); without it, the given order stays.

    forward_seconds, backward_seconds: [num_virtual_stages, num_microbatches], finite and not negative, along the chain; virtual
        stage v is on stage v % num_stages.
    num_swaps: exchanges that are tried, beyond the paper; None: up to 256, limited to some 300,000 steps (about a millisecond).
    """
    forward, backward = map(with_mean, (forward_seconds, backward_seconds))
    if num_swaps is None:
        num_swaps = min(256, 300_000 // (2 * len(forward) * (forward.shape[1] - 1)))
    if kernels is None:
        return tuple(range(forward.shape[1] - 1))
    codes = _step_codes(num_stages, len(forward) // num_stages, forward.shape[1] - 1)
    return tuple(kernels.reorder_microbatches(forward, backward, codes, num_stages=num_stages, num_swaps=num_swaps))


def with_mean(seconds: npt.ArrayLike) -> Floats:
    """Append the mean over all microbatches, which is used for unknown microbatches."""
    values = np.asarray(seconds, np.float64)
    return np.column_stack((values, values.mean(axis=1)))


@lru_cache(maxsize=16)
def _step_codes(num_stages: int, num_chunks: int, num_microbatches: int) -> Integers:
    """Return the steps in the kernel's form: (position * num_virtual_stages + virtual_stage) * 2 + is_forward."""
    steps = pipeline_steps(num_stages, num_chunks, num_microbatches)
    num_virtual_stages = num_stages * num_chunks
    return np.array([(step.position * num_virtual_stages + step.virtual_stage) * 2 + step.is_forward for step in steps])
