"""Ends a run that failed: one clear message, by the rank that failed first, and no rank left waiting."""

import os
import sys
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING

from multimodal.values.errors import BraidError

if TYPE_CHECKING:  # a wrong flag ends the run before torch needs to be imported
    from torch.distributed import Store  # type: ignore[attr-defined]

_KEY = "first-failure"
_PATIENCE_SECONDS = 3.0
"""A launcher kills all ranks when one has left, so the others wait this long for the one that speaks."""
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Socket closed")
"""How torch.distributed's messages tell that another rank is gone."""


def end_with_failure(problem: BaseException, *, rank: int, store: "Store | None") -> None:
    """Report and leave at once with exit code 1 (2 for bad input); without cleaning up, which could wait for peers.

    A wrong input shows its message alone, anything else its traceback. Ranks that fail after another one, for the most part
    because their peer is gone, say nothing. Before the ranks have met (`store` None), all see the same flags, so rank 0 speaks
    first.
    """
    if store is None and rank != 0:
        time.sleep(_PATIENCE_SECONDS)  # only a rank that fails alone is still alive after this
    if store is None or _is_first(store):
        _report(problem, rank)
    else:
        time.sleep(_PATIENCE_SECONDS)
    os._exit(2 if isinstance(problem, BraidError) else 1)


def _report(problem: BaseException, rank: int) -> None:
    if isinstance(problem, BraidError):
        print(f"pretrain_mllm.py: error: {problem} [{type(problem).__name__}, rank {rank}]", file=sys.stderr)
    elif isinstance(problem, RuntimeError) and any(sign in str(problem) for sign in _LOST_PEER):
        print(f"pretrain_mllm.py: rank {rank} ends: another rank is gone, whose own message says why", file=sys.stderr)
    else:
        print(f"pretrain_mllm.py: rank {rank} failed:", file=sys.stderr)
        traceback.print_exception(problem)
    sys.stdout.flush()
    sys.stderr.flush()


def _is_first(store: "Store") -> bool:
    try:
        store.set_timeout(timedelta(seconds=5))
        return store.add(_KEY, 1) == 1
    except (RuntimeError, ValueError):  # the rank that kept the store is gone
        return True
