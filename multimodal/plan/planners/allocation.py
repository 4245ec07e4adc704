"""Divides GPUs over units so that the slowest one is as fast as can be: DistTrain's convex problem, solved in closed form."""

from collections.abc import Sequence
from typing import NamedTuple

from multimodal.values.errors import PlanError


class Allocation(NamedTuple):
    """GPUs of each unit, fractions allowed, and the largest work per GPU."""

    gpus: tuple[float, ...]
    bottleneck: float


def solve_allocation(
    work: Sequence[float], *, num_gpus: float, minimums: Sequence[float], maximums: Sequence[float] | None = None
) -> Allocation:
    """Minimise max_i(work_i / x_i) subject to sum(x) <= num_gpus and minimum_i <= x_i <= maximum_i (DistTrain, Eq. 2 and 4.3).

    At the optimum t, every unit has x_i = max(minimum_i, work_i / t): those above their minimum are equally slow, so
    t = (their work) / (the GPUs that the others' minimums leave). As t falls from infinity, units rise above their minimum in the
    order of work_i / minimum_i, which leaves one candidate t per number of risen units. A maximum bounds t from below by
    work_i / maximum_i. Exact; O(units log units).

    work: in GPU-seconds, not negative. minimums: positive. Raises PlanError when the minimums exceed `num_gpus` or a maximum.
    """
    _check(minimums, maximums, num_gpus)
    floor = max((amount / most for amount, most in zip(work, maximums, strict=True)), default=0.0) if maximums else 0.0
    order = sorted(range(len(work)), key=lambda unit: -work[unit] / minimums[unit])
    risen, left = 0.0, float(num_gpus) - sum(minimums)
    bottleneck = work[order[0]] / minimums[order[0]] if order else 0.0
    for position, unit in enumerate(order):
        risen += work[unit]
        left += minimums[unit]
        following = work[order[position + 1]] / minimums[order[position + 1]] if position + 1 < len(order) else 0.0
        bottleneck = max(risen / left, following)
        if risen / left >= following:
            break
    bottleneck = max(bottleneck, floor)
    gpus = tuple(max(least, amount / bottleneck) if bottleneck else least for amount, least in zip(work, minimums, strict=True))
    return Allocation(gpus, bottleneck)


def _check(minimums: Sequence[float], maximums: Sequence[float] | None, num_gpus: float) -> None:
    if sum(minimums) > num_gpus * (1 + 1e-12):
        raise PlanError(f"the units need at least {sum(minimums):g} GPUs, but there are {num_gpus:g}")
    if maximums is not None and any(least > most for least, most in zip(minimums, maximums, strict=True)):
        raise PlanError(f"some unit needs at least more GPUs than it can use: minimums {minimums}, maximums {maximums}")
