"""A generator's last layer: norm, the values of each patch, and their squared error."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import HeadOutput, LayerContext, LayerKind, StagePass
from multimodal.model.norm import Norm


class GeneratorHead(torch.nn.Module):
    """One linear map from a hidden state to the pixels of its patch, the same on every tensor parallel rank."""

    def __init__(self, *, config: TransformerConfig, groups: ProcessGroupCollection, patch_channels: int) -> None:
        super().__init__()
        device, dtype = torch.cuda.current_device(), config.params_dtype
        self.is_sequence_sharded = config.sequence_parallel
        self.group = groups.tp
        self.norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.weight = torch.nn.Parameter(torch.empty(patch_channels, config.hidden_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(patch_channels, device=device, dtype=dtype))

    def forward(self, hidden: Tensor, *, patches: Tensor) -> HeadOutput:
        """Predict and compare.

        hidden: [num_tokens (padded and / tp under sequence parallelism), 1, hidden_size]; patches: [num_tokens, patch_channels],
        the image that is to be made, any float dtype.
        """
        hidden = self.norm(hidden)
        if self.is_sequence_sharded:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        predicted = deferrable_linear(hidden[: len(patches), 0], self.weight, self.bias)
        wide = predicted if predicted.dtype == torch.float64 else predicted.float()
        loss_sum = (wide - patches).square().sum()
        return HeadOutput(loss_sum, None, predicted=None if self.training else wide.detach())


class GeneratorHeadKind(LayerKind):
    """Compares with `batch.patches`."""

    gives_loss = True

    def build(self, context: LayerContext, index: int) -> GeneratorHead:
        """Build it for the patches of the unit's images."""
        return GeneratorHead(config=context.config, groups=context.groups, patch_channels=context.patch_channels)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> HeadOutput:
        """Predict all patches."""
        output: HeadOutput = layer(hidden, patches=given.batch.patches)
        return output

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches to be made."""
        return {"patches": context.random(num_tokens, context.patch_channels)}, None
