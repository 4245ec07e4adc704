"""Claim: few items are placed within a thousandth of the optimum on average, and never worse than longest first or differencing.

Bins and items per bin as in the table, lengths even between 1 and 999 and long-tailed (lognormal, sigma 1), `--repeats` of each.
The optimum is an integer program's (`exact_partition.py`); instances that take it longer than `--seconds` are left out.
Columns are the costliest bin over the optimum's, mean and worst; `us` the processor time of one partition.

Run `python benchmarks/few_items.py [--json] [--repeats N] [--seconds S]`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.differencing_partition import partition_by_differencing
from benchmarks.exact_partition import least_costliest
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.length_cost import LINEAR_COST

SHAPES = ((2, 3), (2, 6), (3, 3), (3, 4), (4, 2), (4, 3), (6, 2), (6, 3), (8, 2), (10, 2))
"""(bins, items per bin)."""
METHODS = ("Braid", "longest first", "differencing")
CLAIMED_MEAN = 1.001


def draw(num_items: int, *, is_even: bool, generator: np.random.Generator) -> list[int]:
    """Draw lengths, longest first."""
    lengths = generator.integers(1, 1000, num_items) if is_even else generator.lognormal(6, 1, num_items).astype(int) + 1
    return sorted(lengths.tolist(), reverse=True)


def measure(lengths: list[int], num_bins: int, most_seconds: float) -> tuple[list[float], float] | None:
    """Return the costliest bin of each method over the optimum's, and Braid's microseconds; None if the solver takes too long."""
    try:
        optimum = least_costliest(lengths, num_bins=num_bins, cost=LINEAR_COST, most_seconds=most_seconds)
    except RuntimeError:
        return None
    items, start = np.array(lengths), time.process_time()
    for _ in range(10):
        bins = post_balance(items, num_bins=num_bins)
    microseconds = 1e5 * (time.process_time() - start)
    longest_first = post_balance(items, num_bins=num_bins, refinement_steps=0)
    found = (bins, longest_first, partition_by_differencing(lengths, num_bins=num_bins))
    return [float(np.bincount(each, weights=items).max() / optimum) for each in found], microseconds


def main() -> None:
    """Draw, solve, measure and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeats", type=int, default=4, help="instances of each shape and kind of lengths")
    parser.add_argument("--seconds", type=float, default=10.0, help="most that the exact solver may take for one")
    arguments = parser.parse_args()
    generator, rows, every = np.random.default_rng(0), [], []
    for num_bins, per_bin in SHAPES:
        drawn = [draw(num_bins * per_bin, is_even=is_even, generator=generator) for is_even in (True, False) * arguments.repeats]
        measured = [each for lengths in drawn if (each := measure(lengths, num_bins, arguments.seconds))]
        if measured:
            ratios = np.array([each[0] for each in measured])
            every.append(ratios)
            rows.append((num_bins, per_bin, len(measured), *ratios.mean(0), *ratios.max(0), min(each[1] for each in measured)))
    ratios = np.concatenate(every)
    summary = {
        f"{name}, {kind}": float(value)
        for kind, values in (("mean", ratios.mean(0)), ("worst", ratios.max(0)))
        for name, value in zip(METHODS, values, strict=True)
    }
    never_worse = bool((ratios[:, 0] <= ratios[:, 1:].min(axis=1) * (1 + 1e-9)).all())
    holds = never_worse and summary["Braid, mean"] <= CLAIMED_MEAN
    if arguments.json:
        print(json.dumps({"instances": len(ratios), **summary, "never_worse": never_worse, "holds": holds, "rows": rows}))
        return
    console = Console(width=130)
    heads = [f"{name}, {kind}" for kind in ("mean", "worst") for name in METHODS]
    table = Table("bins", "items each", "instances", *heads, "us", title="costliest bin over the optimum")
    for num_bins, per_bin, count, *values, microseconds in rows:
        table.add_row(str(num_bins), str(per_bin), str(count), *(f"{value:.4f}" for value in values), f"{microseconds:.0f}")
    console.print(table)
    for name, value in summary.items():
        console.print(f"{name}: {value:.4f}")
    console.print(
        f"{len(ratios)} instances: {summary['Braid, mean']:.4f} of the optimum on average, claimed {CLAIMED_MEAN}; "
        f"{'never' if never_worse else 'sometimes'} worse than the others: {'holds' if holds else 'does not hold'}"
    )


if __name__ == "__main__":
    main()
