"""Consequence-invariance: any Plan, Assignment and Schedule gives the loss and gradients of one process, sample by sample.

BRAID_MASTER_EXAMPLES=1000 runs that many examples, drawn anew each time; without it a fixed set runs.
"""

import math
import os
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies.cases import expert_cases, gradient_cases


def examples(number: int) -> settings:
    return settings(max_examples=int(os.environ.get("BRAID_MASTER_EXAMPLES", number)), suppress_health_check=list(HealthCheck))


@examples(64)
@given(case=gradient_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)


@examples(10)
@given(case=gradient_cases(has_encoder_edges=True))
def test_encoders_feed_encoders(ranks: RankPool, case: GradientCase) -> None:
    """One or several, by features or tokens."""
    assert_matches(case, ranks)


@examples(10)
@given(case=gradient_cases(has_conditions=True))
def test_generators_take_what_encoders_give(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)


@examples(16)
@given(case=gradient_cases(has_unlike_replicas=False), once=st.booleans(), is_hybrid=st.booleans())
def test_replicas_share_weights(ranks: RankPool, case: GradientCase, once: bool, is_hybrid: bool) -> None:
    """Of any numbers of microbatches, in any order; they join each other's computations (ZeRO-3), reduce in all or the last.

    All share one copy of the weights, or only context parallel ranks and some replicas share each of several (hybrid sharding).
    """
    shared = [unit for unit in case.plan.units.values() if unit.data_parallel_size * unit.context_parallel_size > 1]
    fits = math.gcd(*(unit.data_parallel_size for unit in shared))
    copies = fits if is_hybrid and fits > 1 else None
    assert_matches(replace(case, shards_weights=True, reduces_once=once, num_state_copies=copies), ranks)


@examples(10)
@given(case=expert_cases())
def test_replicas_share_experts(ranks: RankPool, case: GradientCase) -> None:
    """Steps and checkpoints of them are in test_plan_change.py and test_checkpoint.py."""
    assert_matches(case, ranks)
