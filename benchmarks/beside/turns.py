"""Compares runs that take turns, and prints what they take, as lines of the table in docs/performance.md."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor


class Training(Protocol):
    """One rank of a run."""

    def prepare(self, batch: Any) -> Any:
        """Return this rank's part of a global batch."""

    def train_step(self, step: Any) -> float:
        """Train on it; returns this rank's share of the loss."""


class Waited(torch.autograd.Function):
    """Waits in forward, and twice as long in backward, in place of a computation or beside it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float, *weights: Tensor) -> Tensor:
        """Return the rows; weights: those that the computation would have."""
        ctx.seconds, ctx.weights = seconds, weights
        time.sleep(seconds)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, and zeros for weights."""
        time.sleep(2 * ctx.seconds)
        return gradient, None, *(torch.zeros((), dtype=each.dtype).expand_as(each) for each in ctx.weights)


def compare(seconds: Sequence[float], peer_seconds: Sequence[float]) -> dict[str, float]:
    """Return the median of seconds, and the median, the least and the most of their ratios to the peer's, turn by turn."""
    ratios = [each / other for each, other in zip(seconds, peer_seconds, strict=True)]
    return {"seconds": median(seconds), "of_peer": median(ratios), "least": min(ratios), "most": max(ratios)}


def print_rows(found: Mapping[str, Mapping[str, float]], *, peer: str) -> None:
    """Print the line of each piece of work in docs/performance.md, from what `compare` returned: with command, machine, load."""
    machine = f"{os.cpu_count()} cores ({platform.processor() or platform.machine()}), load {os.getloadavg()[0]:.1f}"
    for work, row in found.items():
        ratio = f"{row['of_peer']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        print(f"| {work} | {peer} | {ratio} | `python {shlex.join(sys.argv)}` | {machine} |")


def take_turns(
    runs: Mapping[str, Training], batch_of_step: Callable[[int], Any], num_iterations: int
) -> dict[str, dict[str, float]]:
    """Return for each run what `compare` finds beside the first, and the largest difference of its losses from the first's.

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
            **compare(found, seconds[peer]),
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
    for case, rows in found.items():
        print_rows({f"{of}: {case}; {name}": row for name, row in list(rows.items())[1:]}, peer=peer)
