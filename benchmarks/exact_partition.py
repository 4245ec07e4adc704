"""The optimal partition of few items, by an integer program, to compare partitions with."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from multimodal.balance.length_cost import CostForm, LengthCost


def least_costliest(lengths: Sequence[int], *, num_bins: int, cost: LengthCost, most_seconds: float = 60.0) -> float:
    """Return the least possible cost of the costliest bin, in tokens.

    A bin is named after its longest item: each item joins a bin of its own name or of a longer item's name, and at most
    `num_bins` items join a bin of their own name. Raises RuntimeError if the solver (HiGHS) needs longer than `most_seconds`.
    Takes exponential time.
    """
    lengths = sorted(lengths, reverse=True)
    added, padding = _parts(lengths, cost)
    pairs = [(item, name) for name in range(len(lengths)) for item in range(name, len(lengths))]
    joins = np.eye(len(pairs), len(pairs) + 1)  # one row per pair; the last column is the cost of the costliest bin
    named = {name: joins[pairs.index((name, name))] for name in range(len(lengths))}
    rows, least, most = [sum(named.values())], [0.0], [float(num_bins)]
    for item in range(len(lengths)):
        rows.append(sum(joins[at] for at, pair in enumerate(pairs) if pair[0] == item))
        least.append(1.0)
        most.append(1.0)
    for at, (_, name) in enumerate(pairs):
        rows.append(joins[at] - named[name])
    for name in range(len(lengths)):
        rows.append(sum(joins[at] * (added[item] + padding[name]) for at, (item, owner) in enumerate(pairs) if owner == name))
        rows[-1][-1] = -1
    bounds = least + [-np.inf] * (len(rows) - len(least)), most + [0.0] * (len(rows) - len(most))
    goal = np.eye(len(pairs) + 1)[-1]
    solved = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), *bounds),
        integrality=1 - goal,
        bounds=Bounds(0, np.where(goal, np.inf, 1)),
        options={"time_limit": most_seconds, "mip_rel_gap": 1e-6},
    )
    if solved.status != 0:
        raise RuntimeError(f"{len(lengths)} items in {num_bins} bins: {solved.message}")
    return float(solved.fun)


def _parts(lengths: Sequence[int], cost: LengthCost) -> tuple[Sequence[float], Sequence[float]]:
    """Return each item's cost in any bin, and the cost that it adds to every item of a bin in which it is the longest."""
    squares = [cost.quadratic_weight * length * length for length in lengths]
    nothing = [0.0] * len(lengths)
    return {
        CostForm.LINEAR: (lengths, nothing),
        CostForm.LINEAR_QUADRATIC: ([sum(pair) for pair in zip(lengths, squares, strict=True)], nothing),
        CostForm.PADDED: (nothing, lengths),
        CostForm.PADDED_ATTENTION: (lengths, squares),
    }[cost.form]
