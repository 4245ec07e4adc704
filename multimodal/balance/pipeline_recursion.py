"""When the steps of one pipeline end: each follows the one before it on its stage and the one whose output it takes."""

from collections.abc import Sequence

from multimodal.balance.pipeline_steps import Step

Seconds = Sequence[Sequence[float]]
"""[num_virtual_stages][num_microbatches + 1]: what each microbatch takes, and last what one takes that is not known yet."""


def pipeline_end(order: Sequence[int], *, steps: Sequence[Step], num_stages: int, forward: Seconds, backward: Seconds) -> float:
    """Return when the last step ends if the pipeline starts at 0 and runs its microbatches in this order. O(steps).

    steps: as `pipeline_steps` returns them.
    """
    free_at = [0.0] * num_stages
    ends: dict[Step | None, float] = {None: 0.0}
    for step in steps:
        seconds = (forward if step.is_forward else backward)[step.virtual_stage][order[step.position]]
        stage = step.virtual_stage % num_stages
        free_at[stage] = ends[step] = max(free_at[stage], ends[step.needed(len(forward))]) + seconds
    return max(free_at)


class PipelineRecursion:
    """The end of every step, as far as the order of microbatches is known (DistTrain 5.2, GETINTERVAL).

    Every step is run once for good, and a few times more for intervals.
    """

    def __init__(self, steps: Sequence[Step], *, num_stages: int, forward: Seconds, backward: Seconds) -> None:
        self._seconds = (backward, forward)
        self._num_stages, self._num_virtual_stages = num_stages, len(forward)
        self._unknown = len(forward[0]) - 1
        self._order: list[int] = []
        self._next = [0] * num_stages
        self._free_at = [0.0] * num_stages
        self._ends: dict[Step | None, float] = {None: 0.0}
        self._steps: list[list[Step]] = [[] for _ in range(num_stages)]
        self._index: dict[Step, int] = {}
        for step in steps:
            of_stage = self._steps[step.virtual_stage % num_stages]
            self._index[step] = len(of_stage)
            of_stage.append(step)

    def append(self, microbatch: int) -> None:
        """Append a microbatch to the order and run every step that this makes possible."""
        self._order.append(microbatch)
        self._run(num_known=len(self._order), first_stage_stops_at=len(self._steps[0]))

    def interval(self) -> float:
        """Return how much of stage 0's time waits to be filled by the forwards of the next microbatch in the order.

        Per chunk: the time from the end of the step before its forward to the moment at which the next backward can start,
        divided by the forwards up to that backward; negative where the backward is ready earlier. Microbatches that are not in
        the order yet take the time of the last column (with one chunk, intervals after the warm-up do not depend on it).
        """
        position, total = len(self._order), 0.0
        saved = self._next.copy(), self._free_at.copy()
        for virtual_stage in range(0, self._num_virtual_stages, self._num_stages):
            index = self._index[Step(True, virtual_stage, position)]
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
        """Run steps in rounds over the stages, up and down, until none can run."""
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
        if step.position >= num_known or not (needed is None or self._has_run(needed)):
            return False
        microbatch = self._order[step.position] if step.position < len(self._order) else self._unknown
        seconds = self._seconds[step.is_forward][step.virtual_stage][microbatch]
        self._free_at[stage] = self._ends[step] = max(self._free_at[stage], self._ends[needed]) + seconds
        self._next[stage] += 1
        return True

    def _has_run(self, step: Step) -> bool:
        return self._index[step] < self._next[step.virtual_stage % self._num_stages]
