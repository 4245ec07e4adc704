"""Rotary position frequencies per packed token, over one axis (text), two (image rows and columns) or three (an LLM's)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_frequencies(
    positions: Tensor,
    *,
    head_channels: int,
    base: float,
    dtype: torch.dtype,
    sections: Sequence[int] = (),
    is_interleaved: bool = False,
    is_staggered: bool = False,
    scaling: Sequence[float] = (),
    divisors: Tensor | None = None,
) -> Tensor:
    """Return the angles by which megatron-core's layers rotate queries and keys.

    positions: [num_tokens] or [num_tokens, num_axes], integers. The channel pairs of a head are shared evenly among the axes, as
    in Qwen2-VL's vision encoder with rows and columns; staggered axes take turns in the frequencies of one (Pixtral). With
    `sections` (Qwen2-VL's LLM), the pairs of one axis are `sections[axis]` successive pairs; if interleaved (Qwen3-VL), every
    third pair as long as the axis has pairs left, and all other pairs belong to the first axis. Frequencies are those of a single
    axis. scaling: as in Transformer.rotary_scaling, for one axis; divisors: of the LLM's frequencies, [head_channels / 2], for
    every token or [num_tokens, head_channels / 2].

    Shape: [num_tokens, 1, 1, head_channels] in `dtype` (float32, or float64 for exact checks).
    """
    if positions.dim() == 1:
        positions = positions[:, None]
    if sections:
        exponent = torch.arange(0, head_channels, 2, device=positions.device, dtype=dtype) / head_channels
        axes = torch.tensor(axes_of_pairs(sections, is_interleaved=is_interleaved), device=positions.device)
        angles = positions.expand(-1, len(sections)).to(dtype).index_select(1, axes) * (1.0 / base**exponent)
    else:
        num_axes = positions.shape[1]
        channels = head_channels // num_axes
        exponent = torch.arange(0, channels, 2, device=positions.device, dtype=dtype) / channels
        if is_staggered:
            exponent = exponent + torch.arange(0, 2 * num_axes, 2, device=positions.device)[:, None] / head_channels
        inverse = _slowed(1.0 / base**exponent, scaling)  # [channels / 2], or [num_axes, channels / 2]
        angles = (positions.to(dtype)[:, :, None] * inverse).flatten(1)  # [num_tokens, head_channels / 2]
    angles = angles if divisors is None else angles / divisors
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def frequency_divisors(
    factors: Sequence[float], long_factors: Sequence[float], *, short_length: int, lengths: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the divisors of each token's frequencies: those of short sequences, or of longer ones; None if there are none.

    lengths: [num_tokens], of each token's sequence. Returns [head_channels / 2], or [num_tokens, head_channels / 2].
    """
    if not factors:
        return None
    short = torch.tensor(factors, dtype=dtype, device=lengths.device)
    if not long_factors:
        return short
    longer = torch.tensor(long_factors, dtype=dtype, device=lengths.device)
    return torch.where((lengths > short_length)[:, None], longer, short)


def axes_of_pairs(sections: Sequence[int], *, is_interleaved: bool) -> list[int]:
    """Return the axis by which each pair of channels rotates."""
    num_axes, num_pairs = len(sections), sum(sections)
    if not is_interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    return [axis if pair < num_axes * sections[axis] else 0 for pair in range(num_pairs) for axis in (pair % num_axes,)]


def _slowed(inverse: Tensor, scaling: Sequence[float]) -> Tensor:
    """Lower low frequencies by a factor, and those between low and high ones by less (Llama 3.1)."""
    if not scaling:
        return inverse
    factor, low, high, length = scaling
    num_turns = length * inverse / (2 * math.pi)
    share = ((num_turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * inverse / factor + share * inverse


def rotated(rows: Tensor, angles: Tensor) -> Tensor:
    """Return rows * cos + (-second half, first half) * sin, as megatron-core does, with fewer copies.

    rows: [..., channels], all of which rotate; angles: broadcast against them.
    """
    found: Tensor = _Rotation.apply(rows, angles.cos().to(rows.dtype), *angles.sin().to(rows.dtype).chunk(2, dim=-1))
    return found


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cosines: Tensor, first_sines: Tensor, second_sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, first_sines, second_sines)
        return _turned(rows, cosines, first_sines, second_sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cosines, first_sines, second_sines = ctx.saved_tensors
        return _turned(gradient, cosines, -second_sines, -first_sines), None, None, None


def _turned(rows: Tensor, cosines: Tensor, first_sines: Tensor, second_sines: Tensor) -> Tensor:
    turned = rows * cosines
    (first, second), (found_first, found_second) = rows.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    found_first.sub_(second * first_sines)
    found_second.add_(first * second_sines)
    return turned
