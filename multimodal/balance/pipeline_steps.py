"""The steps of one pipeline under 1F1B or interleaved 1F1B, in an order in which they can be computed."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from multimodal.schedule.builders.interleaved_1f1b import interleaved_order
from multimodal.values.schedule import ActionKind


class Step(NamedTuple):
    """One forward or backward."""

    is_forward: bool
    virtual_stage: int
    """Chunk c of stage s is virtual stage c * num_stages + s."""
    position: int
    """Of the microbatch, in the order in which the pipeline runs them."""

    def needed(self, num_virtual_stages: int) -> "Step | None":
        """Return the step whose output this one takes: the forward before it, the backward after it; None where there is none.

        A backward of the last virtual stage also needs its own forward, which the same stage has run before.
        """
        needed = self.virtual_stage - 1 if self.is_forward else self.virtual_stage + 1
        return self._replace(virtual_stage=needed) if 0 <= needed < num_virtual_stages else None


@lru_cache(maxsize=16)
def pipeline_steps(num_stages: int, num_chunks: int, num_microbatches: int) -> tuple[Step, ...]:
    """Return all steps of a pipeline, each after the one that it needs; those of one stage in the order in which it runs them.

    That order is 1F1B (stage s starts with num_stages - s - 1 forwards) or, where stages hold several chunks, interleaved 1F1B.
    O(steps).
    """
    waiting = [
        deque(
            _one_f_one_b(stage, num_stages, num_microbatches)
            if num_chunks == 1
            else _interleaved(stage, num_stages, num_chunks, num_microbatches)
        )
        for stage in range(num_stages)
    ]
    steps: dict[Step, None] = {}
    while any(waiting):
        num_before = len(steps)
        for queue in waiting:
            while queue and ((needed := queue[0].needed(num_stages * num_chunks)) is None or needed in steps):
                steps[queue.popleft()] = None
        assert len(steps) > num_before, "the orders of the stages wait for each other in a circle"
    return tuple(steps)


def _interleaved(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> Sequence[Step]:
    order = interleaved_order(stage, num_stages=num_stages, chunks=num_chunks, num_microbatches=num_microbatches)
    return [Step(step.kind is ActionKind.FORWARD, step.chunk * num_stages + stage, step.microbatch) for step in order]


def _one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Sequence[Step]:
    num_ahead = min(num_stages - stage - 1, num_microbatches)
    steps = [Step(True, stage, position) for position in range(num_ahead)]
    for position in range(num_microbatches):
        if position + num_ahead < num_microbatches:
            steps.append(Step(True, stage, position + num_ahead))
        steps.append(Step(False, stage, position))
    return steps
