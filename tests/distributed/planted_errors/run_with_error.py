"""A rank's step with one of all the planted errors."""

from collections.abc import Callable
from functools import partial

from tests.distributed.gradient_case import GradientCase, RankGradients, build_session, plan_case, run_step
from tests.distributed.planted_errors.any_plan import PLANTED_ERRORS
from tests.distributed.planted_errors.context_parallelism import ERRORS_OF_CONTEXT_PARALLELISM, ERRORS_OF_CUT_ITEMS
from tests.distributed.planted_errors.cut_backwards import ERRORS_IN_CUT_BACKWARDS
from tests.distributed.planted_errors.generators import ERRORS_OF_GENERATORS
from tests.distributed.planted_errors.masks import ERRORS_OF_MASKS
from tests.distributed.planted_errors.sharded_weights import ERRORS_OF_SHARDED_WEIGHTS
from tests.distributed.planted_errors.unlike_replicas import ERRORS_OF_UNLIKE_REPLICAS

Error = Callable[[GradientCase], RankGradients]


def planted(name: str) -> Error:
    """What each rank runs instead of `run_on_rank`."""
    return partial(_run_with, name)


def _run_with(name: str, case: GradientCase) -> RankGradients:
    errors = {
        **PLANTED_ERRORS,
        **ERRORS_IN_CUT_BACKWARDS,
        **ERRORS_OF_GENERATORS,
        **ERRORS_OF_MASKS,
        **ERRORS_OF_CONTEXT_PARALLELISM,
        **ERRORS_OF_CUT_ITEMS,
        **ERRORS_OF_SHARDED_WEIGHTS,
        **ERRORS_OF_UNLIKE_REPLICAS,
    }
    with errors[name]():
        return run_step(build_session(case), plan_case(case))
