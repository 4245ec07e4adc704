"""Small masks and inputs that the attention tests share."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from multimodal.attention.attention_backend import AttentionBackend, AttentionMask
from multimodal.attention.bitfield import TEXT, MaskSegment, build_bitfield_mask

MODALITIES = ("vision", "audio")


def text(num_tokens: int) -> MaskSegment:
    return MaskSegment(num_tokens)


def item(num_tokens: int, index: int, modality: str = "vision") -> MaskSegment:
    return MaskSegment(num_tokens, modality, index)


MASKS: dict[str, tuple[str, Sequence[Sequence[MaskSegment]]]] = {
    "one token": ("causal", [[text(1)]]),
    "one item of one token": ("embedded", [[item(1, 0)]]),
    "causal": ("causal", [[text(9), item(30, 0), text(8)]]),
    "prefix": ("prefix", [[item(21, 0), item(20, 1, "audio"), text(12)]]),
    "prefix with markers": ("prefix", [[text(2), item(17, 0), text(2), item(9, 1, "audio"), text(19)], [text(5)]]),
    "embedded": ("embedded", [[text(5), item(20, 0), text(11), item(7, 1, "audio"), item(18, 2), text(3)]]),
    "modality": ("modality", [[item(20, 0), text(6), item(13, 1, "audio"), item(18, 2), text(9)], [item(7, 0)]]),
    "packed, empty modalities": (
        "embedded",
        [[text(17)], [item(0, 0), text(1)], [text(3), item(19, 0, "audio")], [], [text(16)]],
    ),
    "whole blocks": ("embedded", [[item(32, 0), text(16)], [text(16)]]),
    "window of 20": ("causal", [[text(60)], [text(7)]]),
    "window of 5": ("embedded", [[text(40), item(19, 0), text(21)]]),
}
"""Name -> mode and samples; lengths that do and do not fill blocks of 16."""


def named_mask(name: str, *, query_blocks: tuple[int, ...] | None = None) -> AttentionMask:
    mode, samples = MASKS[name]
    window = int(name.split()[-1]) if name.startswith("window") else None
    return build_mask(samples, mode=mode, query_blocks=query_blocks, window=window)


def build_mask(
    samples: Sequence[Sequence[MaskSegment]],
    *,
    mode: str,
    block_size: int = 16,
    query_blocks: tuple[int, ...] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionMask:
    tokens = build_bitfield_mask(samples, modalities=MODALITIES, mode=mode, window=window)
    return AttentionMask(tokens, block_size=block_size, query_blocks=query_blocks, softcap=softcap)


@st.composite
def random_masks(draw: st.DrawFn) -> AttentionMask:
    """Masks of every mode, with and without windows and bounded scores, up to about a hundred tokens, in blocks of any size, of
    all queries or those of some blocks.
    """
    mode = draw(st.sampled_from(("causal", "prefix", "embedded", "modality")))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        kinds = draw(st.lists(st.sampled_from((TEXT, *MODALITIES)), min_size=1, max_size=5))
        lengths = draw(st.lists(st.integers(1, 12), min_size=len(kinds), max_size=len(kinds)))
        segments = [
            text(length) if kind == TEXT else item(length, index, kind)
            for index, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
        ]
        samples.append(segments)
    block_size = draw(st.integers(1, 20))
    num_blocks = -(-sum(segment.num_tokens for segments in samples for segment in segments) // block_size)
    some = st.lists(st.integers(0, num_blocks - 1), min_size=1, unique=True).map(sorted).map(tuple)
    rule: dict[str, Any] = {"window": draw(st.none() | st.integers(1, 30)), "softcap": draw(st.none() | st.just(0.7))}
    return build_mask(samples, mode=mode, block_size=block_size, query_blocks=draw(st.none() | some), **rule)


def draw_inputs(mask: AttentionMask, *, heads: int = 2, groups: int = 1, channels: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    """Query, key, value and a gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (mask.num_queries, heads), (mask.num_keys, groups), (mask.num_keys, groups), (mask.num_queries, heads)
    return tuple(torch.randn(*shape, channels, generator=generator, dtype=torch.float64) for shape in shapes)


def output_and_gradients(
    attend: AttentionBackend, inputs: tuple[Tensor, ...], mask: AttentionMask, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    *leaves, output_gradient = (tensor.to(dtype) for tensor in inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    output = attend(*leaves, mask=mask, softmax_scale=None)
    return output.detach(), *torch.autograd.grad(output, leaves, output_gradient)


def largest_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    return max(float((a.double() - b).abs().max()) for a, b in zip(found, expected, strict=True))
