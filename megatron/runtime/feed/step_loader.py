"""Plans and loads steps ahead of training, in worker processes or a thread; failures are raised where the step is taken."""

import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.runtime.feed.step_planner import StepPlanner
from megatron.runtime.launch.stop_requests import ignore_in_worker
from megatron.runtime.step.step import Step
from multimodal.values.errors import BraidError

STEPS_AHEAD = 2
"""Steps that each worker, or the thread, prepares in advance."""


class _ErrorsAsValues(Dataset[Step | BraidError]):
    """torch wraps a worker's exception in a traceback; a wrong input should end with its own message instead."""

    def __init__(self, planner: StepPlanner) -> None:
        self._planner = planner

    def __getitem__(self, step: int) -> Step | BraidError:
        try:
            return self._planner[step]
        except BraidError as problem:
            return problem


def load_steps(planner: StepPlanner, steps: range, *, num_workers: int) -> Iterator[Step]:
    """The steps in order; with `num_workers` 0 each is prepared when it is taken. Raises what planning or loading raised."""
    loader = DataLoader(
        _ErrorsAsValues(planner),
        batch_size=None,
        sampler=steps,
        num_workers=min(num_workers, len(steps)),
        prefetch_factor=STEPS_AHEAD if num_workers and len(steps) else None,
        worker_init_fn=_start_worker,
    )
    for loaded in loader:
        if isinstance(loaded, BraidError):
            raise loaded
        yield loaded


def load_steps_in_thread(planner: StepPlanner, steps: range) -> Iterator[Step]:
    """The same in a thread of this process: for planners that talk to other ranks, as no forked worker can.

    Raises what planning or loading raised, at the step that failed. Decoding, the balancing kernels and messages release the
    interpreter, so that training goes on meanwhile.
    """
    prepared: queue.Queue[Step | BaseException] = queue.Queue(maxsize=STEPS_AHEAD)

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


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    ignore_in_worker()
    sys.excepthook = _report_unless_orphaned


def _report_unless_orphaned(*problem: Any) -> None:
    """Report an exception of a worker's thread; not that its training process is gone, which others tell better."""
    parent = multiprocessing.parent_process()
    for _ in range(10):
        if parent is not None and os.getppid() != parent.pid:
            return
        time.sleep(0.1)  # its connections close a little before a process is gone
    sys.__excepthook__(*problem)
