"""What the samples of a global batch cost each unit, checked and in an order of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from multimodal.values.errors import AssignmentError

Loads = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleLoads:
    """Loads in the order of sample ids, so that what is decided does not depend on the order in which samples come."""

    llm: Loads
    """[num_samples]"""
    encoders: Loads
    """[num_encoders, num_samples]"""
    positions: npt.NDArray[np.int64]
    """[num_samples]: where each sample stands in the order in which the caller gave them."""


def check_loads(loads: npt.ArrayLike, *, name: str) -> Loads:
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


def order_by_id(
    llm_loads: npt.ArrayLike, *, encoder_loads: npt.ArrayLike, sample_ids: Sequence[int] | None = None
) -> SampleLoads:
    """Check the loads of a global batch and sort them by sample id.

    llm_loads: [num_samples]. encoder_loads: [num_samples], or [num_encoders, num_samples] (0 encoders are allowed).
    sample_ids: [num_samples], all different; None: 0, 1, 2, ...

    Raises AssignmentError when there is no sample, shapes differ, an id comes twice, or a load is negative, not a number, or
    too large. O(n log n).
    """
    llm = check_loads(llm_loads, name="LLM loads")
    encoders = check_loads(encoder_loads, name="encoder loads")
    if llm.ndim != 1 or llm.size == 0:
        raise AssignmentError(f"LLM loads of shape {llm.shape}: give one per sample, of at least one sample")
    if encoders.ndim == 1:
        encoders = encoders[None, :]
    if encoders.ndim != 2 or encoders.shape[1] != llm.size:
        raise AssignmentError(
            f"encoder loads of shape {encoders.shape} for {llm.size} samples: give one per sample, or a row of them per encoder"
        )
    positions = _sorted_positions(sample_ids, num_samples=llm.size)
    return SampleLoads(llm[positions], np.ascontiguousarray(encoders[:, positions]), positions)


def _sorted_positions(sample_ids: Sequence[int] | None, *, num_samples: int) -> npt.NDArray[np.int64]:
    if sample_ids is None:
        return np.arange(num_samples, dtype=np.int64)
    if len(sample_ids) != num_samples:
        raise AssignmentError(f"{len(sample_ids)} sample ids for {num_samples} samples; give one per sample")
    positions = sorted(range(num_samples), key=sample_ids.__getitem__)
    for first, then in pairwise(positions):
        if sample_ids[first] == sample_ids[then]:
            raise AssignmentError(f"sample {sample_ids[first]} is in the global batch twice; give every sample an id of its own")
    return np.array(positions, dtype=np.int64)
