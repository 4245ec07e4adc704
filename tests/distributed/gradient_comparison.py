"""Holds what the ranks of a case report against one process."""

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from multimodal.model.parameter_sharding import WHOLE
from tests.distributed.gradient_case import GradientCase, RankGradients, reference_of, run_on_rank, run_reference
from tests.distributed.rank_pool import RankPool
from tests.unit.model.rank_groups import join_shards

TOLERANCE = 1e-9
SMALLEST_SCALE = 1e-3
"""Gradients are compared relative to their largest element, which counts as at least this."""


class MismatchError(AssertionError):
    """Loss or gradients differ from one process."""


def assert_matches(
    case: GradientCase,
    ranks: RankPool,
    *,
    run: Callable[[GradientCase], RankGradients] = run_on_rank,
    expected: RankGradients | None = None,
) -> None:
    """Loss and every gradient, on every replica and every copy, within 1e-9 of one process; raises MismatchError.

    run: what each rank does, which tests of this test replace; expected: what other code than Braid's found, if any did.
    """
    if expected is None:
        expected = _run_reference(ranks, pickle.dumps(reference_of(case)))
    compare(case, ranks.run(run, case, world_size=case.plan.num_ranks), expected=expected)


def compare(case: GradientCase, found: Sequence[RankGradients], *, expected: RankGradients, tolerance: float = TOLERANCE) -> None:
    """Hold what the ranks of a case have found against that; raises MismatchError."""
    for unit, expected_sum in expected.loss_sums.items():
        loss_sum = sum(rank.loss_sums.get(unit, 0.0) for rank in found)
        if not abs(loss_sum - expected_sum) <= tolerance * max(1.0, abs(expected_sum)):
            raise MismatchError(f"loss of {unit} {loss_sum} instead of {expected_sum}")
    seen: set[tuple[str, str]] = set()
    for unit_name, unit in case.plan.units.items():
        for replica_index, replica in enumerate(unit.replicas):
            for stage in replica.stages:
                for group in unit.tensor_parallel_groups(stage):
                    where = f"replica {replica_index}, ranks {group} of {stage.ranks}"
                    seen |= _compare_shards([found[rank] for rank in group], expected, unit_name, where, tolerance)
    if seen != set(expected.gradients) or not seen:
        raise MismatchError(f"gradients are missing: {sorted(set(expected.gradients) - seen)[:3]}")


@lru_cache(maxsize=8)  # tests hold many plans, or planted errors, against one batch
def _run_reference(ranks: RankPool, case: bytes) -> RankGradients:
    expected: RankGradients
    (expected,) = ranks.run(run_reference, pickle.loads(case), world_size=1)
    return expected


def _compare_shards(
    shards: Sequence[RankGradients], expected: RankGradients, unit: str, where: str, tolerance: float
) -> set[tuple[str, str]]:
    keys = {key for key in shards[0].gradients if key[0] == unit}
    for key in sorted(keys):
        reference, sharding = expected.gradients[key], shards[0].shardings[key]
        parts = [torch.from_numpy(shard.gradients[key]) for shard in shards]
        copies = parts if sharding == WHOLE else [join_shards(parts, sharding)]
        bound = tolerance * max(SMALLEST_SCALE, float(np.abs(reference).max()))
        error = max(float(np.abs(copy.numpy() - reference).max()) for copy in copies)
        if not error <= bound:
            raise MismatchError(f"gradient of {key} is off by {error} (largest element {np.abs(reference).max()}) on {where}")
    return keys
