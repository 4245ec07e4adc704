"""Trains by several runs that take turns, step by step, in the same processes, and shows what they take."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from rich.console import Console
from rich.table import Table


class Training(Protocol):
    """One rank of a run."""

    def prepare(self, batch: Any) -> Any:
        """Return this rank's part of a global batch."""

    def train_step(self, step: Any) -> float:
        """Train on it; returns this rank's share of the loss."""


def take_turns(
    runs: Mapping[str, Training], batch_of_step: Callable[[int], Any], num_iterations: int
) -> dict[str, dict[str, float]]:
    """Return for each run the median seconds of a step, and its ratio to the first's and the largest difference of its losses.

    The first of all steps is not counted. Collective.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(num_iterations + 1):
        batch = batch_of_step(number)
        for name, run in runs.items():
            prepared = run.prepare(batch)
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


def show(found: Mapping[Any, Mapping[str, Mapping[str, float]]], *, of: str, peer: str, as_json: bool) -> None:
    """Print what `take_turns` found of several cases; of: the heading of their names."""
    if as_json:
        print(json.dumps({"load": os.getloadavg()[0], "found": found}))
        return
    table = Table(of, "run", "step (s)", f"of {peer}", "largest difference of a loss")
    for case, rows in found.items():
        for name, row in rows.items():
            table.add_row(str(case), name, f"{row['seconds']:.3f}", f"{row['of_peer']:.3f}", f"{row['loss_difference']:.1e}")
    Console().print(table)
    print(f"load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
