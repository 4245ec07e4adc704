"""The first and the last layer of a generator: the hidden state of each image in the LLM in, the values of its patches out."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from multimodal.model.collectives import RankLink, gather_rows
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.inputs.pixels import normalised_patches
from multimodal.model.layers.layer_kind import HeadOutput, LayerContext, LayerKind, StagePass
from multimodal.model.norm import Norm
from multimodal.model.tensor_parallel_waits import TensorParallelWaits
from multimodal.model.transformer_config import Precision
from multimodal.values.model_graph import ImageInput


class GeneratorProjector(torch.nn.Module):
    """One linear map from the LLM's hidden size, the same on every tensor parallel rank, plus fixed features of the position.

    All patches of an image start from the same hidden state of the LLM; without the position's features they would stay alike
    in every layer, as rotary angles change nothing where all values are the same.
    """

    def __init__(self, *, condition_size: int, hidden_size: int, rotary_base: float, precision: Precision) -> None:
        super().__init__()
        device, dtype = torch.cuda.current_device(), precision.params_dtype
        self.rotary_base, self.feature_dtype = rotary_base, precision.rotary_dtype
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, condition_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def forward(self, conditions: Tensor, condition_rows: Tensor, positions: Tensor) -> Tensor:
        """Spread every image's condition over its patches.

        conditions: [num_images, condition_size], the LLM's hidden states; condition_rows: [num_tokens], which of them each patch
        is made from; positions: [num_tokens, 2], row and column of each patch.

        Returns [num_tokens, 1, hidden_size], the same on every tensor parallel rank.
        """
        projected = deferrable_linear(conditions.to(self.weight.dtype), self.weight, self.bias)
        features = position_features(positions, hidden_size=projected.shape[-1], base=self.rotary_base, dtype=self.feature_dtype)
        return (projected.index_select(0, condition_rows) + features.to(projected.dtype))[:, None]


def position_features(positions: Tensor, *, hidden_size: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines of row and column at geometric frequencies, as diffusion transformers use them (DiT, section 3).

    positions: [num_tokens, 2], integers; base: ratio of the highest to the lowest frequency.
    Shape: [num_tokens, hidden_size] in `dtype`: a quarter each for sines and cosines of rows and columns, zeros for the rest.
    """
    num_frequencies = hidden_size // 4
    exponent = torch.arange(num_frequencies, device=positions.device, dtype=dtype) / max(1, num_frequencies)
    angles = positions.to(dtype)[:, :, None] / base**exponent  # [num_tokens, 2, num_frequencies]
    features = torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(1)
    return torch.nn.functional.pad(features, (0, hidden_size - features.shape[1]))


class GeneratorProjectorKind(LayerKind):
    """Reads what the LLM hands over, and `batch.condition_rows`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> GeneratorProjector:
        """Build it for the LLM's hidden states."""
        return GeneratorProjector(
            condition_size=context.condition_size,
            hidden_size=context.config.hidden_size,
            rotary_base=context.unit.transformer.rotary_base,
            precision=context.options.precision,
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Spread the conditions over all patches."""
        projected: Tensor = layer(given.item_embeddings, given.batch.condition_rows, given.batch.positions)
        return projected

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """One condition for each image."""
        rows = torch.arange(num_sequences, device=torch.cuda.current_device()).repeat_interleave(num_tokens // num_sequences)
        return {"condition_rows": rows}, context.random(num_sequences, context.condition_size).requires_grad_()


class GeneratorHead(torch.nn.Module):
    """One linear map from a hidden state to the pixels of its patch, the same on every tensor parallel rank."""

    waits: TensorParallelWaits | None = None

    def __init__(
        self, *, config: TransformerConfig, groups: ProcessGroupCollection, patch_channels: int, image: ImageInput | None = None
    ) -> None:
        super().__init__()
        device, dtype = torch.cuda.current_device(), config.params_dtype
        self.image = image
        self.is_sequence_sharded = config.sequence_parallel
        self.group = groups.tp
        self.norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.weight = torch.nn.Parameter(torch.empty(patch_channels, config.hidden_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(patch_channels, device=device, dtype=dtype))

    def forward(self, hidden: Tensor, *, patches: Tensor) -> HeadOutput:
        """Predict and compare.

        hidden: [num_tokens (padded and / tp under sequence parallelism), 1, hidden_size]; patches: [num_tokens, patch_channels],
        the image that is to be made, bytes or any float dtype.
        """
        hidden = self.norm(hidden)
        if self.is_sequence_sharded:
            hidden = gather_rows(hidden, RankLink(self.group, True, self.waits))
        predicted = deferrable_linear(hidden[: len(patches), 0], self.weight, self.bias)
        wide = predicted if predicted.dtype == torch.float64 else predicted.float()
        loss_sum = (wide - normalised_patches(patches, self.image)).square().sum()
        return HeadOutput(loss_sum, None, predicted=None if self.training else wide.detach())


class GeneratorHeadKind(LayerKind):
    """Compares with `batch.patches`."""

    gives_loss = True

    def build(self, context: LayerContext, index: int) -> GeneratorHead:
        """Build it for the patches of the unit's images."""
        return GeneratorHead(
            config=context.config, groups=context.groups, patch_channels=context.patch_channels, image=context.unit.image
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> HeadOutput:
        """Predict all patches."""
        output: HeadOutput = layer(hidden, patches=given.batch.patches)
        return output

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches to be made."""
        return {"patches": context.random(num_tokens, context.patch_channels)}, None
