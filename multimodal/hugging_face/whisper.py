"""Whisper's encoder, also in Qwen2-Audio and Qwen2.5-Omni: two convolutions, a ViT's layers, and an average of tokens."""

from collections.abc import Mapping
from typing import Any

from multimodal.hugging_face.architecture import Config, Encoder, Key, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, grouped_qkv_without_key_bias
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

_DEFAULTS = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
    "initializer_range": 0.02,
    "activation_function": "gelu",
}
_KEYS = (
    Key("encoder_layers", "num_layers"),
    Key("d_model", "hidden_size"),
    Key("encoder_attention_heads", "num_attention_heads"),
    Key("encoder_ffn_dim", "ffn_hidden_size"),
    Key("initializer_range", "init_method_std"),
)
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("gelu",),
    "scale_embedding": (False,),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"), (0, 0.0, None)),
}
SAMPLING_RATE = 16000
"""Samples per second of the sound that encoders receive."""
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "sampling_rate": (SAMPLING_RATE,),
    "hop_length": (160,),
    "n_fft": (400,),
    "dither": (0, 0.0, None),
    "do_normalize": (False, None),
}
"""Values that a feature extractor's keys may have here."""
_SAMPLES: Mapping[str, tuple[Any, ...]] = {"sampling_rate": (SAMPLING_RATE,), "feature_size": (1,)}
"""The same for a feature extractor that leaves samples unchanged."""


def audio_names(prefix: str, *, last_norm: str, product: str | None = None) -> UnitNames:
    """Return the names of an encoder's weights, all of which begin with `prefix`; last_norm: the norm behind its layers.

    product: the matrix behind that norm, if there is one.
    """
    product_names = (Tensor("weight", f"{product}.weight"), Tensor("bias", f"{product}.bias")) if product else ()
    return UnitNames(
        first=(
            Weight("conv1", (f"{prefix}conv1",)),
            Weight("conv2", (f"{prefix}conv2",)),
            Tensor("positions", f"{prefix}embed_positions.weight"),
        ),
        body=(
            Weight("input_layernorm", ("self_attn_layer_norm",)),
            Weight("pre_mlp_layernorm", ("final_layer_norm",)),
            Weight(
                "self_attention.linear_qkv",
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                grouped_qkv_without_key_bias,
            ),
            Weight("self_attention.linear_proj", ("self_attn.out_proj",)),
            Weight("mlp.linear_fc1", ("fc1",)),
            Weight("mlp.linear_fc2", ("fc2",)),
        ),
        last=(Weight("norm", (last_norm,)), *product_names),
        prefix=prefix + "layers.{}.",
    )


def read_audio_unit(given: Config, *, audio: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the plain form of an encoder that averages pairs of tokens; raises ModelError for unsupported values.

    audio: further fields of the audio description.
    """
    config = with_defaults(given, _DEFAULTS)
    require(config, _COMPUTED, where="audio_config: ")
    return {
        "role": "encoder",
        **read_keys(_KEYS, config),
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": True,
        "has_rotary_positions": False,
        "layernorm_epsilon": 1e-5,
        "has_linear_projector": True,
        "projector_norm": "merged",
        "audio": {
            "num_mel_bins": config["num_mel_bins"],
            "merge_factor": 2,
            "merge": "averaged",
            "max_tokens": config["max_source_positions"],
            **(audio or {}),
        },
    }


def write_audio_unit(unit: Unit) -> dict[str, Any]:
    """Return the configuration of an encoder in the form of config.json."""
    assert unit.audio is not None
    num_positions = unit.audio.num_positions or _DEFAULTS["max_source_positions"]
    sizes = {"num_mel_bins": unit.audio.num_mel_bins, "max_source_positions": num_positions}
    return {**{key: values[0] for key, values in _COMPUTED.items()}, **write_keys(_KEYS, unit), **sizes}


def convolution_shapes(unit: Unit, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of both convolutions."""
    size, num_bins = unit.transformer.hidden_size, unit.audio.num_mel_bins if unit.audio is not None else 0
    return {f"{prefix}conv1.weight": (size, num_bins, 3), f"{prefix}conv2.weight": (size, size, 3)}


def _read_whisper(config: Config) -> dict[str, Any]:
    """Return the plain form of a Whisper's encoder, without a projector; raises ModelError for unsupported values."""
    return {**read_audio_unit(config), "has_linear_projector": False, "projector_norm": "patches"}


def _whisper(name: str, prefix: str) -> Encoder:
    names = audio_names(f"{prefix}encoder.", last_norm=f"{prefix}encoder.layer_norm")
    return Encoder(name, _read_whisper, names, lambda key, unit: key.startswith((f"{prefix}decoder.", "proj_out.")))


WHISPERS = (_whisper("WhisperForConditionalGeneration", "model."), _whisper("WhisperModel", ""))


def with_features(unit: dict[str, Any], features: Config) -> dict[str, Any]:
    """Return an encoder with the sound processing of a feature extractor.

    Raises ModelError for unsupported processing.
    """
    audio = unit["audio"]
    if audio.get("waveform") is not None:
        require(features, _SAMPLES, where="the feature extractor's ")
        waveform = {**audio["waveform"], "is_normalised": bool(features.get("do_normalize", True))}
        return {**unit, "audio": {**audio, "waveform": waveform}}
    require(features, {**FEATURES, "feature_size": (audio["num_mel_bins"],)}, where="the feature extractor's ")
    seconds = features.get("chunk_length")
    if audio.get("chunk_tokens") is None or seconds is None:
        return unit
    if not isinstance(seconds, int) or seconds < 1:
        raise ModelError(f"the feature extractor's chunk_length is {seconds!r}, expected seconds; correct it")
    return {**unit, "audio": {**audio, "max_tokens": 50 * seconds}}
