"""LLMs with experts, also where replicas share them: the same losses, gradients, steps and checkpoints as one process."""

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies import expert_cases

FIXED: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=25, **FIXED)
@given(case=expert_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)
