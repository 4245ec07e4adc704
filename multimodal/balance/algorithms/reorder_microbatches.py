"""Orders the microbatches of one pipeline so that its stages wait little (DistTrain 5.2, Alg. 3)."""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.kernels import kernels
from multimodal.schedule.builders.interleaved_1f1b import interleaved_order
from multimodal.values.arrays.rows import Floats, Integers
from multimodal.values.work.step_work import FORWARD

Seconds = Sequence[Sequence[float]]
"""[num_virtual_stages][num_microbatches + 1]: the duration of each microbatch; the last column is for unknown microbatches."""


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


def step_ends(
    order: Sequence[int], *, steps: Sequence[PipelineStep], num_stages: int, forward: Seconds, backward: Seconds
) -> dict[PipelineStep | None, float]:
    """Return the ends of the `pipeline_steps` of microbatches in this order if the pipeline starts at 0; None ends at 0."""
    free_at = [0.0] * num_stages
    ends: dict[PipelineStep | None, float] = {None: 0.0}
    for step in steps:
        seconds = (forward if step.is_forward else backward)[step.virtual_stage][order[step.position]]
        stage = step.virtual_stage % num_stages
        free_at[stage] = ends[step] = max(free_at[stage], ends[step.needed(len(forward))]) + seconds
    return ends


def interval_to_fill(
    order: Sequence[int], *, steps: Sequence[PipelineStep], num_stages: int, forward: Seconds, backward: Seconds
) -> float:
    """Return the time of stage 0 that the forwards of the next microbatch should fill (DistTrain 5.2, GETINTERVAL). O(steps).

    Per chunk: the time from the end of the step before its forward to the moment at which the next backward can start, divided by
    the forwards up to that backward; negative if the backward is ready earlier. If chunks wait for the same backward, the time of
    the later ones starts at the end of the step before that backward. order: of the microbatches before it, at least one; others
    take the time of the last column.
    """
    unknown, total = len(forward[0]) - 1, 0.0
    assumed = [*order, *[unknown] * (unknown - len(order))]
    ends = step_ends(assumed, steps=steps, num_stages=num_stages, forward=forward, backward=backward)
    of_first_stage = [step for step in steps if step.virtual_stage % num_stages == 0]
    reached = 0
    for virtual_stage in range(0, len(forward), num_stages):
        index = after = of_first_stage.index(PipelineStep(True, virtual_stage, len(order)))
        while of_first_stage[after].is_forward:
            after += 1
        free_at = ends[of_first_stage[max(reached, index) - 1]]
        total += (ends[of_first_stage[after].needed(len(forward))] - free_at) / (after - index)
        reached = max(reached, after)
    return total


