"""Transformer layers with something else in them: a mixture of experts, windows, or modulation by the time of a flow."""

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Module

from multimodal.attention.core_attention import WindowedAttention
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.cost.layers.transformer import NUM_MODULATIONS
from multimodal.model.expert_mlp import ExpertMLP, RowSequences
from multimodal.model.latents import NoisePath
from multimodal.model.layers import diffusion_transformer as diffusion
from multimodal.model.layers.generator_ends import random_path
from multimodal.model.layers.layer_kind import InputContext, LayerContext, LayerKind, StagePass
from multimodal.model.layers.transformer import TransformerKind, accumulates_in_engine
from multimodal.model.norm import Norm
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.model.stage_input import PackedInput, pad_rows
from multimodal.values.model_graph import Unit


class MoeTransformerKind(TransformerKind):
    """A transformer layer with another MLP, which several ranks may share (expert parallelism); it runs as a whole."""

    def build(self, context: LayerContext, index: int) -> Module:
        """Build the layer without an MLP, and the experts."""
        shape = context.unit.transformer
        assert shape.experts is not None, "a model with such layers describes their experts"
        layer = super().build(context, index)
        layer.mlp = mlp = ExpertMLP(context.config, shape.experts, shape.expert_hidden_size, context.groups)
        if context.implementation != "local":
            mlp.use_engine(context.options, accumulates=accumulates_in_engine(context.options))
        return layer

    def adapt(self, spec: ModuleSpec, unit: Unit, index: int) -> None:
        """Leave the MLP out of the spec, and with it the norm that Transformer Engine fuses with it."""
        spec.submodules.mlp, spec.submodules.pre_mlp_layernorm = IdentityOp, Norm

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Run the layer on packed sequences, which the loss that balances experts distinguishes."""
        mlp = layer.mlp
        assert isinstance(mlp, ExpertMLP)
        wants_loss = mlp.experts_shape.aux_loss_coeff > 0 and mlp.router.weight.requires_grad and torch.is_grad_enabled()
        mlp.sequences = _sequences(layer, given, len(hidden)) if wants_loss else None
        mlp.num_step_tokens = given.num_step_tokens
        output = super().run(layer, hidden, given)
        mlp.sequences = None
        return output

    segments = LayerKind.segments  # it is not cut


def _sequences(layer: Any, given: StagePass, num_rows: int) -> RowSequences:
    """Return the sequences of this rank's rows; num_rows: of this rank."""
    mlp: ExpertMLP = layer.mlp
    numbers = given.lengths.sequence_numbers(given.batch.positions.device)[: given.batch.num_tokens]
    own = _rows_of_rank(numbers + 1, layer, num_rows=num_rows) - 1  # of padding -1
    groups = [mlp.groups.cp, *([mlp.groups.tp] if mlp.is_sequence_parallel else [])]
    return RowSequences(own, given.batch.lengths, tuple(group for group in groups if group.size() > 1))


class WindowedTransformerKind(TransformerKind):
    """A transformer layer whose core attention takes tokens window by window."""

    def adapt(self, spec: ModuleSpec, unit: Unit, index: int) -> None:
        """Wrap the core attention in one that reorders tokens."""
        attention = spec.submodules.self_attention.submodules
        inner = attention.core_attention
        attention.core_attention = ModuleSpec(module=WindowedAttention, params={"inner": inner})

    def prepare(self, packed: PackedLengths, context: InputContext) -> None:
        """Derive masks and the other inputs of attention, for windows."""
        super().prepare(packed.window_sequences, context)


class SlidingTransformerKind(TransformerKind):
    """A transformer layer of the LLM whose tokens attend to the last ones before them."""

    def window(self, unit: Unit) -> int | None:
        """Return the unit's window."""
        return unit.transformer.sliding_window

    def frequencies(self, given: StagePass) -> Tensor | None:
        """Return the angles of layers with windows, if the unit has some of their own."""
        return given.frequencies if given.local_frequencies is None else given.local_frequencies


class SlidingMoeTransformerKind(SlidingTransformerKind, MoeTransformerKind):
    """The same with experts in place of the MLP."""


