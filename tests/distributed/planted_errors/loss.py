"""Errors of the loss: each is a wrong factor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron.runtime.execution.running_step import RunningStep


@contextmanager
def scaled_loss(scale: Callable[[Any, Any, Any], float]) -> Iterator[None]:
    """Multiply every rank's loss by what `scale` returns for the run, the action and the loss."""
    original = RunningStep._close

    def closed(run: Any, action: Any, output: Any) -> tuple[Any, Any]:
        loss, given = original(run, action, output)
        return None if loss is None else loss * scale(run, action, loss), given

    with patch.object(RunningStep, "_close", closed):
        yield


def mean_of_means(run: Any, action: Any, loss: torch.Tensor) -> float:
    """Each microbatch's loss as its mean over target tokens, and of these means the mean."""
    assignment, step = run.step.assignment, run.step
    num_microbatches = sum(len(replica) for replica in assignment.units[action.unit])
    atoms = assignment.units[action.unit][action.replica][action.microbatch]
    num_targets = sum(step.lengths[atom.sample_id].num_target_tokens for atom in atoms)
    return float(step.num_target_tokens / (num_targets * num_microbatches))


def mean_over_replicas(run: Any, action: Any, loss: torch.Tensor) -> float:
    """Divided once more by the number of replicas."""
    return 1 / len(run.step.assignment.units[action.unit])
