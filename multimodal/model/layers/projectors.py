"""The last layers of encoders, to the rows that the LLM takes: an MLP, or learned queries (resamplers, Q-Former)."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from multimodal.model.collectives import RankLink, TensorParallelWaits, gather_rows
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear, deferrable_linear
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.layers.opaque import find_callback
from multimodal.model.layers.transformer import MLP_SUBMODULES
from multimodal.model.norm import Norm
from multimodal.model.stage_input import PackedInput, find_row_ends
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
        """hidden: [num_tokens (padded and / tp), 1, channels]; returns [num_kept_tokens, 1, channels] on every rank."""
        places, kept_rows = batch.positions, batch.kept_rows
        hidden = gather_rows(hidden, RankLink(self.group, self.is_sequence_sharded, self.waits))[: len(places)]
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
        plain = _with_gelu(context.config, hidden_size=output_size(context), ffn_hidden_size=inner_size)
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


def _with_gelu(config: TransformerConfig, **sizes: Any) -> TransformerConfig:
    """Return the configuration of layers with a GELU and biases, all of whose rows are on every rank."""
    kind = {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu, "bias_activation_fusion": False}
    return dataclasses.replace(config, sequence_parallel=False, add_bias_linear=True, **kind, **sizes)


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

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Merge and project; returns [num_merged_tokens, output_size], with rows of zeros in the places of row ends."""
        batch, projected = given.batch, layer(hidden, given)
        if not layer.has_row_ends:
            return projected
        sources = find_row_ends(batch.positions) if batch.kept_rows is None else batch.kept_rows
        return torch.cat((projected, projected.new_zeros(1, projected.shape[1]))).index_select(0, sources)


