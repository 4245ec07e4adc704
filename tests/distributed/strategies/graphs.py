"""Random graphs of units: encoders, also behind each other, the LLM, with experts or without, and generators."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from multimodal.values.model_graph import AudioInput, Experts, ImageInput, Lora, ModelGraph, Queries, Role, Transformer, Unit
from multimodal.values.units.unit import Flow

MAX_AUDIO_TOKENS = 6
PROJECTORS: list[dict[str, Any]] = [
    {},
    {"projector_hidden_size": 6},
    {"has_linear_projector": True, "projector_norm": "merged"},
    {"queries": Queries(3)},
    {"queries": Queries(2, 2, True, hidden_size=12, num_attention_heads=6, ffn_hidden_size=12), "projector_norm": "none"},
]

FLOWS = [Flow(count, share, joint) for count in (1, 2, 5) for share in (0.0, 0.5) for joint in {False, count > 1}]


@st.composite
def sounds(draw: st.DrawFn) -> AudioInput:
    """Whole clips with learned positions, or chunks."""
    return AudioInput(
        num_mel_bins=3,
        merge_factor=draw(st.sampled_from([1, 2])),
        merge=draw(st.sampled_from(["joined", "averaged"])),
        max_tokens=MAX_AUDIO_TOKENS,
        chunk_tokens=draw(st.sampled_from([None, 2, 3])),
    )


@st.composite
def loras(draw: st.DrawFn, unit: str) -> Lora | None:
    """Adapters of none, some or all linear layers, the projector's among them."""
    attention, mlp = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
    chosen = draw(st.sampled_from([(), (), (), attention + mlp, attention[:1] + mlp[1:], attention[1:] + mlp[:1]]))
    if not chosen:
        return None
    projector = draw(st.sampled_from([(), mlp, mlp[1:]])) if unit in ("vision", "audio") else ()
    kinds = ("transformer", "modulated_transformer")
    targets = (*(f"{kind}.{name}" for kind in kinds for name in chosen), *(f"projector.{name}" for name in projector))
    return Lora(draw(st.sampled_from([1, 3])), draw(st.sampled_from([None, 2.0])), targets)


@st.composite
def transformers(draw: st.DrawFn, *, channels: Sequence[int], divisor: int = 2, has_rotary_positions: bool = True) -> Transformer:
    """Any small shape that a tensor parallel size divides."""
    num_heads = draw(st.sampled_from([divisor, 2 * divisor]))
    head_channels = draw(st.sampled_from(channels))
    return Transformer(
        num_layers=draw(st.integers(1, 4)),
        hidden_size=draw(st.sampled_from([num_heads * head_channels, 4 * divisor, 10 * divisor])),
        num_attention_heads=num_heads,
        ffn_hidden_size=draw(st.sampled_from([4 * divisor, 7 * divisor])),
        num_query_groups=draw(st.sampled_from([None, divisor])),
        kv_channels=head_channels,
        normalization=draw(st.sampled_from(["RMSNorm", "LayerNorm"])),
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
        add_bias_linear=draw(st.booleans()),
        add_qkv_bias=draw(st.booleans()),
        has_rotary_positions=has_rotary_positions,
        init_method_std=0.3,
    )


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    encoders: Sequence[tuple[str, ...]] = (("vision",), (), ("vision", "audio")),
    generators: Sequence[tuple[str, ...]] = ((), (), ("painter",), ("painter", "engraver")),
    divisor: int = 2,
    has_experts: bool | None = None,
    has_encoder_edges: bool | None = None,
    has_conditions: bool | None = None,
) -> ModelGraph:
    """The LLM alone, or behind one or two encoders, or before one or two generators, or all; anything frozen, but not all.

    divisor: a tensor parallel size that all units can have; has_experts: whether some of the LLM's layers have; None: sometimes.
    has_encoder_edges: whether encoders feed encoders, has_conditions: generators; None: sometimes.
    """
    names, generator_names = draw(st.sampled_from(encoders)), draw(st.sampled_from(generators))
    frozen = {name: draw(st.booleans()) for name in (*names, "llm", *generator_names)}
    frozen_projectors = {name: draw(st.booleans()) for name in (*names, *generator_names)}
    if all(frozen.values()) and all(frozen_projectors.values()):
        frozen[draw(st.sampled_from(sorted(frozen)))] = False
    adapters = {name: draw(loras(name)) for name in (*names, "llm", *generator_names)}
    encoder_units = [
        Unit(
            name,
            Role.ENCODER,
            draw(transformers(channels=(4, 8), divisor=divisor, has_rotary_positions=name != "audio")),
            ImageInput(patch_size=2, in_channels=1, merge_size=draw(st.sampled_from([1, 2]))) if name != "audio" else None,
            draw(sounds()) if name == "audio" else None,
            **draw(st.sampled_from(PROJECTORS)),
            lora=adapters[name],
            freeze_module=frozen[name],
            freeze_projector=frozen_projectors[name],
        )
        for name in names
    ]
    llm = Unit(
        "llm",
        Role.BACKBONE,
        draw(transformers(channels=(2, 4, 6), divisor=divisor)),
        untie_embeddings_and_output_weights=draw(st.booleans()),
        lora=adapters["llm"],
        freeze_module=frozen["llm"],
        new_tokens=draw(st.sampled_from([None, None, (2, 5)])),
    )
    if draw(st.integers(0, 3)) == 0 if has_experts is None else has_experts:
        llm = draw(with_experts(llm))
    generator_units = [
        Unit(
            name,
            Role.GENERATOR,
            draw(transformers(channels=(4, 8), divisor=divisor)),
            ImageInput(patch_size=draw(st.sampled_from([1, 3])), in_channels=1, merge_size=draw(st.sampled_from([1, 2]))),
            flow=draw(st.none() | st.sampled_from(FLOWS)),
            lora=adapters[name],
            freeze_module=frozen[name],
            freeze_projector=frozen_projectors[name],
        )
        for name in generator_names
    ]
    edges = (*((name, "llm") for name in names), *(("llm", name) for name in generator_names))
    graph = ModelGraph((*encoder_units, llm, *generator_units), edges)
    chosen = names and (draw(st.integers(0, 4)) == 0 if has_encoder_edges is None else has_encoder_edges)
    graph = draw(encoder_edges(graph, divisor=divisor) if chosen else deepstacks(graph))
    pairs = [(source, target) for source in graph.upstream("llm") for target in generator_names]
    given = draw(st.integers(0, 2)) == 0 if has_conditions is None else has_conditions
    return replace(graph, edges=(*graph.edges, *(pair for pair in pairs if given and draw(st.integers(0, 3)))))


