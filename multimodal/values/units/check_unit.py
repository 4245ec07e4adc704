"""Checks one unit of a model graph: its layers must suit each other and the unit's input."""

import re
from typing import NoReturn

from multimodal.values.errors import ModelError
from multimodal.values.typed_reader import Plain, check_fields
from multimodal.values.units.experts import Experts
from multimodal.values.units.items import problem_of_image, problem_of_waveform
from multimodal.values.units.unit import MOE_TRANSFORMER, Role, Unit

_UNIT_NAME = re.compile(r"[^\W\d_][\w-]{0,63}")


def check_unit(unit: Unit) -> None:
    """Check a unit; raises ModelError with the place and the fix."""
    shape = unit.transformer
    at = Plain(None, f"unit '{unit.name}'", ModelError, ("units", unit.name))
    if not _UNIT_NAME.fullmatch(unit.name):
        at.fail("a unit's name starts with a letter and has letters, digits, _ and - after it, 64 at most; rename the unit")
    check_fields(unit, at=at)

    def fail(key: str, problem: str) -> NoReturn:
        at.inner(key, None, where=at.where).fail(problem)

    if shape.num_layers < 1 and unit.join is None:
        fail("num_layers", "num_layers must be at least 1, found 0; only an encoder that encoders feed may have none; correct it")
    if unit.layer_kinds is not None and len(unit.layer_kinds) != shape.num_layers + 2:
        fail(
            "layers",
            f"layers lists {len(unit.layer_kinds)} layers, expected num_layers + 2 = {shape.num_layers + 2}, the first and the "
            "last layer included; change one of them",
        )
    if unit.module is not None and (problem := _problem_of_module(unit)):
        fail("module", problem)
    if unit.audio is not None and unit.audio.waveform is not None:
        if problem := problem_of_waveform(unit.audio.waveform):
            fail("audio", f"waveform: {problem}")
        if unit.module is None:
            fail("audio", "waveform is what modules of transformers take; give the unit a module, or leave it out")
    if shape.kv_channels is None and shape.hidden_size % shape.num_attention_heads:
        fail(
            "hidden_size",
            f"hidden_size {shape.hidden_size} is not divisible by num_attention_heads "
            f"{shape.num_attention_heads}; change one of them or set kv_channels",
        )
    if shape.num_attention_heads % shape.query_groups:
        fail(
            "num_query_groups",
            f"num_attention_heads {shape.num_attention_heads} is not divisible by num_query_groups {shape.query_groups}; "
            "change one of them",
        )
    if shape.rotary_sections and (unit.role is not Role.BACKBONE or 2 * sum(shape.rotary_sections) != shape.head_channels):
        fail(
            "rotary_sections",
            f"rotary_sections {list(shape.rotary_sections)} must belong to the backbone and add up to half its channels per head "
            f"({shape.head_channels // 2}); correct them",
        )
    if shape.has_interleaved_sections and not shape.rotary_sections:
        fail("has_interleaved_sections", "has_interleaved_sections is of rotary_sections, which are missing; add them")
    if len(shape.rotary_sections) not in (0, 3):
        fail("rotary_sections", f"expected 3 numbers, for time, row and column, found {len(shape.rotary_sections)}; correct them")
    if shape.rotary_scaling and (unit.role is not Role.BACKBONE or len(shape.rotary_scaling) != 4):
        fail("rotary_scaling", f"expected 4 numbers, and of the backbone only, found {len(shape.rotary_scaling)}; correct them")
    if shape.rotary_scaling and shape.rotary_scaling[1] >= shape.rotary_scaling[2]:
        fail("rotary_scaling", "its low_freq_factor must be below its high_freq_factor; correct them")
    dynamic = shape.rotary_dynamic_scaling
    if dynamic and (unit.role is not Role.BACKBONE or len(dynamic) != 2 or shape.rotary_scaling or shape.rotary_sections):
        fail(
            "rotary_dynamic_scaling",
            f"expected 2 numbers, of the backbone only, without rotary_scaling and rotary_sections, found {list(dynamic)}; "
            "correct them",
        )
    if shape.qk_norm_spans_heads and (
        unit.role is not Role.ENCODER or not shape.qk_layernorm or shape.query_groups != shape.num_attention_heads
    ):
        fail(
            "qk_norm_spans_heads",
            "qk_norm_spans_heads belongs to encoders with qk_layernorm and a key for every query head; remove it here",
        )
    if shape.sliding_window is not None and unit.role is not Role.BACKBONE:
        fail("sliding_window", "sliding_window belongs to the backbone; remove it here")
    if shape.sliding_window is not None and shape.experts is not None:
        fail("sliding_window", "layers with experts have no windows; remove sliding_window or experts")
    for key in ("layernorm_zero_centered_gamma", "has_post_norms", "scales_embeddings", "logit_softcap", "rotary_local_base"):
        if getattr(shape, key) and (unit.role is not Role.BACKBONE or shape.experts is not None):
            fail(key, f"{key} belongs to the backbone, without experts; remove it here")
    for key in ("query_scalar", "attention_softcap"):
        if getattr(shape, key) is not None and unit.role is not Role.BACKBONE:
            fail(key, f"{key} belongs to the backbone; remove it here")
    if shape.has_post_norms and shape.has_layer_scale:
        fail("has_post_norms", "has_post_norms is without has_layer_scale; remove one of them")
    if shape.layernorm_zero_centered_gamma and shape.normalization != "RMSNorm":
        fail("layernorm_zero_centered_gamma", "layernorm_zero_centered_gamma is of RMSNorm; correct normalization, or remove it")
    if shape.rotary_local_base is not None and (shape.sliding_window is None or shape.rotary_sections):
        fail("rotary_local_base", "rotary_local_base is of layers with sliding_window, without rotary_sections; remove it")
    if shape.global_layers and (shape.sliding_window is None or max(shape.global_layers) >= shape.num_layers):
        fail(
            "global_layers",
            f"global_layers {list(shape.global_layers)} must be among the num_layers {shape.num_layers} of a model with a "
            "sliding_window; correct them",
        )
    if problem := _problem_of_factors(unit):
        fail("rotary_factors", problem)
    if shape.experts is not None and (problem := _problem_of_experts(unit, shape.experts)):
        fail("experts", problem)
    if unit.deepstack_layers and (unit.has_linear_projector or unit.deepstack_layers[-1] >= shape.num_layers):
        fail(
            "image",
            f"deepstack_layers {list(unit.deepstack_layers)} need projectors of two products and must be below num_layers "
            f"{shape.num_layers}; correct them",
        )
    if not unit.has_projector and (
        unit.has_linear_projector or unit.projector_hidden_size is not None or unit.queries is not None
    ):
        fail("has_projector", "has_projector is false beside has_linear_projector, projector_hidden_size or queries; remove it")
    if not unit.has_projector and unit.freeze_projector:
        fail("freeze_projector", "there is no projector to freeze; remove one of freeze_projector and has_projector")
    if unit.has_linear_projector and unit.projector_hidden_size is not None:
        fail("projector_hidden_size", "a linear projector has no inner width; remove one of the two")
    if unit.queries is not None and (problem := _problem_of_queries(unit)):
        fail("queries", problem)
    rotary_axes = 4 if unit.role is Role.ENCODER or unit.image is not None else 2
    if shape.has_rotary_positions and shape.head_channels % rotary_axes:
        fail(
            "num_attention_heads" if shape.kv_channels is None else "kv_channels",
            f"channels per head ({shape.head_channels}) must be divisible by {rotary_axes} for rotary positions; "
            "change hidden_size, num_attention_heads or kv_channels",
        )
    if unit.role is Role.GENERATOR and unit.image is not None and unit.image.class_token is not None:
        fail("image", "class_token belongs to encoders; remove it here")
    for key, default in (("max_tiles", 1), ("position_grid", None), ("deepstack_layers", ())):
        if unit.role is Role.GENERATOR and unit.image is not None and getattr(unit.image, key) != default:
            fail("image", f"{key} belongs to encoders; remove it here")
    if unit.image is not None and (problem := problem_of_image(unit.image)):
        fail("image", problem)


