"""Checks one unit of a model graph: its layers must suit each other and the unit's input."""

import re
from collections.abc import Iterator
from itertools import chain

from multimodal.values.errors import ModelError
from multimodal.values.typed_reader import Plain, check_fields
from multimodal.values.units.items import problem_of_image, problem_of_waveform
from multimodal.values.units.unit import MOE_KINDS, Role, Unit

_UNIT_NAME = re.compile(r"[^\W\d_][\w-]{0,63}")
Rule = tuple[str, bool, str]
"""The key that a rule is about, True if the unit breaks it, and what is wrong; a rule may rely on those before it."""


def check_unit(unit: Unit) -> None:
    """Check a unit; raises ModelError with the place and the fix."""
    at = Plain(None, f"unit '{unit.name}'", ModelError, ("units", unit.name))
    if not _UNIT_NAME.fullmatch(unit.name):
        at.fail("a unit's name starts with a letter and has letters, digits, _ and - after it, 64 at most; rename the unit")
    check_fields(unit, at=at)
    for key, is_broken, problem in chain(*(rules(unit) for rules in (_layers, _heads, _rotary, _backbone, _projector, _image))):
        if is_broken:
            at.inner(key, None, where=at.where).fail(problem)


def _layers(unit: Unit) -> Iterator[Rule]:
    num_layers, kinds = unit.transformer.num_layers, unit.layer_kinds
    problem = "num_layers must be at least 1, found 0; only an encoder that encoders feed may have none; correct it"
    yield "num_layers", num_layers < 1 and unit.join is None, problem
    if kinds is not None:
        problem = f"layers lists {len(kinds)} layers, expected num_layers + 2 = {num_layers + 2}, the first and the last layer"
        yield "layers", len(kinds) != num_layers + 2, f"{problem} included; change one of them"
    if unit.module is not None:
        image, audio = unit.image, unit.audio
        takes_images = image is not None and image.image_size is not None and image.num_frames == 1
        takes_sound = audio is not None and audio.chunk_tokens is None
        problem = (
            "module belongs to encoders of images of one size, or of sound in one piece; give the unit an image with image_size "
            "or audio without chunk_tokens, or leave module out; or to generators with image and flow, without lora"
        )
        draws = unit.role is Role.GENERATOR and image is not None and unit.flow is not None and unit.lora is None
        yield "module", not draws and (unit.role is not Role.ENCODER or not (takes_images or takes_sound)), problem
        counted = unit.module.operations, unit.module.num_weights, unit.module.kept_values
        problem = "operations, kept_values are three numbers of generators' modules, beside num_weights; count anew, or leave out"
        is_counted = unit.role is Role.GENERATOR and len(counted[0] or ()) == 3 == len(counted[2] or range(3)) and counted[1]
        yield "module", any(each is not None for each in counted) and not is_counted, problem
        yield "module", bool(unit.deepstack_layers), "module is one layer; leave deepstack_layers out"
        yield "module", kinds is not None, "module takes the place of all layers but the projector; leave layers out"
    if unit.flow is not None and unit.flow.has_joint_attention:
        problem = "has_joint_attention is for conditions before the patches; set condition_tokens to 2 or more, or leave it out"
        yield "flow", unit.flow.condition_tokens < 2, problem
        yield "flow", unit.module is not None, "has_joint_attention is for layers of Braid's own; leave it out, or module"
    if unit.flow is not None and unit.flow.form is not None:
        form, wants = unit.flow.form, {"sd3": (True, "2 or more"), "dit": (False, "1")}[unit.flow.form]
        yield "flow", unit.weights is None or unit.image is None, f"form {form} needs weights, a folder of diffusers, and image"
        yield "flow", unit.module is not None, "form is for layers of Braid's own; leave it out, or module"
        found = unit.flow.has_joint_attention, "1" if unit.flow.condition_tokens == 1 else "2 or more"
        problem = f"form {form} has has_joint_attention: {str(wants[0]).lower()} and condition_tokens of {wants[1]}; set these"
        yield "flow", found != wants, problem
        yield "flow", unit.transformer.has_rotary_positions, f"form {form} adds positions; set has_rotary_positions: false"
        problem = "freeze_projector would freeze the embeddings in the same layer; freeze the module, too, or leave it out"
        yield "freeze_projector", unit.freeze_projector and not unit.freeze_module and unit.lora is None, problem
    if unit.new_tokens is not None:
        problem = f"expected the first new token and a larger number, found {list(unit.new_tokens)}; correct them"
        yield "new_tokens", len(unit.new_tokens) != 2 or not range(*unit.new_tokens), problem
    if unit.audio is not None and unit.audio.waveform is not None:
        problem = problem_of_waveform(unit.audio.waveform)
        yield "audio", bool(problem), f"waveform: {problem}"
        problem = "waveform is what modules of transformers take; give the unit a module, or leave it out"
        yield "audio", unit.module is None, problem


