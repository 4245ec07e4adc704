"""config.json and processors of models with images and sound: as model graphs and back, what is refused, what is planned."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multimodal.hugging_face.llava import LLAVA, is_unused
from multimodal.hugging_face.processors import write_video_processor
from multimodal.hugging_face.registry import architecture_of
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.errors import ModelError, PlanError
from multimodal.values.model_graph import ImageInput, ModelGraph
from multimodal.values.units.items import VideoInput
from tests.unit.hugging_face.folders import read_folder, written

PUBLISHED: dict[str, Any] = json.loads("""{
"llava": {
  "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
  "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
  "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14}},
"pixtral": {
  "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 10,
  "text_config": {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
    "sliding_window": null, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
    "vocab_size": 131072},
  "vision_config": {"model_type": "pixtral", "head_dim": 64, "hidden_act": "silu", "image_size": 1024, "patch_size": 16,
    "rope_theta": 10000.0},
  "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
"internvl": {
  "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "vision_feature_layer": -1,
  "text_config": {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
    "vocab_size": 151674},
  "vision_config": {"model_type": "internvl_vision", "attention_bias": true, "image_size": [448, 448], "patch_size": [14, 14]}},
"qwen2-vl": {
  "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_act": "silu", "hidden_size": 2048,
  "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
  "vision_config": {"embed_dim": 1280, "hidden_size": 2048, "mlp_ratio": 4, "in_chans": 3},
  "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936},
"qwen2.5-vl": {
  "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36,
  "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
  "use_sliding_window": false, "tie_word_embeddings": true, "vocab_size": 151936,
  "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2},
  "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
"qwen3-vl": {
  "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": true,
  "text_config": {"model_type": "qwen3_vl_text", "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "tie_word_embeddings": true,
    "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"}, "vocab_size": 151936},
  "vision_config": {"model_type": "qwen3_vl", "deepstack_visual_indexes": [5, 11, 17], "depth": 24,
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "num_heads": 16,
    "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2}},
"qwen2-audio": {
  "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio",
  "audio_config": {"model_type": "qwen2_audio_encoder", "activation_function": "gelu", "d_model": 1280,
    "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layers": 32, "num_mel_bins": 128,
    "max_source_positions": 1500, "scale_embedding": false},
  "text_config": {"model_type": "qwen2", "intermediate_size": 11008, "rms_norm_eps": 1e-5, "vocab_size": 156032}},
"qwen2.5-omni": {
  "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "talker_config": {"vocab_size": 8448},
  "thinker_config": {
    "audio_config": {"activation_function": "gelu", "d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
      "encoder_layers": 32, "num_mel_bins": 128, "max_source_positions": 1500, "scale_embedding": false, "n_window": 100,
      "output_dim": 3584},
    "vision_config": {"depth": 32, "hidden_size": 1280, "in_chans": 3, "num_heads": 16, "out_hidden_size": 3584,
      "fullatt_block_indexes": [7, 15]},
    "text_config": {"model_type": "qwen2_5_omni_text", "hidden_size": 3584, "vocab_size": 152064, "rope_theta": 1000000.0,
      "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}}}}
}""")
"""What llava-1.5-7b-hf, pixtral-12b, InternVL3-1B, Qwen2-VL, Qwen2.5-VL-3B, Qwen3-VL-4B, Qwen2-Audio-7B and Qwen2.5-Omni-7B say.

That is, without what computes nothing.
"""
COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}
SOUND = {"feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "dither": 0.0, "chunk_length": 300}
SIGLIP = {"vision_config.model_type": "siglip_vision_model", "vision_config.num_hidden_layers": 27}
SIGLIP["vision_feature_select_strategy"] = "full"


def read(folder: Path, name: str, changes: dict[str, Any] | None = None, processor: Any = None) -> ModelGraph:
    """Read a published configuration; changes: by their keys, with dots between those of a part and of what is in it."""
    config = deepcopy(PUBLISHED[name])
    for path, value in (changes or {}).items():
        *parts, last = path.split(".")
        part = config
        for each in parts:
            part = part[each]
        part[last] = value
    return read_folder(folder, config, processor)


def image_of(graph: ModelGraph) -> ImageInput:
    image = graph.unit("vision").image
    assert image is not None
    return image


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_described_in_full_and_tells_its_family(name: str, tmp_path: Path) -> None:
    graph = read(tmp_path, name)
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    family = "Qwen2_5OmniThinkerForConditionalGeneration" if name == "qwen2.5-omni" else PUBLISHED[name]["architectures"][0]
    assert architecture_of(graph).name == family


def test_pixtral_keeps_sizes_and_ends_rows(tmp_path: Path) -> None:
    processor = {**COLOURS, "do_pad": True, "size": {"longest_edge": 512}, "patch_size": {"height": 16, "width": 16}}
    vision = read(tmp_path, "pixtral", {}, processor).unit("vision")
    assert vision.image is not None
    assert vision.layers == ("patch_embedding", *["transformer"] * 24, "projector")
    assert (vision.image.longest_side, vision.num_output_tokens((3, 5)), vision.keeps_items_whole) == (512, 18, True)
    assert (vision.transformer.activation, vision.transformer.has_staggered_axes) == ("swiglu", True)
    graph = read(tmp_path, "pixtral")
    assert graph.unit("vision").transformer == vision.transformer
    assert architecture_of(graph).to_processor(graph)["size"] == {"longest_edge": 512}
    with pytest.raises(ModelError, match="patch_size is 14, and only 16"):
        read(tmp_path, "pixtral", {}, {**processor, "patch_size": 14})


LARGE = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}
OF_LARGE = {f"vision_config.{key}": value for key, value in LARGE.items()}


def test_the_large_vision_encoder_of_internvl_stays_on_whole_heads(tmp_path: Path) -> None:
    graph = read(tmp_path, "internvl", OF_LARGE)
    (vision,) = graph.encoders
    shape = vision.transformer
    assert (shape.normalization, shape.qk_norm_spans_heads, vision.projector_normalization) == ("RMSNorm", True, "LayerNorm")
    assert list(shape.biases.values()) == [False, True, True, True]
    assert architecture_of(graph).name == "InternVLForConditionalGeneration"
    assert {key: written(graph)["vision_config"][key] for key in LARGE} == LARGE
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    sizes = {"vision": UnitSizes(2, data_parallel_size=1), "llm": UnitSizes(1, data_parallel_size=1)}
    with pytest.raises(PlanError, match="norms of queries and keys over all heads"):
        plan_disaggregated(graph, sizes=sizes, world_size=3)


def test_newer_versions_nest_the_llm_of_qwen2_5_vl(tmp_path: Path) -> None:
    published, beside = PUBLISHED["qwen2.5-vl"], ("architectures", "model_type", "vision_config", "tie_word_embeddings")
    text = {key: value for key, value in published.items() if key not in ("architectures", "vision_config", "rope_scaling")}
    positions = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": text.pop("rope_theta")}
    text |= {"model_type": "qwen2_5_vl_text", "rope_parameters": positions}
    older = read(tmp_path, "qwen2.5-vl")
    assert read_folder(tmp_path, {**{key: published[key] for key in beside}, "text_config": text}) == older


@pytest.mark.parametrize("num_frames", [1, 2])
def test_patches_are_convolved_over_frames_be_they_one(num_frames: int, tmp_path: Path) -> None:
    graph = read(tmp_path, "qwen2.5-vl", {"vision_config.temporal_patch_size": num_frames})
    assert architecture_of(graph).shapes(graph) == {"visual.patch_embed.proj.weight": (1280, 3, num_frames, 14, 14)}


def test_a_whole_omni_model_is_its_thinker(tmp_path: Path) -> None:
    pixels = {"image_mean": [0.1], "image_std": [1.0], "min_pixels": 3136, "patch_size": 14}
    graph = read(tmp_path, "qwen2.5-omni", {}, {**SOUND, **pixels})
    assert graph.unit_names == ("vision", "audio", "llm")
    audio = graph.unit("audio")
    assert audio.audio is not None
    assert (audio.audio.chunk_tokens, audio.audio.num_positions, audio.audio.max_tokens) == (100, 0, 15000)
    assert audio.layers.count("windowed_transformer") == 32
    assert (image_of(graph).mean, graph.unit("vision").layers.count("transformer")) == ((0.1,), 2)
    assert (graph.backbone.transformer.rotary_sections, graph.backbone.ties_embeddings) == ((16, 24, 24), False)
    thinker = PUBLISHED["qwen2.5-omni"]["thinker_config"]
    assert read_folder(tmp_path, {**thinker, "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]}) == graph


def test_image_processors_are_obeyed(tmp_path: Path) -> None:
    processor = {**COLOURS, "do_center_crop": False, "size": {"shortest_edge": 336}}
    image = image_of(read(tmp_path, "llava", {}, processor))
    assert (image.mean, image.std, image.fit) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "stretch")
    processor = {**COLOURS, "min_pixels": 784, "max_pixels": 50176, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    image = image_of(read(tmp_path, "qwen2.5-vl", {}, processor))
    assert (image.mean, image.min_pixels, image.max_pixels) == ((0.1, 0.2, 0.3), 784, 50176)
    assert image.video == VideoInput(784, 50176, tokens_per_second=4), "that of images, without another one"
    of_videos = {**processor, "size": {"shortest_edge": 1000, "longest_edge": 9000}, "cap_pixels_per_frame": True}
    for key in ("min_pixels", "max_pixels"):
        of_videos.pop(key)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    graph = read(tmp_path, "qwen2.5-vl", {}, processor)
    assert image_of(graph).video == VideoInput(1000, 9000, max_tokens=128000, tokens_per_second=4)
    assert write_video_processor(graph).items() >= {"size": of_videos["size"], "max_video_tokens": 128000}.items()
    (tmp_path / "video_preprocessor_config.json").unlink()
    cut = {**COLOURS, "size": {"height": 448, "width": 448}}
    for changes, tiles in (({}, 1), ({"crop_to_patches": True}, 12), ({"crop_to_patches": True, "max_patches": 6}, 6)):
        assert image_of(read(tmp_path, "internvl", {}, {**cut, "min_patches": 1, **changes})).max_tiles == tiles


def test_weights_that_nothing_is_computed_with_are_known(tmp_path: Path) -> None:
    graph = read(tmp_path, "llava")
    unused = ("encoder.layers.23.mlp.fc1.bias", "post_layernorm.weight", "head.probe", "embeddings.position_ids")
    for prefix in ("vision_tower.", "vision_tower.vision_model."):
        assert all(is_unused(prefix + name, graph) for name in unused)
        assert not any(is_unused(prefix + name, graph) for name in ("encoder.layers.22.mlp.fc1.bias", "pre_layrnorm.weight"))


def test_llava_is_written_with_the_layers_that_are_used(tmp_path: Path) -> None:
    """A tower with a norm behind it has one more layer."""
    graph = read(tmp_path, "llava")
    config = written(graph)
    assert (config["vision_config"]["num_hidden_layers"], config["vision_feature_layer"]) == (23, -1)
    assert (config["vision_feature_select_strategy"], config["image_seq_length"]) == ("default", 576)
    assert "vision_tower.post_layernorm.weight" in LLAVA.shapes(graph)
    graph = read(tmp_path, "llava", SIGLIP)
    config, shapes = written(graph), LLAVA.shapes(graph)
    assert (config["vision_config"]["num_hidden_layers"], config["vision_feature_layer"]) == (27, -2)
    assert shapes["vision_tower.encoder.layers.26.mlp.fc1.weight"] == (4096, 1024)
    assert shapes["vision_tower.embeddings.patch_embedding.weight"] == (1024, 3, 14, 14)


def test_a_model_that_is_none_of_transformers_is_said(tmp_path: Path) -> None:
    graph = read(tmp_path, "llava")
    (vision,) = graph.encoders
    merged = replace(graph, units=(replace(vision, projector_norm="merged"), graph.backbone))
    message = "for LlavaForConditionalGeneration unit 'vision' would need projector_norm none, found merged"
    with pytest.raises(ModelError, match=message):
        architecture_of(merged)
    units = (vision, replace(vision, name="other"), graph.backbone)
    twice = replace(graph, units=units, edges=(("vision", "llm"), ("other", "llm")))
    with pytest.raises(ModelError, match="Omni.* would have to take image and audio, found image and image"):
        architecture_of(twice)
