"""Transformer layers of a generator that learns a flow: an item's time shifts, scales and gates both branches (adaLN-Zero)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.cost.layers.modulated_transformer import NUM_MODULATIONS
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.inputs.noise_paths import NUM_TIMES, NoisePath
from multimodal.model.layers.generator_ends import position_features, random_path
from multimodal.model.layers.layer_kind import LayerContext, StagePass
from multimodal.model.layers.transformer import TransformerKind
from multimodal.model.stage_input import pad_rows


class Modulation(torch.nn.Module):
    """Maps an item's time to shift, scale and gate of both branches; the same on every tensor parallel rank.

    DiT, section 3.2. Every layer has both of its maps, where DiT's layers share the first: no stage then shares weights with
    another.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.wide, self.hidden_size = context.options.precision.rotary_dtype, context.config.hidden_size
        size, num_outputs = self.hidden_size, NUM_MODULATIONS * self.hidden_size
        self.time_weight, self.time_bias = context.empty(size, size), context.empty(size)
        self.weight, self.bias = context.empty(num_outputs, size), context.empty(num_outputs)
        for parameter in self.parameters():
            parameter.sequence_parallel = context.config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, times: Tensor) -> Tensor:
        """times: [num_items], in (0, 1); returns [num_items, 6 x hidden_size]."""
        places = (NUM_TIMES * times.to(self.wide))[:, None].expand(-1, 2)
        features = position_features(places, hidden_size=self.hidden_size, base=NUM_TIMES, dtype=self.wide)
        inner = deferrable_linear(features.to(self.weight.dtype), self.time_weight, self.time_bias)
        return deferrable_linear(torch.nn.functional.silu(inner), self.weight, self.bias)


class ModulatedTransformerKind(TransformerKind):
    """Reads `batch.path` as well. It is megatron-core's own layer with a `modulation`, and runs as a whole."""

    num_segments = 1

    def build(self, context: LayerContext, index: int) -> Module:
        """Build the layer and its modulation."""
        layer = super().build(context, index)
        layer.modulation = Modulation(context)
        return layer

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Run both branches on packed sequences."""
        path: NoisePath = given.batch.path  # type: ignore[assignment]
        rows = _items_of_rows(path.items, layer, num_rows=hidden.shape[0])
        values = layer.modulation(path.times).index_select(0, rows)  # type: ignore[operator]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = values[:, None].chunk(NUM_MODULATIONS, dim=-1)
        attended, bias = layer.self_attention(  # type: ignore[operator]
            torch.addcmul(shift, layer.input_layernorm(hidden), 1 + scale),  # type: ignore[operator]
            attention_mask=None,
            rotary_pos_emb=self.frequencies(given),
            packed_seq_params=given.lengths,
        )
        hidden = torch.addcmul(hidden, gate, attended if bias is None else attended + bias)
        mapped, bias = layer.mlp(torch.addcmul(mlp_shift, layer.pre_mlp_layernorm(hidden), 1 + mlp_scale))  # type: ignore[operator]
        return torch.addcmul(hidden, mlp_gate, mapped if bias is None else mapped + bias)

    def initial_matrix(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Start with zeros behind the last map, so that every layer first hands on its input (adaLN-Zero)."""
        return torch.zeros(shape) if name == "modulation.weight" else super().initial_matrix(name, shape)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return a time for each item."""
        return random_path(context, num_tokens, num_sequences), None


def _items_of_rows(items: Tensor, layer: Module, *, num_rows: int) -> Tensor:
    """Return the item of each row of this rank's hidden states; padding counts as the first."""
    group: Any = layer.self_attention.pg_collection.tp  # type: ignore[union-attr]
    is_sharded = layer.config.sequence_parallel  # type: ignore[union-attr]
    rows = pad_rows(items, num_rows * group.size() if is_sharded else num_rows)
    return rows[group.rank() * num_rows :][:num_rows] if is_sharded else rows
