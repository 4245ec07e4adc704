"""Increases the number of microbatches until none has more LLM tokens than allowed."""

from collections.abc import Callable, Sequence

import numpy as np

from multimodal.balance.batch_work import sum_by
from multimodal.values.assignment import Assignment
from multimodal.values.length_arrays import LengthBatch
from multimodal.values.sample_lengths import SampleLengths


def fit_tokens(
    assignment: Assignment,
    lengths: Sequence[SampleLengths],
    *,
    most: int,
    backbone: str,
    balance: Callable[[int], Assignment],
) -> Assignment:
    """Return the assignment if its microbatches of several samples have at most `most` tokens, else one of more microbatches.

    Balancers equalise work, not tokens, so the number that suffices on average may be too small. It grows by an eighth, or one,
    at a time, up to a replica's number of samples. balance: from a number of microbatches per replica to an assignment.
    """
    arrays, count = LengthBatch.of(lengths).by_id, 0
    while True:
        placed = assignment.placed[backbone]
        samples = np.searchsorted(arrays.sample_ids, placed.sample_ids)
        tokens = sum_by(placed.microbatch_of_atom, arrays.num_tokens[samples], placed.num_microbatches)
        too_full = (tokens > most) & (np.diff(placed.atom_starts) > 1)
        count = max(count, int(placed.counts.max(initial=1)))
        if not too_full.any() or count >= len(arrays):
            return assignment
        count += max(1, count // 8)
        assignment = balance(count)
