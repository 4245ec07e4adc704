"""Names the implementations that a run has chosen (layers, attention, fused kernels), for the line at its start."""

from megatron.runtime.session import Session
from multimodal.model.layers.layer_kind import InputContext
from multimodal.model.layers.transformer import accumulates_in_engine, attention_choice
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.weight_gradient_queue import find_accumulation
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

LAYERS = {"local": "local layers", "transformer_engine": "layers of Transformer Engine"}


def describe_paths(session: Session) -> str:
    """Return one line: the implementation of layers, the attention of each unit, and fused kernels."""
    options = session.options.build
    parts = [_describe_layers(session.graph, options), *describe_fusions(options)]
    return f"computed by {', '.join(parts)}; attention by {describe_attention(session.graph, session.plan, options)}"


def _describe_layers(graph: ModelGraph, options: BuildOptions) -> str:
    local = [] if options.transformer_impl == "local" else [unit.name for unit in graph.units if unit.needs_local_layers]
    found = LAYERS[options.transformer_impl]
    return f"{found} ({' and '.join(local)}, for post norms: {LAYERS['local']})" if local else found


def describe_fusions(options: BuildOptions) -> list[str]:
    """Return the operations that are fused or in FP8; none on a CPU."""
    found = []
    if options.fp8_format is not None:
        found.append(f"in FP8 ({options.fp8_format}, {options.fp8_recipe})")
    if options.fuses_kernels:
        found.append("fused SwiGLU and rotation")
    is_engine = options.transformer_impl == "transformer_engine"
    if accumulates_in_engine(options) if is_engine else options.accumulates_in_products and find_accumulation():
        found.append("weight gradients added in products")
    return found


def describe_attention(graph: ModelGraph, plan: Plan, options: BuildOptions) -> str:
    """Return the backend of every unit, or a single one if it is the same for all."""
    choices = {}
    for unit in graph.units:
        sizes = max(plan.units[unit.name].tensor_sizes), plan.units[unit.name].context_parallel_size
        choice = attention_choice(InputContext(graph, unit, options, *sizes), window=unit.transformer.sliding_window)
        choices[unit.name] = " and ".join(dict.fromkeys((choice.backend, choice.alone)))
    if len(set(choices.values())) == 1:
        return next(iter(choices.values()))
    return ", ".join(f"{name}: {backend}" for name, backend in choices.items())