def _problem_of_module(unit: Unit) -> str:
    image, audio = unit.image, unit.audio
    takes_images = image is not None and image.image_size is not None and image.num_frames == 1
    takes_sound = audio is not None and audio.chunk_tokens is None
    if unit.role is not Role.ENCODER or not (takes_images or takes_sound):
        return (
            "module belongs to encoders of images of one size, or of sound in one piece; give the unit an image with image_size "
            "or audio without chunk_tokens, or leave module out"
        )
    if unit.deepstack_layers:
        return "module is one layer; leave deepstack_layers out"
    if unit.layer_kinds is not None:
        return "module takes the place of all layers but the projector; leave layers out"
    return ""


def _problem_of_factors(unit: Unit) -> str:
    shape, num_pairs = unit.transformer, unit.transformer.head_channels // 2
    given = shape.rotary_factors, shape.rotary_long_factors
    if not any(given) and shape.rotary_short_length is None and shape.rotary_attention_factor == 1.0:
        return ""
    if unit.role is not Role.BACKBONE or shape.rotary_scaling or shape.rotary_dynamic_scaling:
        return "belongs to the backbone, without rotary_scaling and rotary_dynamic_scaling; remove one of them"
    if any(len(each) not in (0, num_pairs) for each in given):
        return (
            f"expected {num_pairs} numbers, one for each channel pair of a head, here and in rotary_long_factors, found "
            f"{len(given[0])} and {len(given[1])}; correct them"
        )
    if not given[0] or (shape.rotary_short_length is None and (given[1] or shape.rotary_attention_factor != 1.0)):
        return (
            "rotary_long_factors and rotary_attention_factor need rotary_factors and rotary_short_length beside them; give all, "
            "or rotary_factors alone"
        )
    if shape.rotary_short_length is None and len(set(given[0])) > 1:
        return "factors that differ need rotary_short_length beside them; add it"
    return ""


def _problem_of_experts(unit: Unit, experts: Experts) -> str:
    if unit.role is not Role.BACKBONE:
        return "experts belong to the backbone; remove them here"
    if experts.router_topk > experts.num_experts:
        return f"router_topk {experts.router_topk} is above num_experts {experts.num_experts}; lower it to at most that"
    if unit.transformer.biases["linear_fc1"]:
        return "experts have no biases; leave add_bias_linear and add_mlp_bias out"
    if MOE_TRANSFORMER not in unit.layers:
        return f"no layer of the list has them; name some {MOE_TRANSFORMER}, or leave experts out"
    return ""


def _problem_of_queries(unit: Unit) -> str:
    assert unit.queries is not None
    if unit.has_linear_projector or unit.projector_hidden_size is not None or unit.deepstack_layers:
        return (
            "queries take the place of has_linear_projector and projector_hidden_size, and do not attend to deepstack_layers; "
            "leave these out"
        )
    shape = unit.queries.shape(unit.transformer)
    if shape.hidden_size % shape.num_attention_heads:
        return (
            f"hidden_size {shape.hidden_size} of queries is not divisible by their num_attention_heads "
            f"{shape.num_attention_heads}; change one of them"
        )
    return ""
