"""Steps that all ranks take together; a failure on one rank becomes the same CheckpointError on all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.runtime.state.handover import gather_objects
from multimodal.values.errors import BraidError, CheckpointError

_Result = TypeVar("_Result")


def on_all_ranks(action: Callable[[], _Result], *, what: str, group: ProcessGroup | None = None) -> list[_Result]:
    """Run `action` on every rank and return the results of all of them, in rank order; for small results.

    what: names the step in the error; group: a gloo group of all ranks, for threads of their own; by default the run's. Raises
    CheckpointError on every rank if the action failed on any.
    """
    return gather_objects(on_this_rank(action, what=what, group=group), group=group)


def on_this_rank(action: Callable[[], _Result], *, what: str, group: ProcessGroup | None = None) -> _Result:
    """Run `action` on every rank and return only this rank's result; errors as in `on_all_ranks`."""
    with failing_together(what=what, group=group):
        result = action()
    return result


@contextmanager
def failing_together(*, what: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Raise CheckpointError on every rank if the body failed on any, of BraidErrors with their message.

    Ranks exchange one number that says if all went well, and more only if not.
    """
    problem = None
    try:
        yield
    except BraidError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{what} failed on rank {dist.get_rank()}: {type(error).__name__}: {' '.join(str(error).split())}"
    device = torch.device("cpu") if group is not None else torch.cuda.current_device()
    has_failed = torch.tensor([problem is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=group)
    if has_failed.item():
        message = next(filter(None, gather_objects(problem, group=group)))  # it may quote untrusted text from a checkpoint
        raise CheckpointError("".join(character if character.isprintable() else ascii(character)[1:-1] for character in message))


def on_first_rank(action: Callable[[], _Result], *, what: str, group: ProcessGroup | None = None) -> _Result:
    """Run `action` on rank 0 only and return its result on every rank; errors as in `on_all_ranks`."""
    result = on_this_rank(lambda: action() if dist.get_rank() == 0 else None, what=what, group=group)
    told: list[Any] = [result]
    dist.broadcast_object_list(told, src=0, group=group)
    return told[0]
