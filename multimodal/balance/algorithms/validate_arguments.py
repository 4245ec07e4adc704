"""Checks the numeric arguments of the algorithms."""

import math
import operator

import numpy as np
import numpy.typing as npt

from multimodal.values.errors import AssignmentError

Loads = npt.NDArray[np.float64]

_INT32_MAX = 2**31 - 1


def validate_count(count: int, *, name: str, least: int = 1) -> None:
    """Raise AssignmentError unless a count is between `least` and 2^31 - 1."""
    if not least <= operator.index(count) <= _INT32_MAX:
        raise AssignmentError(f"{name} is {count}; it must be from {least} to {_INT32_MAX}")


def validate_bins(num_items: int, *, num_bins: int, max_items_per_bin: int | None) -> int:
    """Return the most items that a bin can get; raises AssignmentError if there are too many bins, none, or too little room."""
    if not 1 <= operator.index(num_bins) <= _INT32_MAX:
        raise AssignmentError(f"cannot spread {num_items} items over {num_bins} bins; ask for 1 to {_INT32_MAX}")
    if max_items_per_bin is None:
        return num_items
    if max_items_per_bin < 1 or num_bins * max_items_per_bin < num_items:
        raise AssignmentError(
            f"{num_items} items do not fit {num_bins} bins of at most {max_items_per_bin} items; "
            f"allow {max(1, math.ceil(num_items / num_bins))} items per bin or use more bins"
        )
    return min(max_items_per_bin, num_items)


def read_loads(loads: npt.ArrayLike, *, name: str) -> Loads:
    """Return loads as float64 of the same shape; raises AssignmentError unless all are finite and >= 0, and so is their sum."""
    try:
        values = np.asarray(loads, dtype=np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise AssignmentError(f"{name}: {error}; give numbers that double precision can hold") from error
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        at = where[0] if len(where) == 1 else where
        raise AssignmentError(f"{name}: entry {at} is {values[where]}; loads must be finite and not negative")
    with np.errstate(over="ignore"):
        total = float(values.sum())
    if not np.isfinite(total):
        raise AssignmentError(f"{name}: the loads add up to {total}; their sum must be finite too: use a larger unit")
    return values