def _heads(unit: Unit) -> Iterator[Rule]:
    shape, heads = unit.transformer, unit.transformer.num_attention_heads
    problem = f"hidden_size {shape.hidden_size} is not divisible by num_attention_heads {heads}; change one of them or set"
    yield "hidden_size", shape.kv_channels is None and shape.hidden_size % heads > 0, f"{problem} kv_channels"
    problem = f"num_attention_heads {heads} is not divisible by num_query_groups {shape.query_groups}; change one of them"
    yield "num_query_groups", heads % shape.query_groups > 0, problem
    suits = unit.role is Role.ENCODER and shape.qk_layernorm and shape.query_groups == heads
    problem = "qk_norm_spans_heads belongs to encoders with qk_layernorm and a key for every query head; remove it here"
    yield "qk_norm_spans_heads", shape.qk_norm_spans_heads and not suits, problem


def _rotary(unit: Unit) -> Iterator[Rule]:
    shape, is_backbone, num_pairs = unit.transformer, unit.role is Role.BACKBONE, unit.transformer.head_channels // 2
    sections, scaling, dynamic = shape.rotary_sections, shape.rotary_scaling, shape.rotary_dynamic_scaling
    problem = f"rotary_sections {list(sections)} must belong to the backbone and add up to half its channels per head"
    is_broken = not is_backbone or 2 * sum(sections) != shape.head_channels
    yield "rotary_sections", bool(sections) and is_broken, f"{problem} ({num_pairs}); correct them"
    problem = "has_interleaved_sections is of rotary_sections, which are missing; add them"
    yield "has_interleaved_sections", shape.has_interleaved_sections and not sections, problem
    problem = f"expected 3 numbers, for time, row and column, found {len(sections)}; correct them"
    yield "rotary_sections", len(sections) not in (0, 3), problem
    problem = f"expected 4 numbers, and of the backbone only, found {len(scaling)}; correct them"
    yield "rotary_scaling", bool(scaling) and not (is_backbone and len(scaling) == 4), problem
    problem = "its low_freq_factor must be below its high_freq_factor; correct them"
    yield "rotary_scaling", bool(scaling) and scaling[1] >= scaling[2], problem
    problem = "expected 2 numbers, of the backbone only, without rotary_scaling and rotary_sections, found"
    suits = is_backbone and len(dynamic) == 2 and not scaling and not sections
    yield "rotary_dynamic_scaling", bool(dynamic) and not suits, f"{problem} {list(dynamic)}; correct them"

    long, short_length = shape.rotary_long_factors, shape.rotary_short_length
    has_attention_factor = shape.rotary_attention_factor != 1.0
    if shape.rotary_factors or long or short_length is not None or has_attention_factor:
        problem = "belongs to the backbone, without rotary_scaling and rotary_dynamic_scaling; remove one of them"
        yield "rotary_factors", not is_backbone or bool(scaling or dynamic), problem
        found = len(shape.rotary_factors), len(long)
        problem = f"expected {num_pairs} numbers, one for each channel pair of a head, here and in rotary_long_factors, found"
        yield "rotary_factors", not {*found} <= {0, num_pairs}, f"{problem} {found[0]} and {found[1]}; correct them"
        problem = (
            "rotary_long_factors and rotary_attention_factor need rotary_factors and rotary_short_length beside them; give all, "
            "or rotary_factors alone"
        )
        needs_length = short_length is None and (bool(long) or has_attention_factor)
        yield "rotary_factors", not shape.rotary_factors or needs_length, problem
        problem = "factors that differ need rotary_short_length beside them; add it"
        yield "rotary_factors", short_length is None and len({*shape.rotary_factors}) > 1, problem
    problem = "has_staggered_axes belongs to encoders with rotary positions; remove it here"
    suits = unit.role is Role.ENCODER and shape.has_rotary_positions
    yield "has_staggered_axes", shape.has_staggered_axes and not suits, problem
    num_axes = 4 if unit.role is Role.ENCODER or unit.image is not None else 2
    yield (
        "num_attention_heads" if shape.kv_channels is None else "kv_channels",
        shape.has_rotary_positions and shape.head_channels % num_axes > 0,
        f"channels per head ({shape.head_channels}) must be divisible by {num_axes} for rotary positions; "
        "change hidden_size, num_attention_heads or kv_channels",
    )


