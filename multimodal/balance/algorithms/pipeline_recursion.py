"""The forwards and backwards of one pipeline under 1F1B or interleaved 1F1B, and their end times."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from multimodal.schedule.builders.interleaved_1f1b import interleaved_order
from multimodal.values.action import ActionKind
from multimodal.values.work.step_work import KIND_NUMBERS

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
        """Return the step whose output this one takes (the forward before it, the backward after it), or None.

        A backward of the last virtual stage also needs its own forward, which the same stage has run before.
        """
        needed = self.virtual_stage - 1 if self.is_forward else self.virtual_stage + 1
        return self._replace(virtual_stage=needed) if 0 <= needed < num_virtual_stages else None


@lru_cache(maxsize=16)
def pipeline_steps(num_stages: int, num_chunks: int, num_microbatches: int) -> tuple[PipelineStep, ...]:
    """Return all steps of a pipeline, each after the step that it needs; those of one stage in execution order.

    That order is 1F1B (stage s starts with num_stages - s - 1 forwards) or, where stages hold several chunks, interleaved 1F1B.
    O(steps).
    """
    waiting = []
    for stage in range(num_stages):
        queue = deque(_one_f_one_b(stage, num_stages, num_microbatches))
        if num_chunks > 1:
            order = interleaved_order(stage, num_stages=num_stages, chunks=num_chunks, num_microbatches=num_microbatches)
            columns = (order.kinds == KIND_NUMBERS[ActionKind.FORWARD], order.chunks * num_stages + stage, order.microbatches)
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
    """Return the end of every step if the pipeline starts at 0 and runs its microbatches in this order; None ends at 0. O(steps).

    steps: a result of `pipeline_steps`.
    """
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
    the later ones starts at the end of the step before that backward. Microbatches that are not in the order yet take
    the time of the last column (with one chunk, intervals after the warm-up do not depend on it).

    order: of the microbatches before it, at least one.
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
