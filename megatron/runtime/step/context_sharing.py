"""How a run spreads microbatches over context parallel ranks."""

from dataclasses import dataclass

from multimodal.attention.bitfield import MaskMode
from multimodal.balance.algorithms.distribute_tokens import TokenDistribution


@dataclass(frozen=True, slots=True)
class ContextSharing:
    """What must be alike on every rank, so that each can work out what any other holds."""

    method: TokenDistribution = TokenDistribution.LPT
    """How blocks of tokens are dealt."""
    block_size: int = 128
    """Tokens of a block, which stay together; a multiple of what an encoder merges into one token."""
    mask_mode: MaskMode = MaskMode.CAUSAL
    """What items do in the LLM's attention: decides how much work a block is."""


BY_WORKLOAD = ContextSharing()
"""Unless asked otherwise."""