class ModulatedTransformerKind(TransformerKind):
    """Reads `batch.path` as well, and `target_rows`. It has a `modulation`, and runs as a whole."""

    segments = LayerKind.segments  # it is not cut

    def build(self, context: LayerContext, index: int) -> Module:
        """Build the layer and its modulation."""
        layer = super().build(context, index)
        layer.modulation = diffusion.Modulation(context, index)
        return layer

    def adapt(self, spec: ModuleSpec, unit: Unit, index: int) -> None:
        """Take products without the norms before them, whose results are modulated first, and what the unit's flow asks for.

        Those are weights for conditions beside those for patches, and norms as diffusers has them. In SD3's last layer conditions
        end with attention.
        """
        flow, parts = unit.flow, spec.submodules
        attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
        assert flow is not None
        if parts.input_layernorm is not Norm:
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            parts.input_layernorm = parts.pre_mlp_layernorm = Norm
            attention.linear_qkv = mlp.linear_fc1 = TEColumnParallelLinear
        if flow.form is not None:
            parts.input_layernorm, parts.pre_mlp_layernorm = diffusion.FirstNorm, diffusion.PlainNorm
            if attention.q_layernorm is Norm:
                attention.q_layernorm = attention.k_layernorm = diffusion.JointHeadNorm
        if flow.has_joint_attention:
            attention.linear_qkv = diffusion.JointColumnParallelLinear
            if flow.form is None or index < unit.transformer.num_layers:
                mlp.linear_fc1 = diffusion.JointColumnParallelLinear
                attention.linear_proj = mlp.linear_fc2 = diffusion.JointRowParallelLinear

    def sharding(self, unit: Unit, name: str) -> ParameterSharding:
        """Split weights for conditions as those for patches."""
        return super().sharding(unit, name.replace(".conditions.", "."))

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Run both branches on packed sequences."""
        path: NoisePath = given.batch.path  # type: ignore[assignment]
        rows = _rows_of_rank(path.items, layer, num_rows=hidden.shape[0])
        hidden, *carried = hidden.split(layer.config.hidden_size, dim=-1)  # type: ignore[union-attr, arg-type]
        found = (diffusion.of_items(torch.cat(carried, -1)[:, 0], rows, len(path.times)),) if carried else ()
        joint = [each for each in layer.modules() if isinstance(each, _JOINT)]
        if joint:
            split = _joint_rows(given.batch, layer, num_rows=hidden.shape[0])
            rows = rows + len(path.times) * split.are_conditions
            for part in joint:
                part.rows = split  # type: ignore[assignment]
        values = layer.modulation(path.times, *found).index_select(0, rows)  # type: ignore[operator]
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
        """Return a time for each item, and patches behind its conditions."""
        length = num_tokens // num_sequences
        places = torch.arange(num_tokens, device=torch.cuda.current_device())
        rows = places[places % length >= min(context.unit.num_conditions, length) - 1]
        return {**random_path(context, num_tokens, num_sequences), "target_rows": rows}, None


_JOINT = diffusion.JointColumnParallelLinear, diffusion.JointRowParallelLinear, diffusion.JointHeadNorm


def _joint_rows(batch: PackedInput, layer: Any, *, num_rows: int) -> diffusion.JointRows:
    """num_rows: of this rank's hidden states."""
    assert batch.target_rows is not None, "there are conditions before the patches"
    are_conditions = torch.ones(batch.num_tokens, dtype=torch.long, device=batch.target_rows.device)
    are_conditions = are_conditions.index_fill(0, batch.target_rows, 0)
    num_all = num_rows * (layer.self_attention.pg_collection.tp.size() if layer.config.sequence_parallel else 1)
    order = pad_rows(are_conditions, num_all).argsort(stable=True)
    num_conditions = batch.num_tokens - len(batch.target_rows)
    return diffusion.JointRows(order, num_all - num_conditions, _rows_of_rank(are_conditions, layer, num_rows=num_rows).bool())


def _rows_of_rank(tokens: Tensor, layer: Module, *, num_rows: int) -> Tensor:
    """Return the values of tokens at the rows of this rank's hidden states, [num_rows]; padding has zeros."""
    group: Any = layer.self_attention.pg_collection.tp  # type: ignore[union-attr]
    is_sharded = layer.config.sequence_parallel  # type: ignore[union-attr]
    rows = pad_rows(tokens, num_rows * group.size() if is_sharded else num_rows)
    return rows[group.rank() * num_rows :][:num_rows] if is_sharded else rows
