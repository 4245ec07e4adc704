"""Weights and gradients that replicas share layer by layer give the loss and gradients of one process."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies import gradient_cases

MANY = settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(case=gradient_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(replace(case, shards_weights=True), ranks)
