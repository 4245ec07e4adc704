"""The sequences of a packed microbatch and their mask, in the form that megatron-core's layers pass to core attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from multimodal.attention.attention_backend import AttentionMask
from multimodal.attention.bitfield import BitfieldMask, MaskMode, MaskSegment, build_bitfield_mask
from multimodal.attention.device_values import DerivedValues, HoldsTensors
from multimodal.cost.token_shares import BlockShares, RankShare, WholeItemShares


class Windows(NamedTuple):
    """An order of tokens in which every window is a sequence of its own."""

    order: Tensor
    """[num_tokens]: the tokens, window by window."""
    places: Tensor
    """[num_tokens]: the place of every token in that order."""
    lengths: tuple[int, ...]
    """Tokens of each window."""


_ITEM = "item"


class ItemSpan(NamedTuple):
    """Consecutive tokens of a packed microbatch that an encoder made from one item."""

    start: int
    num_tokens: int
    modality: str
    """The encoder's name."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The rule by which a unit's tokens attend to each other, independent of the batch."""

    is_causal: bool
    """True for an LLM; False for an encoder, each of whose sequences is one item and attends to all of itself."""
    mode: MaskMode = MaskMode.CAUSAL
    """The role of items in an LLM's attention."""
    modalities: tuple[str, ...] = ()
    """Names of the encoders, in the order of the model."""
    window: int | None = None
    """The LLM's tokens attend to so many tokens, themselves and those before them; None: to all of them."""
    softcap: float | None = None
    """Scores of the LLM's tokens are bounded by it, as softcap x tanh(score / softcap); None: they are not."""


@dataclass
class PackedLengths(HoldsTensors, PackedSeqParams):
    """Lengths of the sequences packed one after another along the token dimension, and the items in them.

    `qkv_format` stays "sbhd": the rotary frequencies are given per token, so megatron-core's layers treat the packed tokens as
    one sequence of batch 1 and only the attention core needs to know where one ends.
    """

    qkv_format: str = "sbhd"
    lengths: tuple[int, ...] = ()
    items: tuple[ItemSpan, ...] = ()
    """Items inside the sequences, in any order; for an LLM only."""
    share: RankShare | None = None
    """This rank's tokens if ranks share sequences; `lengths` and `items` are then of all ranks."""
    windows: Windows | None = None
    """The windows of this rank's tokens, if the unit has layers whose tokens attend only inside windows."""
    derived: DerivedValues = field(default_factory=DerivedValues, repr=False, compare=False)
    """Values that layers and their attention derive from these."""

    def mask(self, rule: MaskRule) -> AttentionMask:
        """Return the mask of these tokens; built once for all layers that share this object."""
        return self.derived.keep(rule, lambda: self._attention_mask(rule))

    def _attention_mask(self, rule: MaskRule) -> AttentionMask:
        tokens = build_packed_mask(self.lengths, items=self.items, rule=rule)
        if self.share is None:
            return AttentionMask(tokens, softcap=rule.softcap)
        shares = self.share.shares
        assert isinstance(shares, BlockShares)
        return AttentionMask(tokens, shares.block_size, shares.blocks_of(self.share.rank), rule.softcap)

    def starts(self, device: torch.device) -> Tensor:
        """[num_sequences + 1], int32: the start of each sequence, and the total, as kernels for variable lengths expect them."""
        return self.derived.on(device, "starts", lambda: torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0).int())

    def sequence_numbers(self, device: torch.device) -> Tensor:
        """[num_tokens], int64: the sequence of each of this rank's tokens; padding counts as a sequence of its own."""
        return self.derived.on(device, "sequence numbers", self._number_sequences)

    def _number_sequences(self) -> Tensor:
        ends = np.cumsum(self.lengths, dtype=np.int64)
        places = np.arange(sum(self.lengths)) if self.share is None else self.share.positions
        return torch.from_numpy(np.searchsorted(ends, places, side="right"))

    def gathered_rows(self, device: torch.device) -> Tensor:
        """[num_tokens]: `BlockShares.gathered_rows` of the shares into which ranks divide these tokens."""
        shares = self.share.shares if self.share is not None else None
        assert isinstance(shares, BlockShares)
        return self.derived.on(device, "gathered rows", lambda: torch.from_numpy(shares.gathered_rows))

    @property
    def window_sequences(self) -> "PackedLengths":
        """The windows as sequences, in their order."""
        assert self.windows is not None, "a unit with windows says where they are"
        lengths = self.windows.lengths
        return self.derived.keep("windows", lambda: PackedLengths(lengths=lengths))

    @property
    def item_parts(self) -> "ItemParts | None":
        """The two parts of this rank's tokens; None if blocks of tokens are dealt, or one rank has everything."""
        return self.derived.keep("parts", self._divide)

    def _divide(self) -> "ItemParts | None":
        if self.share is None or not isinstance(self.share.shares, WholeItemShares):
            return None
        shares, rank = self.share.shares, self.share.rank
        is_cut = np.repeat(shares.owners < 0, shares.lengths)[self.share.positions]
        whole, cut = np.flatnonzero(~is_cut), np.flatnonzero(is_cut)
        return ItemParts(
            PackedLengths(lengths=shares.lengths_of(rank)),
            torch.from_numpy(whole),
            PackedLengths(lengths=shares.cut_lengths, share=RankShare(shares.cut, rank)),
            torch.from_numpy(cut),
            torch.from_numpy(np.argsort(np.concatenate((cut, whole)))),
        )


class ItemParts(NamedTuple):
    """A rank's tokens of whole items, which attend without other ranks, and its tokens of cut items."""

    whole: PackedLengths
    whole_rows: Tensor
    """Rows of `whole` among the rank's tokens, ascending, int64."""
    cut: PackedLengths
    """The cut items of all ranks, and the rank's share of their tokens; no lengths if nothing is cut."""
    cut_rows: Tensor
    places: Tensor
    """The places of the rank's tokens in the concatenation of its tokens of `cut` and those of `whole`."""

    def on(self, device: torch.device) -> "ItemParts":
        """Return the same parts with rows on a device."""
        rows = {name: getattr(self, name).to(device) for name in ("whole_rows", "cut_rows", "places")}
        return self._replace(**rows)


def build_packed_mask(lengths: Sequence[int], *, items: Sequence[ItemSpan], rule: MaskRule) -> BitfieldMask:
    """Build the bitfield mask of packed sequences; lengths are known on every rank, so no mask is ever sent."""
    if not rule.is_causal:
        sequences = [[MaskSegment(length, _ITEM, 0)] for length in lengths]
        return build_bitfield_mask(sequences, modalities=(_ITEM,), mode=MaskMode.EMBEDDED)
    return build_bitfield_mask(_segments(lengths, items), modalities=rule.modalities, mode=rule.mode, window=rule.window)


def _segments(lengths: Sequence[int], items: Sequence[ItemSpan]) -> list[list[MaskSegment]]:
    """Cut every sequence into segments of text and items, in the order of its tokens."""
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


def order_by_window(positions: Tensor, lengths: Sequence[int], *, size: int) -> Windows:
    """Order tokens window by window: size x size patches, or chunks of clips.

    positions: [num_tokens, 2], rows and columns, or [num_tokens, 1], on the CPU; lengths: tokens of each item, one after another.
    """
    image = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    window = torch.cat((image[:, None], positions // size), dim=1)
    _, group, counts = torch.unique(window, dim=0, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    return Windows(order, torch.argsort(order), tuple(counts.tolist()))
