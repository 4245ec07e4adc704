"""All planted errors, and a rank's step with one of them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tests.distributed.gradient_case import GradientCase, RankGradients, build_session, plan_case, run_step
from tests.distributed.planted_errors.any_plan import PLANTED_ERRORS
from tests.distributed.planted_errors.context_parallelism import ERRORS_OF_CONTEXT_PARALLELISM, ERRORS_OF_CUT_ITEMS
from tests.distributed.planted_errors.cut_backwards import ERRORS_IN_CUT_BACKWARDS
from tests.distributed.planted_errors.generators import ERRORS_OF_GENERATORS
from tests.distributed.planted_errors.masks import ERRORS_OF_MASKS
from tests.distributed.planted_errors.sharded_weights import ERRORS_OF_SHARDED_WEIGHTS
from tests.distributed.planted_errors.unlike_replicas import ERRORS_OF_UNLIKE_REPLICAS

ERRORS: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "any plan": PLANTED_ERRORS,
    "cut backwards": ERRORS_IN_CUT_BACKWARDS,
    "sharded weights": ERRORS_OF_SHARDED_WEIGHTS,
    "unlike replicas": ERRORS_OF_UNLIKE_REPLICAS,
    "a generator": ERRORS_OF_GENERATORS,
    "context parallelism": ERRORS_OF_CONTEXT_PARALLELISM,
    "cut items": ERRORS_OF_CUT_ITEMS,
    "masks": ERRORS_OF_MASKS,
}
"""By what they need to happen."""


def planted(kind: str, error: str) -> Callable[[GradientCase], RankGradients]:
    """What each rank runs instead of `run_on_rank`."""
    return partial(_run_with, kind, error)


def _run_with(kind: str, error: str, case: GradientCase) -> RankGradients:
    with ERRORS[kind][error]():
        return run_step(build_session(case), plan_case(case))
