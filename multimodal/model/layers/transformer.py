"""Transformer layers: megatron-core's, in both implementations, with packed attention in place of its own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn import Module

from multimodal.attention.attention_backend import AttentionShape
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.core_attention import AttentionChoice, CoreAttention, choose_attention
from multimodal.attention.packed_lengths import MaskRule, PackedLengths
from multimodal.cost.engine_limits import Instead, LayerUse, limits_met
from multimodal.model.collectives import overlaps_of, report_engine_waits
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.model.layers.layer_kind import InputContext, LayerContext, LayerKind, Segments, StagePass
from multimodal.model.layers.transformer_segments import transformer_segments
from multimodal.model.norm import AllHeadsNorm, Norm
from multimodal.model.swiglu import swiglu
from multimodal.model.transformer_config import BuildOptions
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Role, Unit

MLP_SUBMODULES = MLPSubmodules(linear_fc1=DeferrableColumnParallelLinear, linear_fc2=DeferrableRowParallelLinear)
INITIAL_SCALE = 0.1
"""Initial value of layer scales."""
FUSED_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
"""Norms of a layer, and the products with which Transformer Engine fuses them."""
_Branch = tuple[Tensor, Tensor | None]
"""A branch's output and the bias that is still to be added to it."""


def mask_rule_of(unit: Unit, *, graph: ModelGraph, mode: MaskMode, window: int | None = None) -> MaskRule:
    """Return the mask rule of a unit: the LLM's follows `mode` and the layer's window, others' tokens see their whole item."""
    if not unit.is_causal:
        return MaskRule(is_causal=False)
    encoders = tuple(each.name for each in graph.units if each.role is Role.ENCODER)
    return MaskRule(True, mode, encoders, window, unit.transformer.attention_softcap)


class TransformerKind(LayerKind):
    """Reads rotary angles and the lengths of packed sequences."""

    column_parallel = ("linear_qkv", "linear_fc1")
    row_parallel = ("linear_proj", "linear_fc2")
    residual_ends = ("linear_proj", "linear_fc2")

    def build(self, context: LayerContext, index: int) -> Module:
        """Build megatron-core's layer from its spec."""
        options, is_local = context.options, context.implementation == "local"
        has_head_norms, spans_heads = context.config.qk_layernorm, context.unit.transformer.qk_norm_spans_heads
        spec = _local_spec(options.num_overlapped_parts) if is_local else _transformer_engine_spec(has_head_norms)
        choice = attention_choice(context.input_context, window=self.window(context.unit))
        attention = spec.submodules.self_attention
        attention.params = {"attn_mask_type": AttnMaskType.causal if choice.rule.is_causal else AttnMaskType.no_mask}
        if spans_heads or (has_head_norms and is_local):
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = AllHeadsNorm if spans_heads else Norm
        params = {"choice": choice, "recompute": options.recompute == "selective", "repeats": options.recompute == "full"}
        attention.submodules.core_attention = ModuleSpec(module=CoreAttention, params=params)
        if (is_scaled := context.unit.transformer.has_layer_scale) or context.unit.transformer.has_post_norms:
            add = ModuleSpec(module=ChangedAdd, params={"config": context.config, "is_scaled": is_scaled})
            spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add
        _add_biases(spec, context.unit)
        self.adapt(spec, context.unit, index)
        config, buffer_rows = context.config, context.input_context.buffer_rows
        if not is_local:
            report_engine_waits()
            config = copy.copy(config)  # set here, since elsewhere it is validated against Megatron's own schedules
            config.delay_wgrad_compute = options.delays_weight_gradients
            config.gradient_accumulation_fusion = accumulates_in_engine(options)
            # None in place of a flag for first microbatches: a "first" one would overwrite the gradient buffer, although
            # another's backward may have come before. FP8 needs the flag, to keep weights in FP8 for a whole step.
            config.disable_parameter_transpose_cache = options.fp8_format is None
            config.tp_comm_overlap = config.tp_comm_overlap_rs_dgrad = buffer_rows > 0
            config.tp_comm_bulk_dgrad = config.tp_comm_bulk_wgrad = False
        layer: Module = build_module(spec, config=config, layer_number=index, pg_collection=context.groups)
        _name_fused_norms(layer)
        if isinstance(layer.mlp, MLP) and not config.bias_activation_fusion and context.unit.transformer.activation == "swiglu":
            layer.mlp.config = copy.copy(config)
            layer.mlp.config.use_te_activation_func = True  # the MLP then calls one function of gate and value
            layer.mlp.activation_func = swiglu
        # Let the gradients of query and key norms be summed over tensor parallel ranks, each of which has heads of its own.
        tensor_parallel_size = context.groups.tp.size()
        layer.overlaps = overlaps_of(layer), buffer_rows // tensor_parallel_size  # type: ignore[assignment]
        for name in ("q_layernorm", "k_layernorm"):
            norm = getattr(layer.self_attention, name, None)
            for parameter in norm.parameters() if norm is not None else ():
                parameter.sequence_parallel = tensor_parallel_size > 1
        return layer

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Run the layer on packed sequences."""
        overlaps, num_rows = layer.overlaps  # type: ignore[misc]
        for module, name in overlaps:
            setattr(module, name, len(hidden) == num_rows)
        frequencies = self.frequencies(given)
        return layer(hidden, attention_mask=None, rotary_pos_emb=frequencies, packed_seq_params=given.lengths)[0]

    def frequencies(self, given: StagePass) -> Tensor | None:
        """Return the rotary angles of the layer."""
        return given.frequencies

    def prepare(self, packed: PackedLengths, context: InputContext) -> None:
        """Derive masks and the other inputs of attention."""
        attention_choice(context, window=self.window(context.unit)).prepare(packed)

    def window(self, unit: Unit) -> int | None:
        """Return the number of tokens that the LLM's tokens attend to in the layer; None: all before them."""
        return None

    def segments(self, layer: Module) -> Segments | None:
        """Return the parts of the seven segments."""
        return transformer_segments(layer, self.frequencies)

    def initial_vector(self, name: str) -> float:
        """Return the small initial value of layer scales, or that of other vectors."""
        return INITIAL_SCALE if name.endswith("_bda.scale") else super().initial_vector(name)

    def adapt(self, spec: ModuleSpec, unit: Unit, index: int) -> None:
        """Change the spec of the layer at `index` of its unit; overridden by kinds that replace a module."""

    def num_blocks(self, unit: Unit, module: str) -> int:
        """A gated first MLP layer stacks [gate; up]."""
        return 2 if module == "linear_fc1" and unit.transformer.is_gated else 1


