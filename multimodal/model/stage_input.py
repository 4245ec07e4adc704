"""What a stage reads beside the activations of the stage before it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from multimodal.attention.own_share import OwnShare
from multimodal.attention.packed_mask import ItemSpan


@dataclass(frozen=True)
class PackedInput:
    """One packed microbatch as a unit's stages see it; all tensors on the stage's device.

    With context parallelism, `lengths` and `items` are of the whole microbatch, from which the mask is derived, and everything
    else is of the tokens in `share` (see `share_input`).
    """

    lengths: tuple[int, ...]
    """Tokens of each packed sequence."""
    positions: Tensor
    """[num_tokens] (text) or [num_tokens, 2] (rows and columns of patches)."""
    patches: Tensor | None = None
    """[num_tokens, patch_channels]: what an encoder's first stage takes, or what a generator's last stage is to make."""
    token_ids: Tensor | None = None
    """[num_tokens]; the LLM only."""
    items: tuple[ItemSpan, ...] = ()
    """Where the encoders' items are among the tokens; the LLM only, on every stage, for the attention mask."""
    item_rows: Tensor | None = None
    """[num_item_tokens]: rows that encoder outputs fill, in the order they are given; the LLM's first stage."""
    target_rows: Tensor | None = None
    """[num_targets]: rows that count in the loss; the LLM's last stage."""
    targets: Tensor | None = None
    """[num_targets]."""
    generator_rows: Tensor | None = None
    """[num_generated_items]: rows whose hidden states generators are given; the LLM's last stage, where there are any."""
    condition_rows: Tensor | None = None
    """[num_tokens]: which of the rows that the LLM hands over each patch is made from; a generator's first stage."""
    share: OwnShare | None = None
    """Which tokens this rank holds; None for all."""

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds."""
        return sum(self.lengths) if self.share is None else self.share.num_tokens


def padded_num_tokens(num_tokens: int, *, multiple: int) -> int:
    """Tokens after padding to a multiple (sequence parallelism shares the tokens of a microbatch evenly over tp ranks)."""
    return -(-num_tokens // multiple) * multiple


def pad_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Append zero rows up to `num_rows`."""
    missing = num_rows - tensor.shape[0]
    return tensor if missing == 0 else torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
