"""The mask of packed sequences, from their lengths and where items are in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multimodal.attention.bitfield import BitfieldMask, MaskMode, MaskSegment, build_bitfield_mask

_ITEM = "item"


class ItemSpan(NamedTuple):
    """Consecutive tokens of a packed microbatch that an encoder made from one item."""

    start: int
    num_tokens: int
    modality: str
    """The encoder's name."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """How a unit's tokens attend to each other, whatever the batch."""

    is_causal: bool
    """An LLM; else an encoder, whose every sequence is one item and attends to all of itself."""
    mode: MaskMode = MaskMode.CAUSAL
    """What items do in an LLM."""
    modalities: tuple[str, ...] = ()
    """Names of the encoders, in the order of the model."""


def build_packed_mask(lengths: Sequence[int], *, items: Sequence[ItemSpan], rule: MaskRule) -> BitfieldMask:
    """Build the bitfield mask of packed sequences; lengths are known on every rank, so no mask is ever sent."""
    if not rule.is_causal:
        each_alone = [[MaskSegment(length, _ITEM, 0)] for length in lengths]
        return build_bitfield_mask(each_alone, modalities=(_ITEM,), mode=MaskMode.EMBEDDED)
    return build_bitfield_mask(_segments(lengths, items), modalities=rule.modalities, mode=rule.mode)


def _segments(lengths: Sequence[int], items: Sequence[ItemSpan]) -> list[list[MaskSegment]]:
    """Cut every sequence into pieces of text and items, in the order of its tokens."""
    remaining = sorted(items, reverse=True)
    samples: list[list[MaskSegment]] = []
    position = 0
    for length in lengths:
        segments: list[MaskSegment] = []
        end, num_items = position + length, 0
        while remaining and remaining[-1].start < end:
            item = remaining.pop()
            segments += [MaskSegment(item.start - position), MaskSegment(item.num_tokens, item.modality, num_items)]
            position, num_items = item.start + item.num_tokens, num_items + 1
        samples.append([*segments, MaskSegment(end - position)])
        position = end
    return samples
