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
import yaml
from PIL import Image

from tests.distributed.hugging_face_models import (
    LLAVAS,
    MODELS_WITH_EXPERTS,
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
MODELS = {**LLAVAS, "qwen2-vl": qwen2_vl, "qwen2.5-vl": qwen2_5_vl, "qwen3-vl": qwen3_vl, "pixtral": pixtral}
MODELS |= {"qwen2.5-omni": omni_thinker, "qwen2-audio": partial(qwen2_audio, max_tokens=50)}


class Family(NamedTuple):
    """An entry of exported_folders.yaml."""

    model: str
    processor: str
    marks: str
    tokens: Mapping[str, str]
    ids: Mapping[str, str]
    described: Mapping[str, Any]
    options: Mapping[str, Any] = MappingProxyType({})
    needs_torchvision: bool = False
    hears: bool = False


FAMILIES = {
    name: Family(**entry) for name, entry in yaml.safe_load(Path(__file__).with_name("exported_folders.yaml").read_text()).items()
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
    model, tokenizer = write_text_model(folder, MODELS[family.model], family.tokens)
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