def _backbone(unit: Unit) -> Iterator[Rule]:
    shape, is_backbone = unit.transformer, unit.role is Role.BACKBONE
    window, experts = shape.sliding_window, shape.experts
    yield "sliding_window", window is not None and not is_backbone, "sliding_window belongs to the backbone; remove it here"
    for key in ("layernorm_zero_centered_gamma", "has_post_norms", "scales_embeddings", "logit_softcap", "rotary_local_base"):
        is_broken = bool(getattr(shape, key)) and (not is_backbone or experts is not None)
        yield key, is_broken, f"{key} belongs to the backbone, without experts; remove it here"
    for key in ("query_scalar", "attention_softcap"):
        yield key, getattr(shape, key) is not None and not is_backbone, f"{key} belongs to the backbone; remove it here"
    problem = "has_post_norms is without has_layer_scale; remove one of them"
    yield "has_post_norms", shape.has_post_norms and shape.has_layer_scale, problem
    is_broken = shape.layernorm_zero_centered_gamma and shape.normalization != "RMSNorm"
    problem = "layernorm_zero_centered_gamma is of RMSNorm; correct normalization, or remove it"
    yield "layernorm_zero_centered_gamma", is_broken, problem
    is_broken = shape.rotary_local_base is not None and (window is None or bool(shape.rotary_sections))
    problem = "rotary_local_base is of layers with sliding_window, without rotary_sections; remove it"
    yield "rotary_local_base", is_broken, problem
    yield (
        "global_layers",
        bool(shape.global_layers) and (window is None or max(shape.global_layers) >= shape.num_layers),
        f"global_layers {list(shape.global_layers)} must be among the num_layers {shape.num_layers} of a model with a "
        "sliding_window; correct them",
    )
    if experts is not None:
        yield "experts", not is_backbone, "experts belong to the backbone; remove them here"
        problem = f"router_topk {experts.router_topk} is above num_experts {experts.num_experts}; lower it to at most that"
        yield "experts", experts.router_topk > experts.num_experts, problem
        problem = "experts have no biases; leave add_bias_linear and add_mlp_bias out"
        yield "experts", shape.biases["linear_fc1"], problem
        problem = f"no layer of the list has them; name some {MOE_KINDS[0]}, or leave experts out"
        yield "experts", not {*MOE_KINDS} & {*unit.layers}, problem


def _projector(unit: Unit) -> Iterator[Rule]:
    is_linear, has_width = unit.has_linear_projector, unit.projector_hidden_size is not None
    lacks_one, deepstack, num_layers = not unit.has_projector, unit.deepstack_layers, unit.transformer.num_layers
    problem = f"deepstack_layers {list(deepstack)} need projectors of two products and must be below num_layers {num_layers}"
    yield "image", bool(deepstack) and (is_linear or deepstack[-1] >= num_layers), f"{problem}; correct them"
    problem = "has_projector is false beside has_linear_projector, projector_hidden_size or queries; remove it"
    yield "has_projector", lacks_one and (is_linear or has_width or unit.queries is not None), problem
    problem = "there is no projector to freeze; remove one of freeze_projector and has_projector"
    yield "freeze_projector", lacks_one and unit.freeze_projector, problem
    problem = "a linear projector has no inner width; remove one of the two"
    yield "projector_hidden_size", is_linear and has_width, problem
    if unit.queries is not None:
        problem = (
            "queries take the place of has_linear_projector and projector_hidden_size, and do not attend to deepstack_layers; "
            "leave these out"
        )
        yield "queries", is_linear or has_width or bool(deepstack), problem
        shape = unit.queries.shape(unit.transformer)
        size, heads = shape.hidden_size, shape.num_attention_heads
        problem = f"hidden_size {size} of queries is not divisible by their num_attention_heads {heads}; change one of them"
        yield "queries", size % heads > 0, problem


_OF_ENCODERS = dict[str, object].fromkeys(("class_token", "position_grid", "video"))
_OF_ENCODERS |= {"max_tiles": 1, "deepstack_layers": (), "has_row_ends": False}


def _image(unit: Unit) -> Iterator[Rule]:
    if unit.image is None:
        return
    for key in ("latents", "num_mel_bins"):
        is_broken = unit.role is not Role.GENERATOR and getattr(unit.image, key) is not None
        yield "image", is_broken, f"{key} belongs to generators; remove it here"
    for key, default in _OF_ENCODERS.items():
        is_broken = unit.role is Role.GENERATOR and getattr(unit.image, key) != default
        yield "image", is_broken, f"{key} belongs to encoders; remove it here"
    problem = "has_row_ends belongs to encoders that give the LLM every patch; leave it out, or queries and has_projector false"
    yield "image", unit.image.has_row_ends and (unit.queries is not None or not unit.has_projector), problem
    problem = problem_of_image(unit.image)
    yield "image", bool(problem), problem
