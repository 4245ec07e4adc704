"""Copies of an encoder that repeat other replicas' work change neither the loss nor any gradient."""

from hypothesis import HealthCheck, given, settings

from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies import replicated_cases


@settings(max_examples=25, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=replicated_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)
