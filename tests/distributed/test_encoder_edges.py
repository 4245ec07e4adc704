"""Encoders that feed encoders, one or several, by features or tokens, or generators: under any plan as in one process."""

import os

from hypothesis import HealthCheck, given, settings

from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies.gradient_cases import gradient_cases

NUM_EXAMPLES = os.environ.get("BRAID_MASTER_EXAMPLES")


several = settings(
    max_examples=int(NUM_EXAMPLES or 10),
    derandomize=NUM_EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@several
@given(case=gradient_cases(has_encoder_edges=True))
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)


@several
@given(case=gradient_cases(has_conditions=True))
def test_generators_take_what_encoders_give(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)
