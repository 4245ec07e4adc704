"""Which tokens of a packed microbatch belong together, as megatron-core's layers hand it down to the attention core."""

from dataclasses import dataclass, field

from megatron.core.packed_seq_params import PackedSeqParams

from multimodal.attention.attention_mask import AttentionMask
from multimodal.attention.own_share import OwnShare
from multimodal.attention.packed_mask import ItemSpan, MaskRule, build_packed_mask


@dataclass
class PackedLengths(PackedSeqParams):
    """Lengths of the sequences packed one after another along the token dimension, and where items are in them.

    `qkv_format` stays "sbhd": the rotary frequencies are given per token, so megatron-core's layers treat the packed tokens as
    one sequence of batch 1 and only the attention core needs to know where one ends.
    """

    qkv_format: str = "sbhd"
    lengths: tuple[int, ...] = ()
    items: tuple[ItemSpan, ...] = ()
    """Inside the sequences, in any order; an LLM's only."""
    share: OwnShare | None = None
    """Where the tokens are spread over ranks: those of this rank. `lengths` and `items` are of all."""
    _masks: dict[MaskRule, AttentionMask] = field(default_factory=dict, repr=False, compare=False)

    def mask(self, rule: MaskRule) -> AttentionMask:
        """The mask of these tokens; built once for all layers that share this object."""
        if rule not in self._masks:
            tokens = build_packed_mask(self.lengths, items=self.items, rule=rule)
            if self.share is None:
                self._masks[rule] = AttentionMask(tokens)
            else:
                self._masks[rule] = AttentionMask(tokens, self.share.shares.block_size, self.share.blocks)
        return self._masks[rule]
