"""Consequence-invariance: any Plan, Assignment and Schedule gives the loss and gradients of one process, sample by sample.

BRAID_MASTER_EXAMPLES=1000 runs that many examples, drawn anew each time; without it a fixed set runs.
"""

import os

from hypothesis import HealthCheck, given, settings

from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies.gradient_cases import gradient_cases

NUM_EXAMPLES = os.environ.get("BRAID_MASTER_EXAMPLES")


@settings(
    max_examples=int(NUM_EXAMPLES or 90),
    derandomize=NUM_EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=gradient_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)
