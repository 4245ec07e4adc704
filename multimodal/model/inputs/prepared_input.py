"""Prepares a microbatch's input where its data is loaded: everything that a unit's layers derive from its lengths."""

from dataclasses import replace

from multimodal.model.layers.layer_kind import InputContext
from multimodal.model.layers.projectors.mlp import drops_tokens
from multimodal.model.layers.registry import LAYER_KINDS
from multimodal.model.stage_input import PackedInput, find_row_ends, pack_lengths


def prepare_input(batch: PackedInput, context: InputContext) -> PackedInput:
    """Return a microbatch's input, on the CPU, with everything that layers derive from its lengths: masks, work lists, rows."""
    unit = context.unit
    if drops_tokens(unit):
        batch = batch.with_kept_rows()
    if unit.image is not None and unit.image.has_row_ends:
        batch = replace(batch, kept_rows=find_row_ends(batch.positions))
    packed = pack_lengths(batch, context.num_padded_rows(batch.num_tokens))
    for name in dict.fromkeys(unit.layers):
        if name in LAYER_KINDS:
            LAYER_KINDS[name].prepare(packed, context)
    return replace(batch, packed=packed)
