"""Models of transformers, of every family: the same logits and gradients in float64, in one process and under any plan."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.attention.packed_lengths import order_by_window
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.cost.layers.registry import read_model
from multimodal.data.image_processing import patch_positions
from tests.distributed import hugging_face_models as models
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_comparison import FromFolder, Inputs, Marks, Plans, compare_logits, only_text, weights_of
from tests.distributed.random_source import SampleShape

WITH_IMAGES = (
    SampleShape((("vision", 3, 5), ("vision", 1, 1)), 9, 4),
    SampleShape((), 5, 5),
    SampleShape((("vision", 2, 2),), 7, 3),
    SampleShape((("vision", 4, 3), ("vision", 1, 5), ("vision", 2, 4)), 8, 2),
)


def with_videos(between: int) -> tuple[SampleShape, ...]:
    """Videos of three and two steps; between: positions from one step to the next, 0: each stands alone in the text."""
    video = [("vision", 2, 3, step * between) for step in range(3)]
    first, *others = WITH_IMAGES
    return replace(first, items=(first.items[0], *video)), replace(others[0], items=(*video[:2],), num_text_tokens=8), *others[1:]


WITH_ROWS = (*WITH_IMAGES[:3], SampleShape((("vision", 4, 1), ("vision", 1, 5), ("vision", 2, 4)), 8, 2))
LONGEST = 2 * models.MAX_TOKENS
CLIPS = (
    SampleShape((("audio", 12, 1), ("audio", 5, 1)), 9, 4),
    SampleShape((), 5, 5),
    SampleShape((("audio", LONGEST, 1),), 7, 3),
    SampleShape((("audio", 7, 1), ("audio", LONGEST - 1, 1), ("audio", 3, 1)), 8, 2),
)
"""Clips with 1 or 2 frames of a last token, with a token left over by averaging, and of the longest two lengths."""
IMAGES_AND_CLIPS = (
    SampleShape((("vision", 3, 5), ("audio", 23, 1)), 9, 4),
    SampleShape((("audio", 12, 1),), 5, 5),
    SampleShape((("audio", 5, 1), ("vision", 2, 2), ("audio", 6, 1)), 12, 3),
    SampleShape((("vision", 1, 4), ("vision", 2, 1, 0), ("vision", 2, 1, 7)), 8, 2),
)
IN_PARTS = {"sequence_parallel": True}
SHARED = {"shards_weights": True}
BY_ITEM = {**SHARED, "distribution": TokenDistribution.BY_ITEM}
ZERO_BUBBLE = {**IN_PARTS, "builder": "zb-h1", "recompute": "full"}
OF_TEXTS: Plans = {
    "tp 2, pp 2": ({"llm": (2, 2, 1)}, {}),
    "sequence parallelism, tp 2, cp 2": ({"llm": (2, 1, 1, 2)}, IN_PARTS),
    "zero 3, tp 2, dp 2": ({"llm": (2, 1, 2)}, SHARED),
    "zb-h1, pp 3": ({"llm": (1, 3, 1)}, {"builder": "zb-h1", "recompute": "full"}),
}
OF_EXPERTS: Plans = {
    "shared by two, tp 2, dp 2": ({"llm": (2, 1, 2), "experts": 2}, IN_PARTS),
    "shared by two, pp 2, dp 4": ({"llm": (1, 2, 4), "experts": 2}, {"recompute": "full"}),
    "zero 3, tp 2, dp 2": ({"llm": (2, 1, 2)}, SHARED),
}
OF_IMAGES: Plans = {
    "vision dp 2, llm tp 2 and pp 2": ({"vision": (1, 1, 2), "llm": (2, 2, 1)}, IN_PARTS),
    "vision tp 2 and pp 2, llm zb-h1": ({"vision": (2, 2, 1), "llm": (1, 2, 1)}, ZERO_BUBBLE),
    "cp 2 of both, weights shared": ({"vision": (1, 1, 2, 2), "llm": (1, 1, 2, 2)}, BY_ITEM),
    "cp 4 of the encoder, blocks": ({"vision": (1, 1, 1, 4), "llm": (2, 1, 1)}, {"attention_backend": "blocks"}),
}
OF_DEEPSTACK: Plans = {
    "vision dp 2, llm tp 2 and pp 3": ({"vision": (1, 1, 2), "llm": (2, 3, 1)}, IN_PARTS),
    "vision tp 2 and pp 3, llm zb-h1": ({"vision": (2, 3, 1), "llm": (1, 2, 1)}, ZERO_BUBBLE),
    "cp 2 of both, weights shared": ({"vision": (1, 1, 2, 2), "llm": (1, 1, 2, 2)}, BY_ITEM),
}
OF_ONE_SIZE: Plans = {
    "vision dp 2, llm tp 2 and pp 2": ({"vision": (1, 1, 2), "llm": (2, 2, 1)}, IN_PARTS),
    "vision tp 2 and pp 2, llm zb-h1": ({"vision": (2, 2, 1), "llm": (1, 3, 1)}, {**IN_PARTS, "builder": "zb-h1"}),
    "cp 2 of both, weights shared": ({"vision": (1, 1, 2, 2), "llm": (1, 1, 2, 2)}, SHARED),
}
ON_WHOLE_HEADS: Plans = {
    **OF_ONE_SIZE,
    "vision tp 2 and pp 2, llm zb-h1": ({"vision": (1, 2, 1), "llm": (1, 3, 1)}, {**IN_PARTS, "builder": "zb-h1"}),
}
OF_CLIPS: Plans = {
    "audio dp 2, llm tp 2 and pp 2": ({"audio": (1, 1, 2), "llm": (2, 2, 1)}, IN_PARTS),
    "audio tp 2 and pp 2, llm zb-h1": ({"audio": (2, 2, 1), "llm": (1, 2, 1)}, ZERO_BUBBLE),
    "cp 2 of both, weights shared": ({"audio": (1, 1, 2, 2), "llm": (1, 1, 2, 2)}, SHARED),
}
OF_IMAGES_AND_CLIPS: Plans = {
    "three units apart": ({"vision": (1, 2, 1), "audio": (2, 1, 1), "llm": (2, 2, 1)}, IN_PARTS),
    "zb-h1, cp 2, weights shared": (
        {"vision": (1, 1, 2), "audio": (1, 1, 1, 2), "llm": (1, 1, 2, 2)},
        {**BY_ITEM, "builder": "zb-h1"},
    ),
}


def first_of(plans: Plans) -> Plans:
    return dict(list(plans.items())[:1])


class Family(NamedTuple):
    """A model, the samples that it is given, and the plans under which it must do the same."""

    make: Callable[[], Any]
    shapes: tuple[SampleShape, ...] = models.TEXTS
    plans: Plans = OF_TEXTS
    inputs: Inputs = only_text
    marks: Marks = ()


def of_one_size(name: str) -> Family:
    shapes = models.samples_of_one_size(2 if "internvl" in name else 1)
    plans = ON_WHOLE_HEADS if name == "internvl of six billion" else OF_ONE_SIZE
    return Family(models.LLAVAS[name], shapes, plans, models.images_of_one_size)


def qwen(make: Callable[..., Any], plans: Plans, between: int, marks: Marks = (), **changes: Any) -> Family:
    return Family(partial(make, **changes), with_videos(between), plans, models.images_in_patches, marks)


AROUND_IMAGES = "vision", models.VISION_START, models.VISION_END
AROUND_CLIPS = "audio", models.AUDIO_START, models.AUDIO_END
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
FAMILIES: Mapping[str, Family] = {
    **{name: Family(make) for name, make in models.TEXT_MODELS.items()},
    **{name: Family(make, plans=OF_EXPERTS) for name, make in models.MODELS_WITH_EXPERTS.items()},
    **{name: of_one_size(name) for name in models.LLAVAS},
    "pixtral": Family(models.pixtral, WITH_ROWS, OF_ONE_SIZE, models.images_in_rows),
    "qwen2-vl": qwen(models.qwen2_vl, OF_IMAGES, 1),
    "qwen2.5-vl": qwen(models.qwen2_5_vl, OF_IMAGES, 3, **UNTIED),
    "qwen2.5-vl, tied": qwen(models.qwen2_5_vl, first_of(OF_IMAGES), 3, **TIED),
    # Older versions of transformers find images by the token before them.
    "qwen3-vl": qwen(models.qwen3_vl, OF_DEEPSTACK, 0, (AROUND_IMAGES,), **UNTIED),
    "qwen3-vl, tied": qwen(models.qwen3_vl, first_of(OF_DEEPSTACK), 0, (AROUND_IMAGES,), **TIED),
    "qwen2-audio": Family(models.qwen2_audio, CLIPS, OF_CLIPS, models.clips_and_images),
    "qwen2.5-omni": Family(
        models.omni_thinker, IMAGES_AND_CLIPS, OF_IMAGES_AND_CLIPS, models.clips_and_images, (AROUND_IMAGES, AROUND_CLIPS)
    ),
}
LIKE_OTHERS = "llama", "qwen3", "mixtral with windows", "clip and llama", "siglip to its end", "dinov2 and qwen2"
LIKE_OTHERS += "qwen2.5-vl, tied", "qwen3-vl, tied", "qwen3 with experts and windows", "internvl of six billion"
"""Others of the kind have more to them; Gemma is tied, too."""
UNDER_A_PLAN = "phi3", "gemma3", "mixtral", "internvl", "qwen2.5-vl", "qwen3-vl", "qwen2-audio", "qwen2.5-omni"
"""Files in which weights are joined, norms on both sides, experts, and every kind of encoder and edge."""
SQUARE = {"height": models.GRID * models.PATCH, "width": models.GRID * models.PATCH}
CUT_OUT = {"do_center_crop": True, "size": {"shortest_edge": models.LARGER}, "crop_size": SQUARE}
PROCESSORS = {"registers and llama": {**CUT_OUT, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}}


@pytest.mark.deep(when=lambda name: name in LIKE_OTHERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_transformers(name, ranks, tmp_path, request):
    """Without --all under one plan or, where another family has the same plans and kinds of layers, under none."""
    make, shapes, plans, inputs, marks = FAMILIES[name]
    if not request.config.getoption("all"):
        plans = dict([[*plans.items()][[*FAMILIES].index(name) % len(plans)]]) if name in UNDER_A_PLAN else {}
    if name in PROCESSORS:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    comparison = compare_logits(make, tmp_path / "model", ranks, shapes=shapes, inputs=inputs, marks=marks)
    comparison.assert_under_plans(plans, ranks)


def test_internlm2_is_a_llama_under_other_names(ranks, tmp_path):
    """Its programs are not executed: a Llama's weights are packed as they expect them, group of heads by group."""
    without_biases = partial(models.llama, attention_bias=False, mlp_bias=False)
    llama = compare_logits(without_biases, tmp_path / "llama", ranks, shapes=models.TEXTS)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(as_internlm2(weights_of(llama.folder)), folder / "model.safetensors")
    named = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "rms_norm_eps": 1e-6, "head_dim": 6}
    (folder / "config.json").write_text(json.dumps({**models.SHAPE, **named, "bias": False}))
    graph = read_model(folder)
    assert graph == read_model(llama.folder)
    replace(llama, folder=folder, graph=graph, stepped=None).assert_under_plans(first_of(OF_TEXTS), ranks)


