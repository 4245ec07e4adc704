"""Random parts of a unit: shapes of transformers, projectors, adapters, and clips of sound."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from multimodal.values.model_graph import AudioInput, Lora, Queries, Transformer
from tests.distributed.strategies.samples import MAX_AUDIO_TOKENS

PROJECTORS: list[dict[str, Any]] = [
    {},
    {"projector_hidden_size": 6},
    {"has_linear_projector": True, "projector_norm": "merged"},
    {"queries": Queries(3)},
    {"queries": Queries(2, 2, True, hidden_size=12, num_attention_heads=6, ffn_hidden_size=12), "projector_norm": "none"},
]


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
    targets = (*(f"transformer.{name}" for name in chosen), *(f"projector.{name}" for name in projector))
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
