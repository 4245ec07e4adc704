"""Samples that cannot be read are left out of the loss, by all ranks alike (--bad-sample skip)."""

import logging
from typing import Any

import torch
import torch.distributed as dist

from megatron.runtime.step.step import Step
from multimodal.values.errors import DataError

_FEWEST_SEEN = 1000
logger = logging.getLogger(__name__)


class BadSamples:
    """Those that some rank could not read, over a run."""

    def __init__(self, most_per_thousand: float) -> None:
        self._most_per_thousand, self._num_bad, self._num_seen = most_per_thousand, 0, 0

    def leave_out(self, step: Step, *, device: torch.device) -> Step:
        """Return the step without what any rank could not read; collective.

        Raises DataError, on every rank, if there have been too many (`check_share`), or if nothing is left of the step.
        """
        self._num_seen += len(step.lengths)
        told = torch.tensor([len(step.problems)], dtype=torch.int64, device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if not told.item():
            return step
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, dict(step.problems))
        problems = {sample: problem for of_rank in reversed(gathered) for sample, problem in of_rank.items()}
        for problem in problems.values():
            logger.info("left out a sample that cannot be read: %s", problem)
        self._num_bad += len(problems)
        check_share(self._num_bad, self._num_seen, most_per_thousand=self._most_per_thousand, problem=problem)
        if not (found := step.without(problems)).loss_divisor:
            raise DataError(f"no sample of a global batch can be read, such as: {problem}; repair the data")
        return found


def check_share(num_bad: int, num_samples: int, *, most_per_thousand: float, problem: str) -> None:
    """Raise DataError for more bad samples than allowed among these, or among a thousand if these are fewer."""
    if num_bad > most_per_thousand * max(_FEWEST_SEEN, num_samples) / 1000:
        raise DataError(
            f"{num_bad} of {num_samples} samples cannot be read, and no more than {most_per_thousand:g} per thousand are left "
            f"out: {problem}; repair the data, or raise --bad-samples-per-thousand"
        )
