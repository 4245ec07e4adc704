"""Qwen's models: Qwen2-VL, Qwen2.5-VL and Qwen3-VL (images, videos), Qwen2-Audio (sound), and Qwen2.5-Omni's thinker (all)."""

from collections.abc import Mapping, Sequence
from typing import Any

from multimodal.hugging_face.architecture import Architecture, Config, require, with_defaults
from multimodal.hugging_face.families import FAMILIES, EncoderForm
from multimodal.hugging_face.llava import LLM_INSIDE, patch_shape
from multimodal.hugging_face.processors import write_feature_extractor, write_image_processor
from multimodal.hugging_face.qwen_forms import OMNI_VISION, QWEN2_5_VL, QWEN2_VL, QWEN3_VL, WHISPER
from multimodal.hugging_face.rotary_positions import rotary_entries
from multimodal.hugging_face.text_families import decoder_names
from multimodal.hugging_face.text_models import read_text_unit, write_model, write_placed_text
from multimodal.hugging_face.weight_names import UnitNames, Weight
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Unit

_TEXTS: Mapping[str, Config] = FAMILIES["qwen_texts"]
_VISION, _AUDIO = "visual.", "audio_tower."
_INSIDE = ((_VISION, "model.visual."), ("model.", "model.language_model."))
"""The spelling of modules inside transformers."""
_IMAGE_TOKENS = {name: f"{name}_token_id" for name in ("image", "video", "vision_start", "vision_end")}
"""The tokenizer's name of a token -> the key of config.json."""


def _read_placed_text(
    config: Config,
    *,
    defaults: Config,
    family: str = "qwen2",
    sections: Sequence[int] = (16, 24, 24),
    is_tied: bool | None = None,
) -> dict[str, Any]:
    """Return an LLM whose tokens have a time, rows and columns, from a configuration beside the encoder's, or around it.

    defaults: values of missing keys; family: its model_type; sections, is_tied: if the configuration says nothing of them.
    """
    given = config.get("text_config") or config
    text = {**with_defaults(given, defaults), "model_type": family}
    if (tied := config.get("tie_word_embeddings", is_tied)) is not None:
        text["tie_word_embeddings"] = tied
    if family != "qwen2":
        require(text, {"use_sliding_window": (False, None)}, where="the LLM's ")
    rotary = rotary_entries(text, where="the LLM's ")
    text.pop("rope_scaling", None)
    kinds = {rotary.pop("rope_type", "default"), rotary.pop("type", "default")} - {"mrope", None}
    unit = read_text_unit({**text, "rope_parameters": {**rotary, "rope_type": max(kinds, default="default")}}, where="the LLM's ")
    return {**unit, "rotary_sections": list(rotary.get("mrope_section", sections))}


def _read_vision(form: EncoderForm, given: Config, text_size: int, *, size_key: str = "out_hidden_size") -> dict[str, Any]:
    """Return the encoder; raises ModelError for unsupported values, and if its output size (`size_key`) is not the LLM's."""
    vision = form.read(given, where="vision_config: ")
    found = with_defaults(given, form.defaults)[size_key]
    if found != text_size:
        raise ModelError(f"vision_config: {size_key} is {found}, but the LLM's hidden_size {text_size}; correct one of them")
    return vision