@st.composite
def encoder_edges(draw: st.DrawFn, graph: ModelGraph, *, divisor: int) -> ModelGraph:
    """The same with an encoder behind that of images, which may take features or tokens of a second one as well."""
    first, rest = graph.encoders[0], graph.units[1:]
    join = draw(st.sampled_from(["features", "sequence"]))
    entries, shape = [first], draw(transformers(channels=(4, 8), divisor=divisor))
    if draw(st.integers(0, 2)) == 0:
        shape = replace(shape, num_layers=0)
    if draw(st.booleans()):
        other = draw(transformers(channels=(4, 8), divisor=divisor))
        entries.append(replace(first, name="second", transformer=other, freeze_module=draw(st.booleans()), lora=None))
    if join == "features" and (len(entries) > 1 or draw(st.booleans())):
        norm = draw(st.sampled_from(["patches", "none"]))
        plain = {"has_projector": False, "has_linear_projector": False, "projector_hidden_size": None, "queries": None}
        entries = [replace(each, **plain, freeze_projector=False, projector_norm=norm, lora=None) for each in entries]
        shape = replace(shape, hidden_size=sum(each.merged_size for each in entries))
    last = Unit(
        "joint",
        Role.ENCODER,
        shape,
        join=join,
        **draw(st.sampled_from(PROJECTORS)),
        freeze_module=draw(st.booleans()),
        freeze_projector=draw(st.booleans()),
    )
    inner = [(each.name, last.name) for each in entries]
    kept = [edge for edge in graph.edges if edge[0] != first.name]
    return ModelGraph((*entries, last, *rest), (*inner, (last.name, graph.backbone.name), *kept))


@st.composite
def with_experts(draw: st.DrawFn, llm: Unit) -> Unit:
    """The same LLM with four experts in all of its layers, or in some."""
    experts = Experts(
        num_experts=4,
        router_topk=draw(st.integers(1, 3)),
        ffn_hidden_size=draw(st.sampled_from([None, 12])),
        shared_expert_intermediate_size=draw(st.sampled_from([None, 12])),
        aux_loss_coeff=draw(st.sampled_from([0.0, 0.5])),
        router_pre_softmax=draw(st.booleans()),
    )
    shape = replace(llm.transformer, experts=experts, add_bias_linear=False)
    count = shape.num_layers
    dense = draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    kinds = ("token_embedding", *("transformer" if each in dense else "moe_transformer" for each in range(count)), "head")
    lora = llm.lora
    if lora is not None:
        attention = [name for name in lora.modules("transformer") if name in ("linear_qkv", "linear_proj")]
        lora = replace(lora, targets=(*lora.targets, *(f"moe_transformer.{name}" for name in attention)))
    return replace(llm, transformer=shape, layer_kinds=kinds, lora=lora)


@st.composite
def deepstacks(draw: st.DrawFn, graph: ModelGraph) -> ModelGraph:
    """The same with learned positions of images, and with layers of their encoder that go to the LLM, or without."""

    def changed(unit: Unit) -> Unit:
        if unit.role is not Role.ENCODER or unit.image is None:
            return unit
        in_both = min(unit.transformer.num_layers, graph.backbone.transformer.num_layers)
        most = 0 if unit.has_linear_projector or unit.queries else in_both
        layers = draw(st.sets(st.integers(0, unit.transformer.num_layers - 1), max_size=most)) if most else ()
        position_grid = draw(st.sampled_from([None, 3]))
        may_end_rows = position_grid is None and unit.image.merge_size == 1 and unit.queries is None
        own = {"position_grid": position_grid, "has_row_ends": may_end_rows and draw(st.booleans())}
        return replace(unit, image=replace(unit.image, **own, deepstack_layers=tuple(sorted(layers))))

    return replace(graph, units=tuple(map(changed, graph.units)))
