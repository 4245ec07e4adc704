"""When a chunk's parameters are gathered ahead of its first forward: Megatron's param_sync_func, driven by a schedule."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class ParameterSync:
    """Launches the gathering of each chunk's parameters while the chunk before it in the lane starts.

    As in Megatron, only interleaved training steps call param_sync_func; elsewhere the model's own hooks gather parameters.
    """

    def __init__(
        self, config: Any, *, chunks: Sequence[torch.nn.Module], forward_order: Iterable[int], forward_only: bool
    ) -> None:
        """forward_order: the chunk of each forward of the lane, in order."""
        functions = config.param_sync_func
        is_used = functions is not None and len(chunks) > 1 and not forward_only
        self._functions: list[Callable[..., None]] = functions if isinstance(functions, list) else [functions] * len(chunks)
        self._chunks = chunks
        self._waiting = list(dict.fromkeys(forward_order)) if is_used else []
        self._started: set[int] = set()
        self._launch_next()

    def before_forward(self, chunk_index: int) -> None:
        """Tell that a forward of a chunk is about to start."""
        if chunk_index not in self._started:
            self._started.add(chunk_index)
            self._launch_next()

    def _launch_next(self) -> None:
        if self._waiting:
            chunk_index = self._waiting.pop(0)
            self._functions[chunk_index](self._chunks[chunk_index].parameters())