def _patch_shapes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return the shape of the patch embedding: a convolution over frames, even if there is one frame."""
    vision = next(unit for unit in graph.encoders if unit.image is not None)
    size, channels, *sides = patch_shape(vision)
    return {f"{_VISION}patch_embed.proj.weight": (size, channels, *([1] if len(sides) == 2 else []), *sides)}


def _vision_language(
    name: str,
    model_type: str,
    form: EncoderForm,
    *,
    size_key: str = "out_hidden_size",
    text: Config | None = None,
    llm_fields: Config | None = None,
    **differences: Any,
) -> Architecture:
    """Return the family of an encoder before an LLM whose tokens have rows and columns.

    size_key: the key of the encoder's output size; text: how its LLM is read; llm_fields: fields that the LLM always has.
    """
    how: dict[str, Any] = {"defaults": _TEXTS["of_qwen2_vl"], **(text or {})}

    def read(config: Config) -> dict[str, Any]:
        llm = _read_placed_text(config, **how)
        vision = _read_vision(form, config.get("vision_config") or {}, llm["hidden_size"], size_key=size_key)
        return {"units": {"vision": vision, "llm": {**llm, **(llm_fields or {})}}}

    def write(graph: ModelGraph) -> dict[str, Any]:
        size = {size_key: graph.backbone.transformer.hidden_size}
        vision = {**form.write(graph.encoders[0]), **size, "model_type": model_type}
        llm = write_placed_text(graph.backbone, f"{model_type}_text")
        return write_model(name, model_type, graph, text=llm, vision_config=vision)

    return Architecture(
        name,
        read,
        write,
        (form.names.inside(_VISION), decoder_names()),
        spellings=((), _INSIDE),
        module_spelling=_INSIDE,
        to_processor=write_image_processor,
        shapes=_patch_shapes,
        placeholders=_IMAGE_TOKENS,
        **differences,
    )


def _audio_names(norm: str, product: str) -> UnitNames:
    """Return the names of an encoder of sound; norm: behind its layers, product: the matrix behind that."""
    products = Weight.parameter("weight", f"{product}.weight"), Weight.parameter("bias", f"{product}.bias")
    return WHISPER.names.inside(_AUDIO, (Weight("norm", (f"{_AUDIO}{norm}",)), *products))


def _convolution_shapes(unit: Unit) -> dict[str, tuple[int, ...]]:
    size, num_bins = unit.transformer.hidden_size, unit.audio.num_mel_bins if unit.audio is not None else 0
    return {f"{_AUDIO}conv1.weight": (size, num_bins, 3), f"{_AUDIO}conv2.weight": (size, size, 3)}


def _read_qwen2_audio(config: Config) -> dict[str, Any]:
    text = {"model_type": "qwen2", **(config.get("text_config") or {})}
    require(text, {"tie_word_embeddings": (False, None)}, where="text_config: ")  # transformers ignores it here
    llm = read_text_unit(text, where="text_config: ")
    return {"units": {"audio": WHISPER.read(config.get("audio_config") or {}, where="audio_config: "), "llm": llm}}


def _write_qwen2_audio(graph: ModelGraph) -> dict[str, Any]:
    audio = {**WHISPER.write(graph.encoders[0]), "model_type": "qwen2_audio_encoder"}
    return write_model("Qwen2AudioForConditionalGeneration", "qwen2_audio", graph, audio_config=audio)


_CHUNK_TOKENS = 100
_ENDS_OF_SOUND = f"{_AUDIO}audio_bos_eos_token.weight"
"""Embeddings that transformers has and does not use."""
_MAX_TOKENS = 15000
"""Tokens of 5 minutes, as in the published feature extractor."""
_PARTS = (_AUDIO, _VISION, "model.", "lm_head.")
_OMNI_SPELLINGS = ((), tuple((part, f"thinker.{part}") for part in _PARTS), ((_AUDIO, "model.audio_tower."), *_INSIDE))
"""The thinker alone, and in a whole model; then the spelling of its modules."""
_OMNI_TOKENS = {
    "image": "image_token_index",
    "audio": "audio_token_index",
    "video": "video_token_index",
    **{name: f"{name}_token_id" for name in ("vision_start", "vision_end", "audio_start", "audio_end")},
}
"""The tokenizer's name of a token -> the key of config.json."""


