"""Synthetic inputs of one layer at a given size, for timing it and for counting what it keeps."""

from typing import NamedTuple

import torch
from torch import Tensor

from multimodal.model.layers.registry import kind_of
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage


class LayerInput(NamedTuple):
    """Arguments of a stage of one layer."""

    hidden: Tensor | None
    batch: PackedInput
    item_embeddings: Tensor | None = None

    @property
    def differentiable(self) -> Tensor | None:
        """The tensor that an input gradient is taken of; None where only weights have gradients."""
        return self.hidden if self.hidden is not None else self.item_embeddings


def synthetic_input(stage: UnitStage, *, num_tokens: int, num_sequences: int = 1) -> LayerInput:
    """Return random inputs for a stage of one layer.

    num_tokens: counted tokens, as `counted_tokens` of multimodal/cost counts them: those that leave an encoder's projector, the
    targets of the LLM's head, else the tokens of the unit; a multiple of num_sequences, which have equal lengths.
    """
    unit, (index,) = stage.unit, stage.layer_range
    kind = kind_of(unit, index)
    num_tokens *= kind.num_tokens_per_output(unit)
    length = num_tokens // num_sequences
    positions = torch.arange(length, device=torch.cuda.current_device()).repeat(num_sequences)
    if not unit.is_causal:
        positions = torch.stack((positions // 16, positions % 16), dim=1)
    parts, item_embeddings = kind.random_input(stage.context, num_tokens=num_tokens, num_sequences=num_sequences)
    hidden = None
    if kind.takes_hidden:
        hidden = stage.context.random(stage.num_rows(num_tokens), 1, unit.transformer.hidden_size).requires_grad_()
    return LayerInput(hidden, PackedInput((length,) * num_sequences, positions, **parts), item_embeddings)
