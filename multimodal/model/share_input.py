"""One rank's part of a packed microbatch whose tokens are spread over ranks."""

from dataclasses import replace
from typing import Any

import torch

from multimodal.attention.own_share import OwnShare
from multimodal.model.stage_input import PackedInput


def share_input(batch: PackedInput, share: OwnShare) -> PackedInput:
    """Keep what belongs to the tokens in `share`, in the order of the sequence; positions stay those in the sequence.

    batch: of the whole microbatch, on the CPU. Of encoder outputs, and of what the LLM hands to a generator, a rank is given only
    what its tokens take (`token_placement.py`), in the order of the whole; so rows that count these are renumbered, too. Lists of
    rows that have nothing on this rank become empty, not None: all ranks run the same layers.
    """
    at = torch.from_numpy(share.positions)
    parts: dict[str, Any] = {"positions": batch.positions[at], "share": share}
    if batch.patches is not None:
        parts["patches"] = batch.patches[at]
    if batch.token_ids is not None:
        parts["token_ids"] = batch.token_ids[at]
    if batch.item_rows is not None:
        parts["item_rows"] = share.local_rows(batch.item_rows)[1]
    if batch.generator_rows is not None:
        parts["generator_rows"] = share.local_rows(batch.generator_rows)[1]
    if batch.target_rows is not None and batch.targets is not None:
        is_held, parts["target_rows"] = share.local_rows(batch.target_rows)
        parts["targets"] = batch.targets[is_held]
    if batch.condition_rows is not None:
        parts["condition_rows"] = torch.unique(batch.condition_rows[at], return_inverse=True)[1]
    return replace(batch, **parts)
