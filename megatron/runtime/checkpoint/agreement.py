"""Collective steps of a checkpoint: what fails on one rank becomes the same CheckpointError on all of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from multimodal.values.errors import CheckpointError

_Result = TypeVar("_Result")


def on_all_ranks(action: Callable[[], _Result], *, what: str) -> list[_Result]:
    """Run `action` on every rank and return the results of all of them, in rank order.

    what: names the step in the error. Raises CheckpointError on every rank when the action failed on any.
    """
    result, problem = None, None
    try:
        result = action()
    except CheckpointError as error:
        problem = str(error)
    except CheckpointException as error:  # torch gathered it from all ranks
        rank, (cause, _) = min(error.failures.items())
        problem = str(cause) if isinstance(cause, CheckpointError) else f"{what} failed on rank {rank}: {_describe(cause)}"
    except Exception as error:
        problem = f"{what} failed on rank {dist.get_rank()}: {_describe(error)}"
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (problem, result))
    if problems := [found for found, _ in outcomes if found is not None]:
        raise CheckpointError(_printable(problems[0]))
    return [found for _, found in outcomes]


def on_this_rank(action: Callable[[], _Result], *, what: str) -> _Result:
    """Run `action` on every rank and return this rank's own result, which nobody else gets; errors as in `on_all_ranks`."""
    kept: list[_Result] = []
    on_all_ranks(lambda: kept.append(action()), what=what)
    return kept[0]


def on_first_rank(action: Callable[[], _Result], *, what: str) -> _Result:
    """Run `action` on rank 0 alone and return its result on every rank; errors as in `on_all_ranks`."""
    results = on_all_ranks(lambda: action() if dist.get_rank() == 0 else None, what=what)
    first: Any = results[0]
    return first  # type: ignore[no-any-return]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _printable(message: str) -> str:
    """Without control characters: a message may quote what a stranger wrote into a checkpoint."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in message)
