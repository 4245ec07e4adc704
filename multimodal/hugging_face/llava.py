"""LLaVA-1.5 and InternVL3: a tower for images, a projector of two layers, and a Llama, Mistral, Qwen2 or Qwen3.

LLaVA's is a CLIP, SigLIP, DINOv2 or Pixtral; InternVL's an InternViT, four patches of which become a token.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from multimodal.hugging_face.architecture import Architecture, Config, image_of, require
from multimodal.hugging_face.encoder_forms import INTERNVIT, PIXTRAL, TOWERS
from multimodal.hugging_face.encoders import is_unused_in_tower, tower_named
from multimodal.hugging_face.families import EncoderForm
from multimodal.hugging_face.processors import write_image_processor
from multimodal.hugging_face.text_families import decoder_names
from multimodal.hugging_face.text_models import read_inner_text, write_model
from multimodal.hugging_face.weight_names import Weight
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Unit

_COMPUTED: Mapping[str, tuple[Any, ...]] = {"projector_hidden_act": ("gelu",), "multimodal_projector_bias": (True,)}
_TOWER = "vision_tower."
_PROJECTOR = (
    Weight("mlp.linear_fc1", ("multi_modal_projector.linear_1",)),
    Weight("mlp.linear_fc2", ("multi_modal_projector.linear_2",)),
)
LLM_INSIDE = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
SPELLINGS = (
    (),
    (("vision_tower.", "vision_tower.vision_model."),),
    (*LLM_INSIDE, ("vision_tower.", "model.vision_tower.")),
    (*LLM_INSIDE, ("vision_tower.", "model.vision_tower.vision_model.")),
)
"""Spellings of transformers 5, of transformers 4, and of the modules inside each of them."""
_BESIDE_LLM: Mapping[str, Any] = {
    "spellings": SPELLINGS,
    "module_spelling": SPELLINGS[2],
    "tied_copies": (("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),),
}


def read_llava(config: Config) -> dict[str, Any]:
    """Return the plain form of the model graph; raises ModelError for unsupported values."""
    require(config, _COMPUTED)
    llm = read_inner_text(config, model_type="llama")
    where, given = "vision_config: ", config.get("vision_config") or {}
    model_type = given.get("model_type")
    tower = TOWERS[PIXTRAL] if model_type == PIXTRAL else tower_named(model_type, where=where)
    class_token = _class_token(config, tower)
    vision = tower.read(given, where=where)
    layer, num_layers = config.get("vision_feature_layer", -2), vision["num_layers"]
    used = layer + num_layers + 1 if isinstance(layer, int) and layer < 0 else layer
    if not isinstance(used, int) or not 1 <= used <= num_layers:
        raise ModelError(
            f"vision_feature_layer is {layer!r}, and only the output of one of the {num_layers} layers can be taken here; take a "
            "model of that kind"
        )
    vision |= {"image": {"merge_size": 1, **vision["image"], "class_token": class_token}, "num_layers": used}
    vision |= {"projector_hidden_size": llm["hidden_size"], "projector_norm": "none"}
    return {"units": {"vision": vision, "llm": llm}}


def _class_token(config: Config, tower: EncoderForm) -> str | None:
    """Return `Image.class_token`: "default" would leave registers among the patches, so they are kept with it or not at all."""
    strategy = config.get("vision_feature_select_strategy", "default")
    class_token = tower.item.get("class_token")
    allowed = ("default", "full") if class_token and "num_register_tokens" not in tower.defaults else ("full",)
    require({"vision_feature_select_strategy": strategy}, {"vision_feature_select_strategy": allowed})
    return "kept" if class_token and strategy == "full" else class_token


def _tower_of(vision: Unit) -> str:
    """Return the model_type of the tower that an encoder may be; reading back its config.json shows if it is."""
    image = image_of(vision)
    if image.has_row_ends or image.has_pre_norm:
        return PIXTRAL if image.has_row_ends else "clip_vision_model"
    if not vision.transformer.has_layer_scale:
        return "siglip_vision_model"
    return "dinov2_with_registers" if image.num_registers else "dinov2"


def _has_last_norm(vision: Unit) -> bool:
    """Return True if the last layer's output passes a norm in some versions of transformers, unless one more layer follows."""
    return _tower_of(vision) == "siglip_vision_model"


def write_llava(graph: ModelGraph) -> dict[str, Any]:
    """Return a config.json for towers all of whose layers are used, without the last one if a norm follows it."""
    (vision,), image = graph.encoders, image_of(graph.encoders[0])
    model_type, has_last_norm = _tower_of(vision), _has_last_norm(vision)
    length: dict[str, Any] = {"image_seq_length": image.num_output_tokens((image.grid_size,) * 2)} if image.image_size else {}
    layers = {"num_hidden_layers": vision.transformer.num_layers + has_last_norm, "vision_use_head": False}
    return write_model(
        "LlavaForConditionalGeneration",
        "llava",
        graph,
        vision_config={**TOWERS[model_type].write(vision), "model_type": model_type, **layers},
        **{key: values[0] for key, values in _COMPUTED.items()},
        **length,
        vision_feature_layer=-1 - has_last_norm,
        vision_feature_select_strategy="default" if image.class_token == "dropped" else "full",
    )


