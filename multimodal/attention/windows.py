"""Windows of images: groups of neighbouring patches that attend only to each other (Qwen2.5-VL)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """An order of tokens in which every window is a sequence of its own."""

    order: Tensor
    """[num_tokens]: the tokens, window by window."""
    places: Tensor
    """[num_tokens]: the place of every token in that order."""
    lengths: tuple[int, ...]
    """Tokens of each window."""


def order_by_window(positions: Tensor, lengths: Sequence[int], *, size: int) -> tuple[Tensor, tuple[int, ...]]:
    """Cut images into windows of size x size patches, or clips into chunks; those at the ends may be smaller.

    Returns the tokens in the order of windows, [num_tokens], and the tokens of each window.

    positions: [num_tokens, 2], rows and columns, or [num_tokens, 1], on the CPU; lengths: tokens of each item, one after another.
    """
    image = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    window = torch.cat((image[:, None], positions // size), dim=1)
    _, group, counts = torch.unique(window, dim=0, return_inverse=True, return_counts=True)
    return torch.argsort(group, stable=True), tuple(counts.tolist())
