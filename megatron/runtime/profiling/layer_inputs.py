"""Synthetic inputs of one layer at a given size, for timing it and for counting what it keeps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import LayerKind, Role


class LayerInput(NamedTuple):
    """What a stage of one layer is called with."""

    hidden: Tensor | None
    batch: PackedInput
    item_embeddings: Tensor | None = None

    @property
    def differentiable(self) -> Tensor | None:
        """What an input gradient is taken of; None where only weights have gradients."""
        return self.hidden if self.hidden is not None else self.item_embeddings


def synthetic_input(stage: UnitStage, *, num_tokens: int, num_sequences: int = 1) -> LayerInput:
    """Return random inputs for a stage of one layer.

    num_tokens: counted tokens, as `counted_tokens` of multimodal/cost counts them: those that leave an encoder's projector, the
    targets of the LLM's head, else the tokens of the unit; a multiple of num_sequences, which have equal lengths.
    """
    unit, (index,) = stage.unit, stage.layer_range
    kind = unit.layers[index]
    device, dtype = torch.cuda.current_device(), stage.options.precision.params_dtype
    if kind is LayerKind.PROJECTOR and unit.role is Role.ENCODER:
        num_tokens *= unit.merge_factor

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    length = num_tokens // num_sequences
    positions = torch.arange(length, device=device).repeat(num_sequences)
    if unit.role is not Role.BACKBONE:
        positions = torch.stack((positions // 16, positions % 16), dim=1)
    parts: dict[str, Any] = {}
    hidden = item_embeddings = None
    if unit.image is not None and (kind is LayerKind.PATCH_EMBEDDING or kind is LayerKind.HEAD):
        parts["patches"] = random(num_tokens, unit.image.in_channels * unit.image.patch_size**2)
    if kind is LayerKind.TOKEN_EMBEDDING:
        parts["token_ids"] = torch.randint(stage.vocab_size, (num_tokens,), device=device)
    if kind is LayerKind.HEAD and unit.role is Role.BACKBONE:
        parts["target_rows"] = torch.arange(num_tokens, device=device)
        parts["targets"] = torch.randint(stage.vocab_size, (num_tokens,), device=device)
    if kind is LayerKind.PROJECTOR and unit.role is Role.GENERATOR:
        parts["condition_rows"] = torch.arange(num_sequences, device=device).repeat_interleave(length)
        item_embeddings = random(num_sequences, stage.condition_size).requires_grad_()
    elif kind not in (LayerKind.PATCH_EMBEDDING, LayerKind.TOKEN_EMBEDDING):
        hidden = random(stage.num_rows(num_tokens), 1, unit.transformer.hidden_size).requires_grad_()
    return LayerInput(hidden, PackedInput((length,) * num_sequences, positions, **parts), item_embeddings)