def llava_shapes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the patch embedding and of unused tensors, such as those behind the last used layer."""
    vision = graph.encoders[0]
    if _tower_of(vision) == PIXTRAL:
        return {f"{_TOWER}patch_conv.weight": patch_shape(vision)}
    size, inner = vision.transformer.hidden_size, vision.transformer.ffn_hidden_size
    if vision.transformer.has_layer_scale:
        registers = image_of(vision).num_registers
        more: dict[str, tuple[int, ...]] = {f"{_TOWER}embeddings.register_tokens": (1, registers, size)} if registers else {}
        more |= {f"{_TOWER}layernorm.{half}": (size,) for half in ("weight", "bias")}
        return {**_position_shapes(graph), f"{_TOWER}embeddings.mask_token": (1, size), **more}
    unused: dict[str, tuple[int, ...]] = {"post_layernorm": (size,)}
    if _has_last_norm(vision):
        layer: dict[str, tuple[int, ...]] = dict.fromkeys(("layer_norm1", "layer_norm2"), (size,))
        layer |= {f"self_attn.{part}_proj": (size, size) for part in ("q", "k", "v", "out")}
        layer |= {"mlp.fc1": (inner, size), "mlp.fc2": (size, inner)}
        unused |= {f"encoder.layers.{vision.transformer.num_layers}.{name}": shape for name, shape in layer.items()}
    shapes = {f"{_TOWER}{key}.weight": shape for key, shape in unused.items()}
    shapes |= {f"{_TOWER}{key}.bias": shape[:1] for key, shape in unused.items()}
    return {**shapes, f"{_TOWER}embeddings.patch_embedding.weight": patch_shape(vision)}


def _position_shapes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return the shapes of patch embedding, class token and positions of DINOv2 and InternViT."""
    (vision,), place = graph.encoders, f"{_TOWER}embeddings."
    size = vision.transformer.hidden_size
    return {
        f"{place}patch_embeddings.projection.weight": patch_shape(vision),
        f"{place}cls_token": (1, 1, size),
        f"{place}position_embeddings": (1, image_of(vision).num_positions, size),
    }


def patch_shape(vision: Unit) -> tuple[int, ...]:
    """Return the shape of the patch embedding: over pixels, or over pixels in frames."""
    image = image_of(vision)
    frames = (image.num_frames,) if image.num_frames > 1 else ()
    return (vision.transformer.hidden_size, image.in_channels, *frames, image.patch_size, image.patch_size)


def is_unused(key: str, graph: ModelGraph) -> bool:
    """True for layers behind the one whose output is used, and for tensors behind the last layer."""
    _, _, inside = key.partition(_TOWER)
    return key.endswith("rotary_emb.inv_freq") or is_unused_in_tower(inside, graph.encoders[0])


LLAVA = Architecture(
    "LlavaForConditionalGeneration",
    read_llava,
    write_llava,
    (lambda vision: TOWERS[_tower_of(vision)].names.inside(_TOWER, _PROJECTOR), decoder_names("language_model.")),
    is_unused=is_unused,
    names_modules=lambda unit: unit.image is None or not _tower_of(unit).startswith("dinov2"),
    to_processor=write_image_processor,
    shapes=llava_shapes,
    **_BESIDE_LLM,
    placeholders={"image": "image_token_index"},
)
_OF_INTERNVL: Mapping[str, tuple[Any, ...]] = {
    "downsample_ratio": (0.5,),
    "projector_hidden_act": ("gelu",),
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("default",),
}


def _read_internvl(config: Config) -> dict[str, Any]:
    require(config, _OF_INTERNVL)
    llm = read_inner_text(config, model_type="qwen2")
    norm = {"projector_norm": "merged", "projector_normalization": "LayerNorm", "projector_norm_epsilon": 1e-5}
    vision = INTERNVIT.read(config.get("vision_config") or {}, where="vision_config: ")
    return {"units": {"vision": {**vision, "projector_hidden_size": llm["hidden_size"], **norm}, "llm": llm}}


def _write_internvl(graph: ModelGraph) -> dict[str, Any]:
    (vision,), image = graph.encoders, image_of(graph.encoders[0])
    return write_model(
        "InternVLForConditionalGeneration",
        "internvl",
        graph,
        vision_config={**INTERNVIT.write(vision), "model_type": "internvl_vision"},
        **{key: values[0] for key, values in _OF_INTERNVL.items()},
        image_seq_length=image.num_output_tokens((image.grid_size,) * 2) if image.image_size else None,
    )


INTERNVL = Architecture(
    "InternVLForConditionalGeneration",
    _read_internvl,
    _write_internvl,
    (
        INTERNVIT.names.inside(_TOWER, (Weight("norm", ("multi_modal_projector.layer_norm",)), *_PROJECTOR)),
        decoder_names("language_model."),
    ),
    to_processor=partial(write_image_processor, kind="GotOcr2ImageProcessor"),
    shapes=_position_shapes,
    **_BESIDE_LLM,
    placeholders={"image": "image_token_id"},
)
