"""Reduces a loop's gradients: functions of Megatron's config, called as a schedule says."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class GradientSync:
    """Holds the reduction of gradients back until a chunk's last backward, as Megatron's own schedules do.

    Without grad_sync_func, a chunk's last backward reduces gradients as it computes them. With it, reductions are launched where
    the schedule says, except for the first stage of a pipeline that is not interleaved, which has no bubble after its last
    backward.
    """

    def __init__(self, config: Any, *, chunks: Sequence[torch.nn.Module]) -> None:
        """config: ModelParallelConfig whose two functions may be None, one for all chunks, or a list with one per chunk."""
        no_sync = config.no_sync_func
        self._make_contexts: list[Callable[[], Any]] = no_sync if isinstance(no_sync, list) else [no_sync] if no_sync else []
        launch = config.grad_sync_func
        self._launch: list[Callable[..., None] | None] = launch if isinstance(launch, list) else [launch] * len(chunks)
        self._chunks = chunks
        self._held: ExitStack | None = None
        self._is_launched = [False] * len(chunks)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold reductions back for the duration of a step, except those that `last_backward` and `launch` allow."""
        self._hold()
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def last_backward(self, chunk_index: int, *, is_first_stage: bool) -> Iterator[None]:
        """Surround the last backward of a chunk."""
        has_bubble_after = not is_first_stage or len(self._chunks) > 1
        if self._launch[chunk_index] is not None and has_bubble_after:
            yield
            return
        self._is_launched[chunk_index] = True
        self._release()
        try:
            yield
        finally:
            self._hold()

    def launch(self, chunk_index: int) -> None:
        """Start reducing a chunk's gradients, unless its last backward did."""
        function = self._launch[chunk_index]
        if function is None or self._is_launched[chunk_index]:
            return
        self._is_launched[chunk_index] = True
        self._release()
        function(self._chunks[chunk_index].parameters())
        self._hold()

    def _hold(self) -> None:
        self._held = ExitStack()
        for make_context in self._make_contexts:
            self._held.enter_context(make_context())

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
