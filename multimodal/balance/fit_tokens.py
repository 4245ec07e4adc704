"""Increases the number of microbatches until none has more LLM tokens than allowed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from multimodal.balance.batch_work import BatchWork, sum_by
from multimodal.values.assignment import Assignment


def fit_tokens(work: BatchWork, *, balance: Callable[[BatchWork], Assignment]) -> Assignment:
    """Return an assignment whose microbatches of several samples have at most `tokens_per_microbatch`, if that is set.

    Balancers equalise work, not tokens, so the number that suffices on average may be too small. It grows by an eighth, or one,
    at a time, up to a replica's number of samples.
    """
    assignment, most = balance(work), work.options.tokens_per_microbatch
    if most is None:
        return assignment
    arrays, count = work.arrays, 0
    while True:
        placed = assignment.placed[work.graph.backbone.name]
        samples = np.searchsorted(arrays.sample_ids, placed.sample_ids)
        tokens = sum_by(placed.microbatch_of_atom, arrays.num_tokens[samples], placed.num_microbatches)
        too_full = (tokens > most) & (np.diff(placed.atom_starts) > 1)
        count = max(count, int(placed.counts.max(initial=1)))
        if not too_full.any() or count >= len(arrays):
            return assignment
        count += max(1, count // 8)
        assignment = balance(replace(work, options=replace(work.options, num_microbatches=count)))