def accumulates_in_engine(options: BuildOptions) -> bool:
    """Return True if Transformer Engine's products add weight gradients to float32 buffers themselves."""
    use = LayerUse(splits_backwards=options.delays_weight_gradients, fp8_recipe=options.used_fp8_recipe)
    return options.accumulates_in_products and not limits_met(use, Instead.SEPARATE)


def _name_fused_norms(layer: Module) -> None:
    """Give norms that Transformer Engine fuses with the product behind them the names that they have in local layers, too.

    The place of such a norm is empty and comes before the product: of a parameter that a layer has in two places,
    `named_parameters` lists the first. So checkpoints and folders of Hugging Face do not depend on the implementation.
    """
    modules = dict(layer.named_modules())
    for norm, product in FUSED_NORMS.items():
        for tensor in ("weight", "bias"):
            if (parameter := getattr(modules.get(product), f"layer_norm_{tensor}", None)) is not None:
                modules[norm].register_parameter(tensor, parameter)


def attention_choice(context: InputContext, *, window: int | None = None) -> AttentionChoice:
    """Return a unit's attention backends; raises ConfigError if one cannot evaluate the mask, or does not run on the device."""
    options, transformer, size = context.options, context.unit.transformer, context.tensor_parallel_size
    heads, groups = transformer.num_attention_heads // size, max(1, transformer.query_groups // size)
    shape = AttentionShape(heads, groups, transformer.head_channels, options.params_dtype, options.num_multiprocessors)
    rule = mask_rule_of(context.unit, graph=context.graph, mode=options.attention_mask, window=window)
    return choose_attention(options.attention_backend, rule=rule, shape=shape, is_shared=context.context_parallel_size > 1)


def _local_spec(num_overlapped_parts: int) -> ModuleSpec:
    params = {"num_overlapped_parts": num_overlapped_parts}
    column = ModuleSpec(DeferrableColumnParallelLinear, params=params)
    row = ModuleSpec(DeferrableRowParallelLinear, params=params)
    parts = SelfAttentionSubmodules(linear_qkv=column, core_attention=CoreAttention, linear_proj=row)
    self_attention = ModuleSpec(module=SelfAttention, submodules=parts)
    submodules = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=self_attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _add_biases(spec: ModuleSpec, unit: Unit) -> None:
    """Give those linear layers a bias that megatron-core's configuration does not tell from the others."""
    if unit.transformer.add_bias_linear:
        return
    for name, has_bias in unit.transformer.biases.items():
        if has_bias and name != "linear_qkv":
            part = getattr(spec.submodules, "self_attention" if name == "linear_proj" else "mlp").submodules
            setattr(part, name, _with_bias(getattr(part, name)))


def _with_bias(linear: Any) -> Any:
    if isinstance(linear, ModuleSpec):
        return ModuleSpec(_with_bias(linear.module), params=linear.params)

    def build(self: Any, *arguments: Any, **options: Any) -> None:
        linear.__init__(self, *arguments, **{**options, "bias": True})

    return type(linear.__name__, (linear,), {"__init__": build})


def _transformer_engine_spec(has_head_norms: bool) -> ModuleSpec:
    try:
        import transformer_engine  # noqa: F401
    except ImportError as problem:
        raise ConfigError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; install it, or use "
            "--transformer-impl local"
        ) from problem
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=has_head_norms)


class ChangedAdd(torch.nn.Module):
    """Adds a branch that is scaled by channel (CaiT, InternViT) or normalised (Gemma 2), as megatron-core's function adds."""

    def __init__(self, config: TransformerConfig, *, is_scaled: bool) -> None:
        super().__init__()
        if is_scaled:
            device = torch.cuda.current_device()
            self.scale = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype, device=device))
            self.scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        else:
            self.norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, is_training: bool, is_fused: bool) -> Callable[[_Branch, Tensor, float], Tensor]:
        """Return the function that adds."""
        return self._add

    def _add(self, branch: _Branch, residual: Tensor, dropout: float) -> Tensor:
        output, bias = branch
        output = output if bias is None else output + bias
        return residual + (self.scale * output if hasattr(self, "scale") else self.norm(output))
