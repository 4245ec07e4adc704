"""The model file of a training command of Megatron: its language model's flags, and the encoders of its multimodal scripts."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_table
from tools.megatron_command import Command

TABLES: Mapping[str, Any] = read_table(Path(__file__).with_suffix(".yaml"))
"""Models and flags that Megatron's scripts name."""


class Flags(dict[str, tuple[str, ...]]):
    """Flags of a command; `read` holds the names of those that something was read from."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.flags)
        self.read: set[str] = set()

    @property
    def is_mock(self) -> bool:
        """True if samples are made, not read."""
        return "mock-data" in self or self.get("dataset-provider") == ("mock",)

    def text(self, *names: str, default: str = "") -> str:
        """Return the value of the first of these flags that is given."""
        self.read |= {name for name in names if name in self}
        return next((self[name][0] for name in names if self.get(name)), default)

    def number(self, *names: str, default: float = 0) -> Any:
        """Return the same as a number; raises ConfigError if it is none."""
        text = self.text(*names, default=str(default))
        try:
            return float(text) if any(letter in text for letter in ".eE") else int(text)
        except ValueError:
            raise ConfigError(f"--{names[0]} {text}: expected a number; give the variables that it is made of") from None

    def has(self, *names: str) -> bool:
        """Return True if one of these flags is given."""
        self.read |= {name for name in names if name in self}
        return any(name in self for name in names)


def read_model(flags: Flags, program: str) -> dict[str, Any]:
    """Return the model file of a command; raises ConfigError for a model that Braid does not have."""
    for name in ("hybrid-layer-pattern", "hybrid-override-pattern", "is-hybrid-model", "multi-latent-attention"):
        if name in flags:
            what = "latent attention" if name.startswith("multi") else "state space layers"
            raise ConfigError(f"--{name}: Braid has no {what}, so this model has no model file; take another model")
    if re.search("mimo_training_llava", program):  # Megatron-Bridge's, whose shape is in its code
        given = TABLES["bridge_llava"] | (TABLES["bridge_llava_audio"] if program.endswith("audio.py") else {})
        flags |= {name: (value,) for name, value in given.items() if name not in flags}
    llm = _language(flags)
    provider = flags.text("model-provider")
    units: dict[str, Any] = {}
    if provider in TABLES["mimo_providers"]:
        units["vision"] = {**TABLES["mimo_vision"]}
        llm |= TABLES["mimo_language"]
        llm.pop("add_bias_linear", None)
    elif program.endswith("pretrain_vlm.py") or provider == "mock":
        own = {name: value for name, value in llm.items() if name in TABLES["like_language"]}
        shape = TABLES["wide"] | own | {"num_layers": flags.number("encoder-num-layers", default=llm["num_layers"])}
        units["vision"] = shape | {"image": _image(flags, {"has_pre_norm": True, "has_patch_bias": False}, "clip")}
        units["vision"] |= {"projector_hidden_size": llm["ffn_hidden_size"], "projector_norm": "none"}
    elif flags.has("language-model-type", "vision-model-type"):
        units["vision"] = _vision(flags)
    if flags.has("audio-encoder-model"):
        units["audio"] = _audio(flags.text("audio-encoder-model"))
    if flags.is_mock and "vision" in units:
        image = units["vision"]["image"]
        patch, merge, side = image["patch_size"], image["merge_size"], image.get("image_size", 224)
        sizes = {"min_pixels": 4 * (patch * merge) ** 2, "max_pixels": max(4 * (patch * merge) ** 2, side**2)}
        units["vision"]["image"] = {"patch_size": patch, "merge_size": merge, "in_channels": 1, **sizes}
        units["vision"]["has_rotary_positions"] = True
    roles = {name: {"role": "encoder", **shape} for name, shape in units.items()}
    return {"units": {**roles, "llm": {"role": "backbone", **llm}}}


def _language(flags: Flags) -> dict[str, Any]:
    kind = flags.text("language-model-type")
    known = TABLES["languages"].get(kind)
    if not flags.has("hidden-size") or not flags.has("num-layers", "decoder-num-layers"):
        raise ConfigError(
            "--num-layers and --hidden-size are not there, so the model is in a checkpoint or a recipe; add the shape's flags, "
            "or start from a folder of Hugging Face with --load-hf, which gives the model"
        )
    if kind and known is None:
        known_types = ", ".join(TABLES["languages"])
        raise ConfigError(f"--language-model-type {kind}: no such model here; known are {known_types}; else use --load-hf DIR")
    width = flags.number("hidden-size")
    flags.has("ffn-hidden-size", "norm-epsilon")
    is_quick = flags.has("quick-geglu") and known is None
    is_gated = is_quick or flags.has("swiglu") or known is not None
    if "squared-relu" in flags and known is None:
        raise ConfigError(
            "--squared-relu: activations are swiglu, geglu_tanh, quick_geglu, gelu, gelu_tanh or quick_gelu; take another model"
        )
    activation = "swiglu" if is_gated else "gelu_tanh" if flags.has("openai-gelu") else "gelu"
    inner = known[0] if known else int(4 * width * 2 / 3) // 64 * 64 if is_gated else 4 * width
    shape = {
        "num_layers": flags.number("decoder-num-layers", "num-layers"),
        "hidden_size": width,
        "num_attention_heads": flags.number("num-attention-heads"),
        "ffn_hidden_size": known[0] if known else flags.number("ffn-hidden-size", default=inner),
        "normalization": flags.text("normalization", default="LayerNorm"),
        "activation": "quick_geglu" if is_quick else activation,
        "layernorm_epsilon": flags.number("norm-epsilon", default=1e-5),
        "rotary_base": flags.number("rotary-base", default=10000),
        "init_method_std": flags.number("init-method-std", default=0.02),
        "untie_embeddings_and_output_weights": flags.has("untie-embeddings-and-output-weights"),
    }
    shape |= {key: flags.number(name) for name, key in TABLES["numbers"].items() if flags.has(name)}
    shape |= {key: True for name, key in TABLES["switches"].items() if flags.has(name)}
    flags.has("group-query-attention")
    if not flags.has("disable-bias-linear") and known is None:
        shape["add_bias_linear"] = True
    if kind.startswith("qwen"):
        shape["add_qkv_bias"] = True
    if flags.has("apply-layernorm-1p") and shape["normalization"] == "RMSNorm" and known is None:
        shape["layernorm_zero_centered_gamma"] = True
    if flags.has("use-rope-scaling"):
        shape["rotary_scaling"] = [flags.number("rope-scaling-factor", default=8.0), 1.0, 4.0, 8192.0]
    if flags.has("num-experts"):
        shape["experts"] = {key: flags.number(name) for name, key in TABLES["experts"].items() if flags.has(name)}
        shape["experts"] |= {"router_pre_softmax": True} if flags.has("moe-router-pre-softmax") else {}
    return shape


def _vision(flags: Flags) -> dict[str, Any]:
    kind, known = flags.text("vision-model-type", default="clip"), TABLES["vision"]
    if kind not in known:
        raise ConfigError(f"--vision-model-type {kind}: no such encoder; known are {', '.join(known)}; else use --load-hf DIR")
    width = flags.number("hidden-size")
    _, inner, norm = TABLES["languages"].get(flags.text("language-model-type"), (0, width, "none"))
    image = _image(flags, known[kind]["image"], kind)
    return known[kind] | {"image": image, "projector_hidden_size": inner, "projector_norm": norm}


def _image(flags: Flags, known: Mapping[str, Any], kind: str) -> dict[str, Any]:
    patch, merge = flags.number("patch-dim", default=16), 2 if flags.has("pixel-shuffle", "use-pixel-shuffle-only") else 1
    image = {"patch_size": patch, "merge_size": merge, **known}
    if flags.has("dynamic-resolution"):
        low = flags.number("dynamic-resolution-min-patches") or 4 * merge**2
        high = flags.number("dynamic-resolution-max-patches") or 4096
        image.pop("has_pre_norm", None)
        return image | {"position_grid": 16, "min_pixels": low * patch**2, "max_pixels": high * patch**2}
    image["image_size"] = flags.number("img-h", "image-size", default=224)
    flags.has("img-w")
    if flags.has("use-tiling"):
        image["max_tiles"] = flags.number("max-num-tiles", default=1)
    num_tokens = flags.number("class-token-len", default=TABLES["class_tokens"].get(kind, 0))
    is_dropped = flags.has("disable-vision-class-token") or merge > 1
    if num_tokens:
        image["class_token"] = "dropped" if is_dropped else "kept"
        image |= {"num_registers": num_tokens - 1} if num_tokens > 1 else {}
    return image


def _audio(kind: str) -> dict[str, Any]:
    if kind not in (known := TABLES["audio"]):
        raise ConfigError(f"--audio-encoder-model {kind}: no such encoder here; known are {', '.join(known)}")
    return known[kind] | TABLES["of_all_audio"]
