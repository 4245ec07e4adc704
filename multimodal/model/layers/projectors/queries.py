"""Cross-attention as an encoder's last layer: learned queries attend to each item's tokens (resamplers, Q-Former)."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear, deferrable_linear
from multimodal.model.layers.layer_kind import LayerContext, StagePass
from multimodal.model.layers.projectors.mlp import MergedTokens, ProjectorKind, output_size
from multimodal.model.layers.transformer import MLP_SUBMODULES
from multimodal.model.norm import Norm
from multimodal.values.model_graph import Unit


class QueryProjector(MergedTokens):
    """Learned queries, the same for every item, layers in which they attend to the item, and an output product.

    Norms come before their operation, as in a transformer layer. All rows are on every tensor parallel rank; ranks share heads
    and the MLP's inner width.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        unit, size = context.unit, output_size(context)
        assert unit.queries is not None
        self.unit, shape = unit, unit.queries.shape(unit.transformer)
        plain = dataclasses.replace(
            context.config,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_attention_heads,
            kv_channels=shape.head_channels,
            ffn_hidden_size=shape.ffn_hidden_size,
            sequence_parallel=False,
            gated_linear_unit=False,
            activation_func=torch.nn.functional.gelu,
            bias_activation_fusion=False,
            add_bias_linear=True,
            qk_layernorm=False,
        )
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

    def num_tokens_per_output(self, unit: Unit) -> int:
        """Return 1: costs are counted in tokens, not in outputs."""
        return 1