def _read_thinker(config: Config) -> dict[str, Any]:
    config = config.get("thinker_config") or config
    llm = _read_placed_text(config, defaults=_TEXTS["of_omni"], is_tied=False)
    given = config.get("audio_config") or {}
    chunk_tokens = _CHUNK_TOKENS if given.get("n_window") is None else given["n_window"]
    size = llm["hidden_size"]
    if (found := given.get("output_dim", size)) != size:
        raise ModelError(f"audio_config: output_dim is {found}, but the LLM's hidden_size {size}; correct one of them")
    vision = _read_vision(OMNI_VISION, config.get("vision_config") or {}, size)
    vision["image"]["video"] = {"tokens_per_second": config.get("position_id_per_seconds") or 25, "ends_at_last_time": True}
    audio = WHISPER.read(given, where="audio_config: ")
    audio["audio"] |= {"chunk_tokens": chunk_tokens, "max_tokens": _MAX_TOKENS}
    return {"units": {"vision": vision, "audio": audio, "llm": llm}}


def _write_thinker(graph: ModelGraph) -> dict[str, Any]:
    """Return a config.json of the thinker alone."""
    (vision, audio), size = graph.encoders, graph.backbone.transformer.hidden_size
    video = vision.image.video if vision.image is not None else None
    chunks = {"n_window": audio.audio.chunk_tokens if audio.audio is not None else None}
    return write_model(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen2_5_omni_thinker",
        graph,
        **({} if video is None else {"position_id_per_seconds": video.tokens_per_second}),
        text=write_placed_text(graph.backbone, "qwen2_5_omni_text"),
        vision_config={**OMNI_VISION.write(vision), "out_hidden_size": size, "model_type": "qwen2_5_omni_vision_encoder"},
        audio_config={**WHISPER.write(audio), **chunks, "model_type": "qwen2_5_omni_audio_encoder", "output_dim": size},
    )


def _omni(name: str, *, is_alone: bool = False) -> Architecture:
    return Architecture(
        name,
        _read_thinker,
        _write_thinker if is_alone else None,
        (OMNI_VISION.names.inside(_VISION), _audio_names("ln_post", f"{_AUDIO}proj"), decoder_names()),
        is_unused=lambda key, graph: key.endswith(_ENDS_OF_SOUND) or key.startswith(("talker.", "token2wav.")),
        spellings=_OMNI_SPELLINGS,
        to_processor=lambda graph: {  # without the key that means something else for images than for sound
            key: value
            for key, value in (write_image_processor(graph) | write_feature_extractor(graph)).items()
            if key != "do_normalize"
        },
        shapes=lambda graph: {
            **_patch_shapes(graph),
            **_convolution_shapes(graph.encoders[1]),
            _ENDS_OF_SOUND: (2, graph.backbone.transformer.hidden_size),
        },
        placeholders=_OMNI_TOKENS,
    )


QWEN = (
    _vision_language("Qwen2VLForConditionalGeneration", "qwen2_vl", QWEN2_VL, size_key="hidden_size"),
    _vision_language("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", QWEN2_5_VL),
    _vision_language(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        QWEN3_VL,
        text={"defaults": _TEXTS["of_qwen3_vl"], "family": "qwen3", "sections": (24, 20, 20), "is_tied": False},
        llm_fields={"has_interleaved_sections": True},
        written_spelling=_INSIDE,
    ),
)
"""Those with images."""
QWEN2_AUDIO = Architecture(
    "Qwen2AudioForConditionalGeneration",
    _read_qwen2_audio,
    _write_qwen2_audio,
    (_audio_names("layer_norm", "multi_modal_projector.linear"), decoder_names("language_model.")),
    spellings=((), (*LLM_INSIDE, (_AUDIO, "model.audio_tower."))),
    tied_copies=(),
    to_processor=write_feature_extractor,
    shapes=lambda graph: _convolution_shapes(graph.encoders[0]),
    placeholders={"audio": "audio_token_index"},
)
_WITH_TALKER = "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"
QWEN2_5_OMNI = (_omni("Qwen2_5OmniThinkerForConditionalGeneration", is_alone=True), *map(_omni, _WITH_TALKER))
"""The thinker alone, and in a folder with the talker."""
