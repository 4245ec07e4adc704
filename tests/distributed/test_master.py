"""Consequence-invariance: any Plan, Assignment and Schedule gives the loss and gradients of one process, sample by sample.

BRAID_MASTER_EXAMPLES=1000 runs that many examples, drawn anew each time; without it a fixed set runs.
"""

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
@given(
    case=st.sampled_from((None, 2, 3)).flatmap(lambda copies: gradient_cases(has_unlike_replicas=False, num_state_copies=copies)),
    once=st.booleans(),
)
def test_replicas_share_weights(ranks: RankPool, case: GradientCase, once: bool) -> None:
    """Of any numbers of microbatches, in any order; they join each other's computations (ZeRO-3), reduce in all or the last.

    All share one copy of the weights, or only context parallel ranks and some replicas share each of several (hybrid sharding).
    """
    assert_matches(replace(case, shards_weights=True, reduces_once=once), ranks)


@examples(10)
@given(case=expert_cases())
def test_replicas_share_experts(ranks: RankPool, case: GradientCase) -> None:
    """Steps and checkpoints of them are in test_plan_change.py and test_checkpoint.py."""
    assert_matches(case, ranks)
