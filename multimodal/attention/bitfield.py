"""The attention mask of multimodal sequences as one int64 per token (Cornstarch, thesis 3.4.2; paper 4.3.1).

A token's bits say which tokens it attends to: bit 0 text, bit m the m-th encoder's tokens, bit 62 "other items, too", bit 63
(the sign) causal. Text tokens have the causal bit and the bits of everything they may attend to; an item's tokens have the one
bit of their own modality. Beside the bits, each token knows its sample (several are packed into one sequence) and its item. Query
q sees key k if

    sample[q] == sample[k]  and  bits[q] & kind[k]  and
    (q - window < k <= q  if q is causal  else  item[q] == item[k]  or  bits[q] & 2**62)

where `kind[k]` is bit 0 if k is causal, else k's one modality bit; `window` is endless if the mask has none. So text attends to
everything before it in its sample, text and items alike; an item's tokens attend in both directions to their own item only. Every
token sees itself. A prefix is one item: every token in it has the bit of the first modality and the same item id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from multimodal.values.errors import DataError, ModelError

TEXT = "text"
"""The modality of segments that are no items."""
TEXT_BIT = 1
MODALITY_BITS = (1 << 62) - 1
"""Bits 0-61: text and the encoders."""
ACROSS_ITEMS_BIT = 1 << 62
"""Set on an item's tokens that also attend to the other items of their modality in their sample."""
CAUSAL_BIT = -(1 << 63)
"""The sign bit of an int64: a token is causal exactly if its bits are negative."""
MAX_ENCODERS = 61
NO_ITEM = -1
"""The item id of text."""


class MaskMode(StrEnum):
    """The role of items in attention; each mode takes any number of samples, which never attend to each other."""

    CAUSAL = "causal"
    """Items are treated as text: everything attends causally."""
    PREFIX = "prefix"
    """All tokens up to a sample's last item attend to each other in both directions, as in PaliGemma; text behind it causally.
    Nothing in the prefix may be a target: data sets ensure that it has only markers beside the items."""
    EMBEDDED = "embedded"
    """Items keep their positions in the document, and attend in both directions within themselves."""
    MODALITY = "modality"
    """Like EMBEDDED, but an item also attends to all items of its encoder in its sample: the published mask, without item ids."""


@dataclass(frozen=True, slots=True)
class MaskSegment:
    """Consecutive tokens of one sample that the mask treats alike: text, or an item (or a part of one)."""

    num_tokens: int
    modality: str = TEXT
    """TEXT or the name of the encoder that made the tokens."""
    item_index: int = NO_ITEM
    """Index of the item in its sample; parts of one item share it. At least 0, or NO_ITEM for text."""


@dataclass(frozen=True, slots=True, eq=False)
class BitfieldMask:
    """The mask of one packed sequence, in 16 bytes per token. The module's docstring has the rule."""

    bits: NDArray[np.int64]
    """[num_tokens]."""
    sample_ids: NDArray[np.int32]
    """[num_tokens], never descending: the tokens of a sample are consecutive."""
    item_ids: NDArray[np.int32]
    """[num_tokens]: index of the item in its sample, NO_ITEM for text."""
    window: int | None = None
    """Causal tokens attend to so many tokens, themselves and those before them; None: to all of them. At least 1."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return len(self.bits)

    @property
    def key_bits(self) -> NDArray[np.int64]:
        """[num_tokens], int64: the kind of each token as a key, TEXT_BIT or its modality's bit."""
        return np.where(self.bits < 0, np.int64(TEXT_BIT), self.bits & MODALITY_BITS)

    def visible(self, queries: NDArray[np.integer], keys: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return [num_queries, num_keys], True where a query attends to a key; both are positions in any order."""
        bits = self.bits[queries, None]
        seen = (self.sample_ids[queries, None] == self.sample_ids[keys]) & ((bits & self.key_bits[keys]) != 0)
        same_item = (self.item_ids[queries, None] == self.item_ids[keys]) | ((bits & ACROSS_ITEMS_BIT) != 0)
        distance = np.asarray(queries)[:, None] - keys
        is_near = (distance >= 0) & (distance < (self.window or self.num_tokens))
        return seen & np.where(bits < 0, is_near, same_item)

    def to_dense(self) -> NDArray[np.bool_]:
        """Return [num_tokens, num_tokens], True where the query (row) attends to the key (column). For tests and small masks."""
        positions = np.arange(self.num_tokens)
        return self.visible(positions, positions)


def build_bitfield_mask(
    samples: Sequence[Sequence[MaskSegment]],
    *,
    modalities: Sequence[str],
    mode: MaskMode | str = MaskMode.EMBEDDED,
    window: int | None = None,
) -> BitfieldMask:
    """Build the mask of samples that are packed one after another. O(number of tokens).

    samples: per sample its segments in the order of the sequence; segments and samples may be empty. modalities: names of the
    encoders, at most MAX_ENCODERS, in the same order on all ranks: the m-th (from 1) gets bit m. mode: see MaskMode; window: see
    BitfieldMask. Raises ModelError for too many modalities, DataError where items overlap.
    """
    mode = MaskMode(mode)
    if len(modalities) > MAX_ENCODERS:
        raise ModelError(
            f"{len(modalities)} modalities besides text do not fit an attention mask of 64 bits; expected at most "
            f"{MAX_ENCODERS}; let encoders whose tokens attend alike share a modality"
        )
    if len({TEXT, *modalities}) != len(modalities) + 1:
        raise ModelError(f"the modalities {', '.join(modalities)} are not distinct or contain '{TEXT}'; give each encoder a name")
    bit_of_modality = {TEXT: TEXT_BIT} | {name: 1 << index for index, name in enumerate(modalities, start=1)}
    text_bits = CAUSAL_BIT | sum(bit_of_modality.values())
    item_control = ACROSS_ITEMS_BIT if mode is MaskMode.MODALITY else 0
    bits, sample_ids, item_ids, num_tokens = [], [], [], []
    for sample_id, segments in enumerate(samples):
        if any(segment.num_tokens < 0 for segment in segments):
            raise DataError(f"sample {sample_id}: its items overlap; correct where they start")
        for segment in _join_prefix(segments, modalities[0]) if mode is MaskMode.PREFIX and modalities else segments:
            is_text = segment.modality == TEXT or mode is MaskMode.CAUSAL
            bits.append(text_bits if is_text else bit_of_modality[segment.modality] | item_control)
            sample_ids.append(sample_id)
            item_ids.append(NO_ITEM if is_text else segment.item_index)
            num_tokens.append(segment.num_tokens)
    samples_of, items_of = (np.repeat(np.array(ids, dtype=np.int32), num_tokens) for ids in (sample_ids, item_ids))
    return BitfieldMask(np.repeat(np.array(bits, dtype=np.int64), num_tokens), samples_of, items_of, window)


def _join_prefix(segments: Sequence[MaskSegment], modality: str) -> Sequence[MaskSegment]:
    """Return one item of all tokens up to the end of the last item, and the text behind it."""
    ends = [index for index, segment in enumerate(segments, start=1) if segment.modality != TEXT and segment.num_tokens]
    if not ends:
        return segments
    num_tokens = sum(segment.num_tokens for segment in segments[: ends[-1]])
    return [MaskSegment(num_tokens, modality, 0), *segments[ends[-1] :]]