def reorder_microbatches(
    forward_seconds: npt.ArrayLike, *, backward_seconds: npt.ArrayLike, num_stages: int, num_swaps: int | None = None
) -> tuple[int, ...]:
    """Return an order of the microbatches in which 1F1B (interleaved, if stages hold several chunks) ends early.

    DistTrain's order (`fill_intervals`) competes with the given order and with those by ascending and descending time of a
    microbatch. The best is improved by exchanges; an order that ends no earlier than the given one is not taken. Messages between
    stages are assumed to take no time. Equal microbatches are ordered by index. O((num_microbatches + num_swaps) x steps).

    forward_seconds, backward_seconds: [num_virtual_stages, num_microbatches], finite and not negative, along the chain; virtual
        stage v is on stage v % num_stages.
    num_swaps: exchanges that are tried, beyond the paper; None: up to 256, limited to some 300,000 steps (about a millisecond).
    """
    forward, backward = map(_with_mean, (forward_seconds, backward_seconds))
    if num_swaps is None:
        num_swaps = min(256, 300_000 // (2 * len(forward) * (forward.shape[1] - 1)))
    if kernels is None:
        return reorder_microbatches_reference(forward, backward, num_stages=num_stages, num_swaps=num_swaps)
    codes = _step_codes(num_stages, len(forward) // num_stages, forward.shape[1] - 1)
    return tuple(kernels.reorder_microbatches(forward, backward, codes, num_stages=num_stages, num_swaps=num_swaps))


def pipeline_seconds(
    order: Sequence[int], *, forward_seconds: npt.ArrayLike, backward_seconds: npt.ArrayLike, num_stages: int
) -> float:
    """Return the duration of a pipeline with microbatches in this order; arguments as in `reorder_microbatches`."""
    forward, backward = map(_with_mean, (forward_seconds, backward_seconds))
    steps = pipeline_steps(num_stages, len(forward) // num_stages, len(order))
    shape = {"steps": steps, "num_stages": num_stages, "forward": forward.tolist(), "backward": backward.tolist()}
    return max(step_ends(order, **shape).values())


def fill_intervals(
    steps: Sequence[PipelineStep], *, num_stages: int, forward: Seconds, backward: Seconds, totals: Sequence[float]
) -> list[int]:
    """Return DistTrain's order of microbatches (Alg. 3).

    The smallest microbatch comes first, to reach all stages soon; the next `num_stages` - 1 smallest come last, in descending
    order, because nothing fills the waits for the last backwards. Each position between them gets the microbatch whose forwards
    on stage 0 take the time closest to the wait that they fill (`interval_to_fill`); unlike in the listing, those of the first
    interval are picked one by one. totals: each microbatch's size, the sum of all its seconds.
    """
    by_size = sorted(range(len(totals)), key=totals.__getitem__)
    first, last, pending = by_size[0], by_size[num_stages - 1 : 0 : -1], sorted(by_size[num_stages:])
    first_stage = range(0, len(forward), num_stages)
    order = [first]
    while pending:
        interval = interval_to_fill(order, steps=steps, num_stages=num_stages, forward=forward, backward=backward)
        closest = min(pending, key=lambda index: abs(_sum(forward[stage][index] for stage in first_stage) - interval))
        pending.remove(closest)
        order.append(closest)
    return order + last


def _with_mean(seconds: npt.ArrayLike) -> Floats:
    """Append the mean over all microbatches, which is used for unknown microbatches."""
    values = np.asarray(seconds, np.float64)
    return np.column_stack((values, values.mean(axis=1)))


@lru_cache(maxsize=16)
def _step_codes(num_stages: int, num_chunks: int, num_microbatches: int) -> Integers:
    """Return the steps in the kernel's form: (position * num_virtual_stages + virtual_stage) * 2 + is_forward."""
    steps = pipeline_steps(num_stages, num_chunks, num_microbatches)
    num_virtual_stages = num_stages * num_chunks
    return np.array([(step.position * num_virtual_stages + step.virtual_stage) * 2 + step.is_forward for step in steps])


def reorder_microbatches_reference(
    forward_seconds: Floats, backward_seconds: Floats, *, num_stages: int, num_swaps: int
) -> tuple[int, ...]:
    """Compute the kernel's result in Python; the last microbatch of both arrays is used for unknown microbatches."""
    forward, backward = forward_seconds.tolist(), backward_seconds.tolist()
    num_microbatches = len(forward[0]) - 1
    steps = pipeline_steps(num_stages, len(forward) // num_stages, num_microbatches)

    def end_of(order: Sequence[int]) -> float:
        return max(step_ends(order, steps=steps, num_stages=num_stages, forward=forward, backward=backward).values())

    given = list(range(num_microbatches))
    totals = [_sum(row[index] for rows in zip(forward, backward, strict=True) for row in rows) for index in given]
    given_end = end_of(given)
    best, best_end = given, given_end
    for order in (
        fill_intervals(steps, num_stages=num_stages, forward=forward, backward=backward, totals=totals),
        sorted(given, key=totals.__getitem__),
        sorted(given, key=totals.__getitem__, reverse=True),
    ):
        if (end := end_of(order)) < best_end:
            best, best_end = order, end
    improved = best.copy()
    for first, then in _swaps(num_microbatches, num_swaps):
        improved[first], improved[then] = improved[then], improved[first]
        if (end := end_of(improved)) <= best_end:
            best_end = end
        else:
            improved[first], improved[then] = improved[then], improved[first]
    return tuple(improved if best_end < given_end else given)


def _swaps(num_microbatches: int, num_swaps: int) -> Sequence[tuple[int, int]]:
    """Return pairs of positions from Knuth's MMIX linear congruential generator, the same on every machine."""
    state, positions = 0, []
    for _ in range(2 * num_swaps):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        positions.append((state >> 33) % num_microbatches)
    return list(zip(positions[::2], positions[1::2], strict=True))


def _sum(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