def as_internlm2(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Llama's weights as InternLM2's program reads them: [groups, queries + key + value, channels] rows of one tensor."""
    names = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo"}
    names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"mlp.{ours}_proj": f"feed_forward.{theirs}" for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
    found = {}
    for key, value in weights.items():
        if ".q_proj." in key:
            parts = [weights[key.replace(".q_proj.", f".{each}_proj.")] for each in ("q", "k", "v")]
            groups = [part.unflatten(0, (models.SHAPE["num_key_value_heads"], -1, 6)) for part in parts]
            found[key.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups, dim=1).flatten(0, 2)
        elif "self_attn" not in key or "o_proj" in key:
            name = next((key.replace(theirs, ours) for theirs, ours in names.items() if theirs in key), key)
            found[name] = value.contiguous()
    return found


def test_frozen_towers_are_left_as_they_are(ranks, tmp_path):
    """The projector alone is trained (LLaVA's first stage); its gradients are those of the whole."""
    make, shapes, plans, inputs, _ = FAMILIES["clip and llama"]
    found = compare_logits(make, tmp_path / "model", ranks, shapes=shapes, inputs=inputs)
    frozen = replace(found.graph, units=tuple(replace(unit, freeze_module=True) for unit in found.graph.units))
    gradients = found.expected.gradients
    trained = {key: value for key, value in gradients.items() if key[0] == "vision" and key[1].startswith("layers.3.")}
    assert len(trained) == 4
    sizes, options = plans["vision tp 2 and pp 2, llm zb-h1"]
    expected = replace(found.expected, gradients=trained)
    assert_matches(found.case(sizes, graph=frozen, **options), ranks, run=FromFolder(found.folder), expected=expected)


@pytest.mark.parametrize("grid", [(6, 10), (2, 2), (8, 8), (4, 22)])
def test_windows_are_those_of_transformers(grid):
    vision_utils = pytest.importorskip("transformers.vision_utils", reason="this transformers has no vision_utils")
    index, bounds = vision_utils.get_vision_window_index(torch.tensor([[1, *grid]]), 2, 112, 14)
    positions = torch.from_numpy(patch_positions(grid, merge_size=2))
    order, _, lengths = order_by_window(positions, [len(positions)], size=8)
    assert lengths == tuple(bounds.diff().tolist())
    assert order.tolist() == (4 * index[:, None] + torch.arange(4)).flatten().tolist()
