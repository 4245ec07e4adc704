"""The optimum that partitions of few items are held against, by an integer program."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from multimodal.balance.unit_cost import CostForm, UnitCost


def least_costliest(lengths: Sequence[int], *, num_bins: int, cost: UnitCost, most_seconds: float = 60.0) -> float:
    """Return the least cost that the costliest bin can have, in tokens.

    Each item joins a bin that is named after the bin's longest item; at most `num_bins` items join the one of their own name.
    Raises RuntimeError when the solver (HiGHS) needs longer than `most_seconds`. Exponential.
    """
    lengths = sorted(lengths, reverse=True)
    added, padding = _parts(lengths, cost)
    pairs = [(item, name) for name in range(len(lengths)) for item in range(name, len(lengths))]
    joins = np.eye(len(pairs), len(pairs) + 1)  # a row per pair; the last column is the cost of the costliest bin
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


def _parts(lengths: Sequence[int], cost: UnitCost) -> tuple[Sequence[float], Sequence[float]]:
    """Return items' costs wherever they are, and what each makes every item of its bin cost where it is the longest."""
    squares = [cost.quadratic_weight * length * length for length in lengths]
    nothing = [0.0] * len(lengths)
    return {
        CostForm.LINEAR: (lengths, nothing),
        CostForm.LINEAR_QUADRATIC: ([sum(pair) for pair in zip(lengths, squares, strict=True)], nothing),
        CostForm.PADDED: (nothing, lengths),
        CostForm.PADDED_ATTENTION: (lengths, squares),
    }[cost.form]
