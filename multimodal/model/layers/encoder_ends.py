"""The ends of encoders: flat pixel patches to hidden states, and hidden states to the rows that the LLM takes."""

import dataclasses
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from multimodal.model.collectives import RankLink, gather_rows
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.inputs.pixels import normalised_patches
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.layers.opaque import find_callback
from multimodal.model.layers.transformer import MLP_SUBMODULES
from multimodal.model.norm import Norm
from multimodal.model.tensor_parallel_waits import TensorParallelWaits
from multimodal.model.transformer_config import Precision
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import AudioInput, ImageInput, Unit


class PatchEmbedding(torch.nn.Module):
    """One linear map per patch, the same on every tensor parallel rank."""

    def __init__(
        self, *, patch_channels: int, hidden_size: int, precision: Precision, has_bias: bool, image: ImageInput | None = None
    ) -> None:
        super().__init__()
        self.image = image
        device, dtype = torch.cuda.current_device(), precision.params_dtype
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, patch_channels, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if has_bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """patches: [num_patches, patch_channels], bytes or any float dtype; returns [num_patches, 1, hidden_size]."""
        values = normalised_patches(patches, self.image).to(self.weight.dtype)
        return deferrable_linear(values, self.weight, self.bias)[:, None]


class PatchEmbeddingKind(LayerKind):
    """Reads `batch.patches`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> PatchEmbedding:
        """Build it for the patches of the unit's images."""
        return PatchEmbedding(
            patch_channels=context.patch_channels,
            hidden_size=context.config.hidden_size,
            precision=context.options.precision,
            has_bias=context.unit.image is None or context.unit.image.has_patch_bias,
            image=context.unit.image,
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Embed all patches."""
        embedded: Tensor = layer(given.batch.patches)
        return embedded

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches."""
        return {"patches": context.random(num_tokens, context.patch_channels)}, None


class LearnedPatchEmbedding(torch.nn.Module):
    """Patches and class tokens of images of one size, with learned positions and perhaps a norm; alike on all ranks."""

    def __init__(self, *, image: ImageInput, patch_channels: int, config: TransformerConfig) -> None:
        super().__init__()
        device, dtype, hidden_size = torch.cuda.current_device(), config.params_dtype, config.hidden_size

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.image, self.grid_size = image, image.grid_size
        self.weight = parameter(hidden_size, patch_channels)
        self.bias = parameter(hidden_size) if image.has_patch_bias else None
        self.class_token = parameter(hidden_size) if image.class_token is not None else None
        self.positions = parameter(image.num_positions, hidden_size)
        whole = dataclasses.replace(config, sequence_parallel=False)
        self.norm = Norm(whole, hidden_size, eps=config.layernorm_epsilon) if image.has_pre_norm else None

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches: [num_tokens, patch_channels], bytes or any float dtype, anything for class tokens; places: [num_tokens, 2].

        Returns [num_tokens, 1, hidden_size].
        """
        values = normalised_patches(patches, self.image).to(self.weight.dtype)
        hidden = deferrable_linear(values, self.weight, self.bias)
        index = places[:, 0] * self.grid_size + places[:, 1]
        if self.class_token is not None:
            is_class = places[:, 0] < 0
            hidden = torch.where(is_class[:, None], self.class_token, hidden)
            index = torch.where(is_class, 0, index + 1)
        hidden = hidden + torch.nn.functional.embedding(index, self.positions)
        return (hidden if self.norm is None else self.norm(hidden))[:, None]


class LearnedPatchEmbeddingKind(LayerKind):
    """Reads `batch.patches` and `batch.positions`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> LearnedPatchEmbedding:
        """Build it for the one size of the unit's images."""
        assert context.unit.image is not None
        return LearnedPatchEmbedding(image=context.unit.image, patch_channels=context.patch_channels, config=context.config)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Embed all patches."""
        embedded: Tensor = layer(given.batch.patches, given.batch.positions)
        return embedded

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches, all at the first place of their image."""
        places = torch.zeros(num_tokens, 2, dtype=torch.int64, device=torch.cuda.current_device())
        return {"patches": context.random(num_tokens, context.patch_channels), "positions": places}, None


class MergedTokens(torch.nn.Module):
    """Norm and merging of neighbouring tokens, side by side or averaged; the norm may come behind the merging, or be left out."""

    waits: TensorParallelWaits | None = None

    def __init__(self, unit: Unit, *, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.merge_factor, self.merged_size = unit.merge_factor, unit.merged_size
        self.callback = find_callback(unit.module.after_projector if unit.module is not None else None)
        self.is_sequence_sharded = config.sequence_parallel
        self.group = groups.tp
        self.drops_tokens = drops_tokens(unit)
        self.normalises_merged = unit.projector_norm == "merged"
        size = unit.merged_size if self.normalises_merged else config.hidden_size
        whole = dataclasses.replace(config, sequence_parallel=False)
        epsilon = unit.projector_norm_epsilon or config.layernorm_epsilon
        self.norm = None if unit.projector_norm == "none" else Norm(whole, size, eps=epsilon)

    def merge(self, hidden: Tensor, places: Tensor, kept_rows: Tensor | None) -> Tensor:
        """hidden: [num_tokens (padded and / tp under sequence parallelism), 1, hidden_size]; places: [num_tokens, axes].

        kept_rows: tokens that are not dropped; None: to be found here.

        Returns [num_merged_tokens, 1, merged_size], the same on every tensor parallel rank.
        """
        if self.is_sequence_sharded:
            hidden = gather_rows(hidden, RankLink(self.group, True, self.waits))
        hidden = hidden[: len(places)]
        if self.drops_tokens:
            hidden = hidden[places[:, -1] >= 0] if kept_rows is None else hidden.index_select(0, kept_rows)
        if self.normalises_merged:
            hidden = self._join(hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.normalises_merged else self._join(hidden)

    def _join(self, hidden: Tensor) -> Tensor:
        joined = hidden.reshape(-1, 1, self.merge_factor * hidden.shape[-1])
        return joined if joined.shape[-1] == self.merged_size else joined.unflatten(-1, (self.merge_factor, -1)).mean(dim=-2)


class Projector(MergedTokens):
    """Two products with a GELU between them (Qwen2-VL's patch merger)."""

    def __init__(self, unit: Unit, *, config: TransformerConfig, groups: ProcessGroupCollection, output_size: int) -> None:
        super().__init__(unit, config=config, groups=groups)
        inner_size = unit.projector_hidden_size or unit.merged_size
        plain = dataclasses.replace(
            config,
            hidden_size=output_size,
            ffn_hidden_size=inner_size,
            sequence_parallel=False,
            gated_linear_unit=False,
            activation_func=torch.nn.functional.gelu,
            bias_activation_fusion=False,
            add_bias_linear=True,
        )
        self.mlp = MLP(plain, MLP_SUBMODULES, input_size=unit.merged_size, ffn_hidden_size=inner_size, tp_group=groups.tp)

    def forward(self, hidden: Tensor, places: Tensor, kept_rows: Tensor | None) -> Tensor:
        """Return [num_merged_tokens, output_size], the same on every tensor parallel rank; arguments as those of `merge`."""
        output, bias = self.mlp(self.merge(hidden, places, kept_rows))
        return self.callback((output + bias)[:, 0])


class LinearProjector(MergedTokens):
    """One product with a bias, alike on all tensor parallel ranks."""

    def __init__(self, unit: Unit, *, config: TransformerConfig, groups: ProcessGroupCollection, output_size: int) -> None:
        super().__init__(unit, config=config, groups=groups)
        device, dtype = torch.cuda.current_device(), config.params_dtype
        self.weight = torch.nn.Parameter(torch.empty(output_size, unit.merged_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(output_size, device=device, dtype=dtype))

    def forward(self, hidden: Tensor, places: Tensor, kept_rows: Tensor | None) -> Tensor:
        """Return [num_merged_tokens, output_size], the same on every tensor parallel rank; arguments as those of `merge`."""
        return self.callback(deferrable_linear(self.merge(hidden, places, kept_rows), self.weight, self.bias)[:, 0])


def drops_tokens(unit: Unit) -> bool:
    """Return whether some tokens are no part of the output: their last place is below 0."""
    item = unit.item_input
    return isinstance(item, AudioInput) or (isinstance(item, ImageInput) and item.class_token == "dropped")


class ProjectorKind(LayerKind):
    """Gives the rows that the LLM takes; their width is its hidden size."""

    column_parallel = ("linear_fc1",)
    row_parallel = ("linear_fc2",)

    def build(self, context: LayerContext, index: int) -> Module:
        """Build it for the LLM downstream."""
        size = self.output_size(context)
        return Projector(context.unit, config=context.config, groups=context.groups, output_size=size)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Merge and map; returns [num_merged_tokens, output_size]."""
        projected: Tensor = layer(hidden, given.batch.positions, given.batch.kept_rows)
        return projected

    def output_size(self, context: LayerContext) -> int:
        """Return the hidden size of the units downstream; raises ModelError where they differ."""
        unit, graph = context.unit, context.graph
        sizes = {graph.unit(name).transformer.hidden_size for name in graph.downstream(unit.name)}
        if len(sizes) > 1:
            raise ModelError(
                f"unit '{unit.name}' feeds units of different hidden sizes {sorted(sizes)}; it can feed only one size"
            )
        return sizes.pop() if sizes else unit.transformer.hidden_size

    def num_tokens_per_output(self, unit: Unit) -> int:
        """Return the neighbouring tokens that are merged."""
        return unit.merge_factor


class LinearProjectorKind(ProjectorKind):
    """The same with one product."""

    def build(self, context: LayerContext, index: int) -> Module:
        """Build it for the LLM downstream."""
        size = self.output_size(context)
        return LinearProjector(context.unit, config=context.config, groups=context.groups, output_size=size)
