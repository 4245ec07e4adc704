"""Trains a compared case by several runs that take turns, step by step, in the same processes."""

import statistics
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch.distributed as dist

from tests.distributed.compared_case import ComparedCase
from tests.distributed.random_source import RandomSource


class Training(Protocol):
    """One rank of a run."""

    def prepare(self, source: RandomSource) -> Any:
        """Return this rank's part of a global batch."""

    def train_step(self, step: Any) -> float:
        """Train on it; returns this rank's share of the loss."""


def take_turns(runs: Mapping[str, Training], case: ComparedCase, num_iterations: int) -> dict[str, dict[str, float]]:
    """Return for each run the median seconds of a step, and its ratio to the first's and the largest difference of its losses.

    The first of all steps is not counted. Collective.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(num_iterations + 1):
        source = case.batch_of_step(number)
        for name, run in runs.items():
            prepared = run.prepare(source)
            dist.barrier()
            start = time.perf_counter()
            loss = run.train_step(prepared)
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - start)
            losses[name].append(_summed(loss))
    peer = next(iter(runs))
    return {
        name: {
            "seconds": statistics.median(found),
            "of_peer": statistics.median(each / other for each, other in zip(found, seconds[peer], strict=True)),
            "loss_difference": max(abs(each - other) for each, other in zip(losses[name], losses[peer], strict=True)),
        }
        for name, found in seconds.items()
    }


def _summed(loss: float) -> float:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, loss)
    return float(sum(shares))
