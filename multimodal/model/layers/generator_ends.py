"""The first and the last layer of a generator: from the states of the LLM (and encoders) for an image to its patch values."""

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


class ConditionProjector(torch.nn.Module):
    """One linear map from the LLM's hidden size, the same on every tensor parallel rank."""

    def __init__(self, *, condition_size: int, hidden_size: int, precision: Precision) -> None:
        super().__init__()
        device, dtype = torch.cuda.current_device(), precision.params_dtype
        self.condition_size = condition_size
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, condition_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def project(self, conditions: Tensor) -> Tensor:
        """conditions: [num_conditions, condition_size or more]; channels beyond are for the LLM's first layers (deepstack)."""
        return deferrable_linear(conditions[:, : self.condition_size].to(self.weight.dtype), self.weight, self.bias)


class GeneratorProjector(ConditionProjector):
    """A linear map of the LLM's hidden state, and one of each encoder's outputs, plus fixed features of the position.

    All patches of an image start from the same hidden state of the LLM; without features of the position they would stay equal in
    every layer, since rotary angles change nothing if all values are equal.
    """

    def __init__(
        self, *, condition_size: int, hidden_size: int, rotary_base: float, precision: Precision, sources: tuple[str, ...] = ("",)
    ) -> None:
        """sources: the units that feed this one, in the order of the model's edges; the empty name stands for the LLM."""
        super().__init__(condition_size=condition_size, hidden_size=hidden_size, precision=precision)
        self.rotary_base, self.feature_dtype, self.sources = rotary_base, precision.rotary_dtype, sources
        sizes: dict[str, Any] = {"condition_size": condition_size, "hidden_size": hidden_size, "precision": precision}
        self.encoders = torch.nn.ModuleDict({f"{name}_tokens": ConditionProjector(**sizes) for name in sources if name})

    def forward(
        self, conditions: Tensor, condition_rows: Tensor, positions: Tensor, condition_sources: Tensor | None = None
    ) -> Tensor:
        """Spread every image's condition over its patches, and put the encoders' tokens before them.

        conditions: [num_conditions, condition_size], the LLM's hidden states and encoders' tokens; condition_rows: [num_tokens],
        the condition that each token is made from; positions: [num_tokens, 2], row and column of each patch; condition_sources:
        [num_conditions], the index in `sources` of each; None: all come from the LLM.

        Returns [num_tokens, 1, hidden_size], the same on every tensor parallel rank.
        """
        projected = self.project(conditions) if condition_sources is None else self._project_all(conditions, condition_sources)
        features = position_features(positions, hidden_size=projected.shape[-1], base=self.rotary_base, dtype=self.feature_dtype)
        return (projected.index_select(0, condition_rows) + features.to(projected.dtype))[:, None]

    def _project_all(self, conditions: Tensor, sources: Tensor) -> Tensor:
        """Apply every map to all rows and select its own: finding those first would make the host wait for the device."""
        projected = self.project(conditions)
        for number, name in enumerate(self.sources):
            if name:
                projector: ConditionProjector = self.encoders[f"{name}_tokens"]  # type: ignore[assignment]
                projected = torch.where((sources == number)[:, None], projector.project(conditions), projected)
        return projected


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
    """Reads what the LLM and encoders hand over, `batch.condition_rows` and `batch.item_sources`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> GeneratorProjector:
        """Build it for the LLM's hidden states, and the outputs of encoders that feed the unit."""
        graph, llm = context.graph, context.graph.backbone.name
        return GeneratorProjector(
            sources=tuple("" if name == llm else name for name in graph.upstream(context.unit.name)),
            condition_size=context.condition_size,
            hidden_size=context.config.hidden_size,
            rotary_base=context.unit.transformer.rotary_base,
            precision=context.options.precision,
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Spread the conditions over all patches."""
        batch = given.batch
        projected: Tensor = layer(given.item_embeddings, batch.condition_rows, batch.positions, batch.item_sources)
        return projected

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return one condition for each image."""
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

    def forward(self, hidden: Tensor, *, patches: Tensor, rows: Tensor | None = None) -> HeadOutput:
        """Predict the patches and compute the loss.

        hidden: [num_tokens (padded and / tp under sequence parallelism), 1, hidden_size]; patches: [num_patches, patch_channels],
        the target image, bytes or any float dtype; rows: [num_patches], the tokens of the patches; None: all tokens.
        """
        hidden = self.norm(hidden)
        if self.is_sequence_sharded:
            hidden = gather_rows(hidden, RankLink(self.group, True, self.waits))
        hidden = hidden[: len(patches), 0] if rows is None else hidden[:, 0].index_select(0, rows)
        predicted = deferrable_linear(hidden, self.weight, self.bias)
        wide = predicted if predicted.dtype == torch.float64 else predicted.float()
        loss_sum = (wide - normalised_patches(patches, self.image)).square().sum()
        return HeadOutput(loss_sum, None, predicted=None if self.training else wide.detach())


class GeneratorHeadKind(LayerKind):
    """Compares with `batch.patches`, at `batch.target_rows`."""

    gives_loss = True

    def build(self, context: LayerContext, index: int) -> GeneratorHead:
        """Build it for the patches of the unit's images."""
        return GeneratorHead(
            config=context.config, groups=context.groups, patch_channels=context.patch_channels, image=context.unit.image
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> HeadOutput:
        """Predict all patches."""
        output: HeadOutput = layer(hidden, patches=given.batch.patches, rows=given.batch.target_rows)
        return output

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return target patches."""
        return {"patches": context.random(num_tokens, context.patch_channels)}, None