class QueryProjector(MergedTokens):
    """Learned queries, the same for every item, layers in which they attend to the item, and an output product.

    Norms come first. All rows are on every tensor parallel rank; ranks share heads and the MLP's inner width.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        unit, size = context.unit, output_size(context)
        assert unit.queries is not None
        self.unit, shape = unit, unit.queries.shape(unit.transformer)
        heads = dict.fromkeys(("num_attention_heads", "num_query_groups"), shape.num_attention_heads)
        widths = {"kv_channels": shape.head_channels, "ffn_hidden_size": shape.ffn_hidden_size}
        plain = _with_gelu(context.config, hidden_size=shape.hidden_size, **heads, **widths, qk_layernorm=False)
        self.queries = context.empty(unit.queries.num_queries, shape.hidden_size)
        layers = (QueryLayer(dataclasses.replace(context, config=plain)) for _ in range(shape.num_layers))
        self.layers = torch.nn.ModuleList(layers)
        self.final_norm = Norm(plain, shape.hidden_size, eps=plain.layernorm_epsilon)
        self.weight, self.bias = context.empty(size, shape.hidden_size), context.empty(size)

    def forward(self, hidden: Tensor, given: StagePass) -> Tensor:
        """Return [num_items x num_queries, output_size], the same on every tensor parallel rank."""
        tokens = self.merge(self.gather(hidden, given.batch))
        counts = [self.unit.num_merged_tokens(length) for length in given.batch.own_lengths]
        found = self.queries[:, None].repeat(len(counts), 1, 1)
        if hidden.requires_grad:
            found.requires_grad_()  # even if nothing before it is trained, so that ranks wait for the same number of sums
        for layer in self.layers:
            found = layer(found, tokens, counts)
        return self.callback(deferrable_linear(self.final_norm(found), self.weight, self.bias)[:, 0])


class QueryLayer(torch.nn.Module):
    """Attention among an item's queries, if they have it; attention to the item's tokens; MLP."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config, queries = context.config, context.unit.queries
        assert queries is not None
        norm = partial(Norm, config, config.hidden_size, eps=config.layernorm_epsilon)
        self.self_norm = norm() if queries.has_self_attention else None
        self.self_attention = SelfAttention(context) if queries.has_self_attention else None
        self.cross_norm, self.cross_attention = norm(), CrossAttention(context)
        self.mlp_norm = norm()
        self.mlp = MLP(config, MLP_SUBMODULES, ffn_hidden_size=config.ffn_hidden_size, tp_group=context.groups.tp)

    def forward(self, found: Tensor, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """found: [num_items x num_queries, 1, hidden_size]; tokens: [num_tokens, 1, merged_size], `counts` of each item."""
        if self.self_norm is not None and self.self_attention is not None:
            found = found + self.self_attention(self.self_norm(found))
        found = found + self.cross_attention(self.cross_norm(found), tokens, counts)
        output, bias = self.mlp(self.mlp_norm(found))
        return found + (output + bias)


class _Attention(torch.nn.Module):
    """Base of self-attention and cross-attention: heads shared out over tensor parallel ranks, and the output projection."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config, queries = context.config, context.unit.queries
        assert queries is not None
        self.channels, self.num_queries = config.kv_channels or 0, queries.num_queries
        self._shared = {"config": config, "init_method": config.init_method, "bias": True, "tp_group": context.groups.tp}
        self.linear_proj = DeferrableRowParallelLinear(
            config.hidden_size, config.hidden_size, input_is_parallel=True, skip_bias_add=False, **self._shared
        )

    def split_heads(self, product: Tensor, *, num_parts: int = 1) -> Tensor:
        """product: [rows, 1, channels of this rank's heads]; returns [rows, heads / tp, num_parts, channels]."""
        return product[:, 0].unflatten(-1, (-1, num_parts, self.channels))

    def project(self, mixed: Tensor) -> Tensor:
        """mixed: [rows, heads / tp, channels]; returns [rows, 1, hidden_size]."""
        return self.linear_proj(mixed.flatten(1)[:, None])[0]

    def column_parallel(self, num_inputs: int, num_outputs: int) -> DeferrableColumnParallelLinear:
        """Build a product whose outputs are heads."""
        return DeferrableColumnParallelLinear(num_inputs, num_outputs, gather_output=False, **self._shared)


class SelfAttention(_Attention):
    """Queries of one item attend to each other."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        self.linear_qkv = self.column_parallel(context.config.hidden_size, 3 * context.config.hidden_size)

    def forward(self, found: Tensor) -> Tensor:
        """found: [num_items x num_queries, 1, hidden_size]; returns as much."""
        heads = self.split_heads(self.linear_qkv(found)[0], num_parts=3)  # [rows, heads / tp, 3, channels]
        query, key, value = heads.unflatten(0, (len(found) // self.num_queries, self.num_queries)).permute(3, 0, 2, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.project(mixed.flatten(0, 1))


class CrossAttention(_Attention):
    """Queries of an item attend to its tokens."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        size = context.config.hidden_size
        self.linear_q = self.column_parallel(size, size)
        self.linear_kv = self.column_parallel(context.unit.merged_size, 2 * size)

    def forward(self, found: Tensor, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """found: [num_items x num_queries, 1, hidden_size]; tokens: [num_tokens, 1, token_size], `counts` of each item."""
        query = self.split_heads(self.linear_q(found)[0])[:, :, 0]  # [rows, heads / tp, channels]
        key, value = self.split_heads(self.linear_kv(tokens)[0], num_parts=2).unbind(2)
        if not counts:  # an empty result, which nevertheless sends gradients of zeros
            return self.project(query * (key.sum() + value.sum()))
        keys, values = (each.transpose(0, 1)[None].split(counts, dim=2) for each in (key, value))
        queries = query.transpose(0, 1)[None].split(self.num_queries, dim=2)
        mixed = [scaled_dot_product_attention(*of_item) for of_item in zip(queries, keys, values, strict=True)]
        return self.project(torch.cat(mixed, dim=2)[0].transpose(0, 1))


class QueryProjectorKind(ProjectorKind):
    """Makes as many rows for every item as there are queries."""

    column_parallel = ("linear_q", "linear_kv", "linear_qkv", "linear_fc1")
    row_parallel = ("linear_proj", "linear_fc2")
