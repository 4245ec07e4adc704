"""Prepares steps ahead in a thread of the training process: for planners that talk to other ranks, as no forked worker can."""

import queue
import threading
from collections.abc import Iterator

from megatron.runtime.feed.step_planner import StepPlanner
from megatron.runtime.step.step import Step

_STEPS_AHEAD = 2


def load_steps_in_thread(planner: StepPlanner, steps: range) -> Iterator[Step]:
    """The steps in order. Raises what planning or loading raised, at the step that failed.

    Decoding, the balancing kernels and messages release the interpreter, so that training goes on meanwhile.
    """
    prepared: queue.Queue[Step | BaseException] = queue.Queue(maxsize=_STEPS_AHEAD)

    def prepare() -> None:
        for number in steps:
            try:
                prepared.put(planner[number])
            except BaseException as problem:
                prepared.put(problem)
                return

    threading.Thread(target=prepare, name="steps ahead", daemon=True).start()
    for _ in steps:
        step = prepared.get()
        if isinstance(step, BaseException):
            raise step
        yield step
