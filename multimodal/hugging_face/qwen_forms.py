"""The encoders of Qwen's models, images at native resolution and Whisper's encoder, beyond what `families.yaml` says of them."""

import math
from typing import Any

from multimodal.hugging_face.architecture import Config, image_of, require
from multimodal.hugging_face.families import encoder_form
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit


def _read_qwen2_vl(config: Config, where: str) -> dict[str, Any]:
    size, ratio = config["embed_dim"], config["mlp_ratio"]
    if not isinstance(size, int) or isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ModelError(f"{where}embed_dim is {size!r} and mlp_ratio {ratio!r}, expected numbers; correct them")
    return {"ffn_hidden_size": int(size * ratio), "image": {"video": {}}}


def _write_qwen2_vl(unit: Unit) -> dict[str, Any]:
    """Return the ratio of widths; reading it back shows that the inner width is no multiple of the hidden size, if it is none."""
    return {"mlp_ratio": unit.transformer.ffn_hidden_size // unit.transformer.hidden_size}


def _check_positions(config: Config, where: str) -> None:
    rotary = config.get("rope_parameters") or {}
    require(rotary, {"rope_type": ("axial", "default"), "rope_theta": (10000, 10000.0)}, where=where)


def _read_qwen2_5_vl(config: Config, where: str) -> dict[str, Any]:
    _check_positions(config, where)
    return {"image": {"video": {"tokens_per_second": config["tokens_per_second"]}}}


def _write_qwen2_5_vl(unit: Unit) -> dict[str, Any]:
    video = image_of(unit).video
    return {} if video is None else {"tokens_per_second": video.tokens_per_second}


def _read_qwen3_vl(config: Config, where: str) -> dict[str, Any]:
    _check_positions(config, where)
    num_positions = config["num_position_embeddings"]
    if not isinstance(num_positions, int) or num_positions < 1 or math.isqrt(num_positions) ** 2 != num_positions:
        raise ModelError(f"{where}num_position_embeddings is {num_positions!r}, expected those of a square; take another model")
    image: dict[str, Any] = {"position_grid": math.isqrt(num_positions)}
    image["deepstack_layers"] = list(config["deepstack_visual_indexes"])
    image["video"] = {"has_timestamps": True, "min_pixels": 128 * 32 * 32, "max_pixels": 768 * 32 * 32}
    return {"image": image}


def _write_qwen3_vl(unit: Unit) -> dict[str, Any]:
    image = image_of(unit)
    return {"num_position_embeddings": (image.position_grid or 0) ** 2, "deepstack_visual_indexes": list(image.deepstack_layers)}


def _read_whisper(config: Config, where: str) -> dict[str, Any]:
    return {"audio": {"merge_factor": 2, "merge": "averaged", "max_tokens": config["max_source_positions"]}}


_MAX_POSITIONS = 1500


def _write_whisper(unit: Unit) -> dict[str, Any]:
    return {"max_source_positions": (unit.audio and unit.audio.num_positions) or _MAX_POSITIONS}


QWEN2_VL = encoder_form("qwen2_vl", _read_qwen2_vl, _write_qwen2_vl)
QWEN2_5_VL, OMNI_VISION = (encoder_form(name, _read_qwen2_5_vl, _write_qwen2_5_vl) for name in ("qwen2_5_vl", "omni_vision"))
QWEN3_VL = encoder_form("qwen3_vl", _read_qwen3_vl, _write_qwen3_vl)
WHISPER = encoder_form("whisper", _read_whisper, _write_whisper)
