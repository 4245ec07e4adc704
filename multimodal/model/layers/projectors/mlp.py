"""The last layers of encoders: from hidden states to the rows that the LLM takes."""

import dataclasses
from typing import ClassVar

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn import Module

from multimodal.model.collectives import RankLink, gather_rows
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.layers.opaque_module import find_callback
from multimodal.model.layers.transformer import MLP_SUBMODULES
from multimodal.model.norm import Norm
from multimodal.model.stage_input import PackedInput, find_row_ends
from multimodal.model.tensor_parallel_waits import TensorParallelWaits
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import AudioInput, ImageInput, Unit


class MergedTokens(torch.nn.Module):
    """Norm and merging of neighbouring tokens (concatenated or averaged); the norm may follow the merging, or be left out."""

    waits: TensorParallelWaits | None = None

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        unit, config, self.group = context.unit, context.config, context.groups.tp
        self.merge_factor, self.merged_size = unit.merge_factor, unit.merged_size
        self.callback = find_callback(unit.module.after_projector if unit.module is not None else None)
        self.is_sequence_sharded = config.sequence_parallel
        self.drops_tokens = drops_tokens(unit)
        self.has_row_ends = unit.image is not None and unit.image.has_row_ends
        self.normalises_merged = unit.projector_norm == "merged"
        size = unit.merged_size if self.normalises_merged else config.hidden_size
        kind = unit.projector_normalization or config.normalization
        whole = dataclasses.replace(config, sequence_parallel=False, normalization=kind)
        epsilon = unit.projector_norm_epsilon or config.layernorm_epsilon
        self.norm = None if unit.projector_norm == "none" else Norm(whole, size, eps=epsilon)

    def gather(self, hidden: Tensor, batch: PackedInput) -> Tensor:
        """hidden: [num_tokens (padded and / tp under sequence parallelism), 1, channels].

        Returns [num_kept_tokens, 1, channels], the same on every tensor parallel rank.
        """
        places, kept_rows = batch.positions, batch.kept_rows
        if self.is_sequence_sharded:
            hidden = gather_rows(hidden, RankLink(self.group, True, self.waits))
        hidden = hidden[: len(places)]
        if self.drops_tokens:
            hidden = hidden[places[:, -1] >= 0] if kept_rows is None else hidden.index_select(0, kept_rows)
        return hidden

    def merge(self, hidden: Tensor) -> Tensor:
        """hidden: [num_tokens, 1, hidden_size]; returns [num_tokens / merge_factor, 1, merged_size]."""
        if self.normalises_merged:
            hidden = self._join(hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.normalises_merged else self._join(hidden)

    def _join(self, hidden: Tensor) -> Tensor:
        joined = hidden.reshape(-1, 1, self.merge_factor * hidden.shape[-1])
        return joined if joined.shape[-1] == self.merged_size else joined.unflatten(-1, (self.merge_factor, -1)).mean(dim=-2)


class UnprojectedTokens(MergedTokens):
    """Returns merged tokens as they are, for another encoder."""

    def forward(self, hidden: Tensor, given: StagePass) -> Tensor:
        """Return [num_merged_tokens, merged_size], the same on every tensor parallel rank."""
        return self.callback(self.merge(self.gather(hidden, given.batch))[:, 0])


class Projector(MergedTokens):
    """Two products with a GELU between them (Qwen2-VL's patch merger)."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        unit = context.unit
        inner_size = unit.projector_inner_size
        plain = dataclasses.replace(
            context.config,
            hidden_size=output_size(context),
            ffn_hidden_size=inner_size,
            sequence_parallel=False,
            gated_linear_unit=False,
            activation_func=torch.nn.functional.gelu,
            bias_activation_fusion=False,
            add_bias_linear=True,
        )
        self.mlp = MLP(plain, MLP_SUBMODULES, input_size=unit.merged_size, ffn_hidden_size=inner_size, tp_group=self.group)
        self.deepstack = torch.nn.ModuleList()
        if unit.deepstack_layers:  # projectors of earlier layers, with the norm behind the merging
            assert unit.image is not None
            image = dataclasses.replace(unit.image, deepstack_layers=())
            alone = dataclasses.replace(context, unit=dataclasses.replace(unit, image=image, projector_norm="merged"))
            self.deepstack.extend(Projector(alone) for _ in unit.deepstack_layers)

    def forward(self, hidden: Tensor, given: StagePass) -> Tensor:
        """Return [num_merged_tokens, output_size], the same on every tensor parallel rank.

        If earlier layers also go to the LLM, their channels follow those of the last one, in input and output.
        """
        rows = self.gather(hidden, given.batch)
        parts = [part.contiguous() for part in rows.chunk(1 + len(self.deepstack), dim=-1)]  # else norms keep it all
        projected = [each.project(part) for each, part in zip((self, *self.deepstack), parts, strict=True)]  # type: ignore[operator]
        return self.callback(projected[0] if len(projected) == 1 else torch.cat(projected, dim=-1))

    def project(self, hidden: Tensor) -> Tensor:
        """Return [num_merged_tokens, output_size] for the kept tokens of one layer."""
        output, bias = self.mlp(self.merge(hidden))
        return (output + bias)[:, 0]


class LinearProjector(MergedTokens):
    """One product with a bias, not sharded over tensor parallel ranks."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        size = output_size(context)
        self.weight, self.bias = context.empty(size, context.unit.merged_size), context.empty(size)

    def forward(self, hidden: Tensor, given: StagePass) -> Tensor:
        """Return [num_merged_tokens, output_size], the same on every tensor parallel rank."""
        merged = self.merge(self.gather(hidden, given.batch))
        return self.callback(deferrable_linear(merged, self.weight, self.bias)[:, 0])


def output_size(context: LayerContext) -> int:
    """Return the hidden size of the units downstream; raises ModelError if they differ."""
    unit, graph = context.unit, context.graph
    sizes = {taker.transformer.hidden_size for taker in graph.takers(unit.name)}
    if len(sizes) > 1:
        raise ModelError(f"unit '{unit.name}' feeds units of different hidden sizes {sorted(sizes)}; it can feed only one size")
    return graph.projected_size(unit.name)


def drops_tokens(unit: Unit) -> bool:
    """Return True if some tokens are not part of the output: their last place is below 0."""
    item = unit.item_input
    return isinstance(item, AudioInput) or (isinstance(item, ImageInput) and item.class_token == "dropped")


class ProjectorKind(LayerKind):
    """Makes the rows that the LLM takes, of its hidden size, or those that other encoders take."""

    column_parallel: ClassVar[tuple[str, ...]] = ("linear_fc1",)
    row_parallel: ClassVar[tuple[str, ...]] = ("linear_fc2",)

    def __init__(self, module: type[MergedTokens]) -> None:
        self.module = module

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Merge and project; returns [num_merged_tokens, output_size], with rows of zeros in the places of row ends."""
        batch, projected = given.batch, layer(hidden, given)
        if not layer.has_row_ends:
            return projected
        sources = find_row_ends(batch.positions) if batch.kept_rows is None else batch.kept_rows
        return torch.cat((projected, projected.new_zeros(1, projected.shape[1]))).index_select(0, sources)

    def num_tokens_per_output(self, unit: Unit) -> int:
        """Return the number of neighbouring tokens that are merged."""
        return unit.merge_factor
