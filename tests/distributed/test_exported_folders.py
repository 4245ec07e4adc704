"""What --save-hf writes answers through transformers' Auto classes with no further file, for every family with items."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

import transformers
from PIL import Image

from tests.distributed.hugging_face_models import (
    GRID,
    LLAVAS,
    MODELS_WITH_EXPERTS,
    PATCH,
    TEXT_MODELS,
    omni_thinker,
    pixtral,
    qwen2_5_vl,
    qwen2_audio,
    qwen2_vl,
    qwen3_vl,
)
from tests.unit.data.chat.templates import write_tokenizer
from tools import convert

PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SQUARE = {"size": {"height": GRID * PATCH, "width": GRID * PATCH}}
BOUNDS = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 16, "longest_edge": 400}}
TOKENS = {
    "LlavaProcessor": {"image_token": "<image>"},
    "PixtralProcessor": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    "InternVLProcessor": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "Qwen2AudioProcessor": {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    "Qwen2_5OmniProcessor": {
        **{f"{kind}_token": f"<|{kind.upper()}|>" for kind in ("image", "audio", "video")},
        **{f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")},
    },
}
QWEN_TOKENS = {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video")}
QWEN_TOKENS |= {f"vision_{end}_token": f"<|vision_{end}|>" for end in ("start", "end")}


class Family(NamedTuple):
    make: Callable[[], Any]
    processor: str
    marks: str
    """What the chat template writes for an item."""
    ids: dict[str, str]
    """Fields of config.json that name tokens."""
    described: Mapping[str, Any]
    """preprocessor_config.json."""
    options: Mapping[str, Any] = MappingProxyType({})
    """processor_config.json."""
    needs_torchvision: bool = False
    """As its processor takes videos, too."""
    hears: bool = False


def qwen(make: Callable[[], Any], processor: str, image_processor: str = "Qwen2VLImageProcessor") -> Family:
    ids = {f"{name}_id": token for name, token in QWEN_TOKENS.items()}
    described = {**BOUNDS, "image_processor_type": image_processor}
    return Family(make, processor, "<|vision_start|><|image_pad|><|vision_end|>", ids, described, needs_torchvision=True)


EAR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 4, "chunk_length": 1, "padding_side": "right"}
CLIP = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False, **SQUARE}
STRIDES = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
GOT_OCR = {"image_processor_type": "GotOcr2ImageProcessor", **SQUARE}
ROWS = {"image_processor_type": "PixtralImageProcessor", "patch_size": PATCH, "size": {"longest_edge": 10}}
PIXTRAL = Family(pixtral, "PixtralProcessor", "[IMG]", {"image_token_index": "[IMG]"}, ROWS, {"patch_size": PATCH})
INTERNVL = Family(LLAVAS["internvl"], "InternVLProcessor", "<IMG_CONTEXT>", {"image_token_id": "<IMG_CONTEXT>"}, GOT_OCR)
THINKER = {f"{kind}_token_index": f"<|{kind.upper()}|>" for kind in ("image", "audio")}
THINKER |= {f"{kind}_start_token_id": f"<|{kind}_bos|>" for kind in ("vision", "audio")}
THINKER |= {f"{kind}_end_token_id": f"<|{kind}_eos|>" for kind in ("vision", "audio")}
EYE_AND_EAR = {**EAR, **BOUNDS, "image_processor_type": "Qwen2VLImageProcessor"}
OMNI = Family(omni_thinker, "Qwen2_5OmniProcessor", "<|vision_bos|><|IMAGE|><|vision_eos|>", THINKER, EYE_AND_EAR)
SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>", {"audio_token_index": "<|AUDIO|>"}, EAR
FAMILIES = {
    "llava": Family(LLAVAS["clip and llama"], "LlavaProcessor", "<image>", {"image_token_index": "<image>"}, CLIP, STRIDES),
    "qwen2-vl": qwen(qwen2_vl, "Qwen2VLProcessor"),
    "qwen2.5-vl": qwen(qwen2_5_vl, "Qwen2_5_VLProcessor"),
    "qwen3-vl": qwen(qwen3_vl, "Qwen3VLProcessor"),
    "internvl": INTERNVL._replace(options={"image_seq_length": (GRID // 2) ** 2}, needs_torchvision=True),
    "pixtral": PIXTRAL._replace(needs_torchvision=True),
    "qwen2.5-omni": OMNI._replace(needs_torchvision=True),
    "qwen2-audio": Family(partial(qwen2_audio, max_tokens=50), "Qwen2AudioProcessor", *SOUND, hears=True),
}


def write_text_model(folder: Path, make: Callable[[], Any], tokens: Mapping[str, str]) -> tuple[Any, Any]:
    """Write weights and tokenizer; tokens: special ones beside those of conversations. Returns both."""
    write_tokenizer(folder / "bytes")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "bytes" / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=tokens,
    )
    shutil.rmtree(folder / "bytes")
    torch.manual_seed(0)
    model = make()
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_source(folder: Path, family: Family) -> None:
    """Write the folder of a model as it is published: weights, tokenizer, template, processor."""
    model, tokenizer = write_text_model(folder, family.make, TOKENS.get(family.processor, QWEN_TOKENS))
    for key, token in family.ids.items():
        setattr(model.config, key, tokenizer.convert_tokens_to_ids(token))
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
        "{{ part['text'] if part['type'] == 'text' else '" + family.marks + "' }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    pixels = {} if family.hears else {**PIXELS, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**family.described, **pixels}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": family.processor, **family.options}))


def answer(folder: Path, family: Family) -> tuple[list[int], torch.Tensor]:
    """Ask about an item; returns the tokens of the question and the answer, and what the processor makes of the item."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    kind = transformers.AutoModelForMultimodalLM if family.hears else transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    parts = [{"type": "audio" if family.hears else "image"}, {"type": "text", "text": "what?"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    if family.hears:
        given = processor(text=text, audio=[np.sin(np.arange(6000))], sampling_rate=16000, return_tensors="pt")
    else:
        given = processor(text=text, images=[Image.linear_gradient("L").convert("RGB").resize((12, 8))], return_tensors="pt")
    generated = model.generate(**given, max_new_tokens=4, do_sample=False)
    return generated[0].tolist(), given["input_features" if family.hears else "pixel_values"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_folder_needs_no_further_file(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    if family.needs_torchvision and importlib.util.find_spec("torchvision") is None:
        pytest.skip("its processor needs torchvision, which is not installed")
    source, written = tmp_path / "source", tmp_path / "written"
    write_source(source, family)
    expected, features = answer(source, family)
    assert convert.main(["--load-hf", str(source), "--save-hf", str(written)]) == 0
    shutil.rmtree(source)
    found, theirs = answer(written, family)
    assert found == expected and torch.equal(theirs, features)


@pytest.mark.parametrize("name", [*TEXT_MODELS, *MODELS_WITH_EXPERTS])
def test_an_exported_text_model_needs_no_further_file(name: str, tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    write_text_model(source, (TEXT_MODELS | MODELS_WITH_EXPERTS)[name], {})

    def complete(folder: Path) -> list[int]:
        tokenizer, model = (
            kind.from_pretrained(folder) for kind in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM)
        )
        generated = model.eval().generate(**tokenizer("what?", return_tensors="pt"), max_new_tokens=4, do_sample=False)
        tokens: list[int] = generated[0].tolist()
        return tokens

    expected = complete(source)
    assert convert.main(["--load-hf", str(source), "--save-hf", str(written)]) == 0
    shutil.rmtree(source)
    assert complete(written) == expected
