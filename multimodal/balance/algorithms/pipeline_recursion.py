"""The forwards and backwards of one pipeline under 1F1B or interleaved 1F1B, and their end times."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from multimodal.schedule.builders.interleaved_1f1b import interleaved_order
from multimodal.values.action import ActionKind

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
            steps = ((each.kind is ActionKind.FORWARD, each.chunk * num_stages + stage, each.microbatch) for each in order)
            queue = deque(map(PipelineStep._make, steps))
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


def pipeline_end(
    order: Sequence[int], *, steps: Sequence[PipelineStep], num_stages: int, forward: Seconds, backward: Seconds
) -> float:
    """Return the end of the last step if the pipeline starts at 0 and runs its microbatches in this order. O(steps).

    steps: a result of `pipeline_steps`.
    """
    free_at = [0.0] * num_stages
    ends: dict[PipelineStep | None, float] = {None: 0.0}
    for step in steps:
        seconds = (forward if step.is_forward else backward)[step.virtual_stage][order[step.position]]
        stage = step.virtual_stage % num_stages
        free_at[stage] = ends[step] = max(free_at[stage], ends[step.needed(len(forward))]) + seconds
    return max(free_at)


class PipelineRecursion:
    """The end of every step, as far as the order of microbatches is known (DistTrain 5.2, GETINTERVAL).

    Every step is computed once for good, and a few times more for intervals.
    """

    def __init__(self, steps: Sequence[PipelineStep], *, num_stages: int, forward: Seconds, backward: Seconds) -> None:
        self._seconds = (backward, forward)
        self._num_stages, self._num_virtual_stages = num_stages, len(forward)
        self._unknown = len(forward[0]) - 1
        self._order: list[int] = []
        self._next = [0] * num_stages
        self._free_at = [0.0] * num_stages
        self._ends: dict[PipelineStep | None, float] = {None: 0.0}
        self._steps: list[list[PipelineStep]] = [[] for _ in range(num_stages)]
        self._index: dict[PipelineStep, int] = {}
        for step in steps:
            of_stage = self._steps[step.virtual_stage % num_stages]
            self._index[step] = len(of_stage)
            of_stage.append(step)

    def append(self, microbatch: int) -> None:
        """Append a microbatch to the order and compute every step that this makes possible."""
        self._order.append(microbatch)
        self._run(num_known=len(self._order), first_stage_stops_at=len(self._steps[0]))

    def interval(self) -> float:
        """Return the time of stage 0 that the forwards of the next microbatch in the order should fill.

        Per chunk: the time from the end of the step before its forward to the moment at which the next backward can start,
        divided by the forwards up to that backward; negative if the backward is ready earlier. Microbatches that are not in the
        order yet take the time of the last column (with one chunk, intervals after the warm-up do not depend on it).
        """
        position, total = len(self._order), 0.0
        saved = self._next.copy(), self._free_at.copy()
        for virtual_stage in range(0, self._num_virtual_stages, self._num_stages):
            index = self._index[PipelineStep(True, virtual_stage, position)]
            self._run(num_known=self._unknown, first_stage_stops_at=index)
            free_at, after = self._free_at[0], index
            while self._steps[0][after].is_forward:
                after += 1
            self._run(num_known=self._unknown, first_stage_stops_at=after)
            ready_at = self._ends[self._steps[0][after].needed(self._num_virtual_stages)]
            total += (ready_at - free_at) / (after - index)
        self._next, self._free_at = saved
        return total

    def _run(self, *, num_known: int, first_stage_stops_at: int) -> None:
        """Compute steps in rounds over the stages, up and down, until none is possible."""
        has_run = True
        while has_run:
            has_run = False
            for stage in (*range(self._num_stages), *range(self._num_stages - 2, -1, -1)):
                stop = first_stage_stops_at if stage == 0 else len(self._steps[stage])
                while self._next[stage] < stop and self._run_next(stage, num_known):
                    has_run = True

    def _run_next(self, stage: int, num_known: int) -> bool:
        step = self._steps[stage][self._next[stage]]
        needed = step.needed(self._num_virtual_stages)
        if step.position >= num_known:
            return False
        if needed is not None and self._index[needed] >= self._next[needed.virtual_stage % self._num_stages]:
            return False
        microbatch = self._order[step.position] if step.position < len(self._order) else self._unknown
        seconds = self._seconds[step.is_forward][step.virtual_stage][microbatch]
        self._free_at[stage] = self._ends[step] = max(self._free_at[stage], self._ends[needed]) + seconds
        self._next[stage] += 1
        return True
