"""A generator's last layer: norm, the values of each patch, and their squared error."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.language_head import HeadOutput
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
