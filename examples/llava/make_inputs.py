"""Write a tiny model of LLaVA's or Qwen2.5-VL's kind, with random weights, and conversations about coloured shapes.

    python examples/llava/make_inputs.py --kind llava --output runs/llava

They stand for what one would bring along: the folder of a model, and a file of conversations (LLaVA's JSON) beside its images.
Needs transformers.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

KINDS = ("llava", "qwen2_5_vl")
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "white": (255, 255, 255)}
SPECIAL = ("<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}ASSISTANT: "
    "{% generation %}{{ message['content'][0]['text'] + '</s>' }}{% endgeneration %}{% else %}"
    "{{ '' if message['role'] == 'system' else 'USER: ' }}"
    "{% for part in message['content'] %}{{ '<image>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else "
    "part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_SHAPE = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
PIXELS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer of bytes with special tokens behind them; returns their ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return {token: tokenizer.token_to_id(token) for token in SPECIAL}


def build_llava(ids: dict[str, int], folder: Path) -> tuple[Any, str, dict[str, Any]]:
    """Return a model, its template, and what its image processor does; write how many placeholders its processor makes."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**shape, image_size=28, patch_size=7)
    ends = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT_SHAPE, **ends), image_token_index=ids["<image>"])
    placeholders = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    described = {"processor_class": "LlavaProcessor", "image_token": "<image>", **placeholders}
    (folder / "processor_config.json").write_text(json.dumps(described, indent=1))
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": 28, "width": 28},
        "size": {"shortest_edge": 28},
    }
    return LlavaForConditionalGeneration(config), LLAVA_TEMPLATE, processor


def build_qwen2_5_vl(ids: dict[str, int], folder: Path) -> tuple[Any, str, dict[str, Any]]:
    """Return a model, its template, and what its image processor does."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 7,
        "window_size": 28,
        "fullatt_block_indexes": [1],
        "out_hidden_size": TEXT_SHAPE["hidden_size"],
    }
    ends = {"bos_token_id": ids["<|im_start|>"], "eos_token_id": ids["<|im_end|>"]}
    text = {**TEXT_SHAPE, **ends, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}
    tokens = {f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, image_token_id=ids["<|image_pad|>"], **tokens)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 7,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 14 * 14, "longest_edge": 56 * 56},
    }
    return Qwen2_5_VLForConditionalGeneration(config), QWEN_TEMPLATE, processor


def write_model(folder: Path, *, kind: str) -> None:
    """Write the folder of a model: config.json, weights, tokenizer, chat template, image processor."""
    import torch

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model, template, processor = {"llava": build_llava, "qwen2_5_vl": build_qwen2_5_vl}[kind](write_tokenizer(folder), folder)
    model.save_pretrained(folder)
    end = "</s>" if kind == "llava" else "<|im_end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **PIXELS, "resample": 3}, indent=1))


def write_data(folder: Path, *, num_samples: int, seed: int = 0) -> Path:
    """Write images and `conversations.json`: most samples about one image, some about two, some about none; returns the file."""
    (folder / "images").mkdir(parents=True)
    choose = random.Random(seed)
    samples = [_sample(index, folder, choose) for index in range(num_samples)]
    (folder / "conversations.json").write_text(json.dumps(samples, indent=1))
    return folder / "conversations.json"


def _sample(index: int, folder: Path, choose: random.Random) -> dict[str, Any]:
    num_images = choose.choice((0, 1, 1, 1, 2))
    names = [f"images/{index}-{number}.png" for number in range(num_images)]
    colours = [_draw(folder / name, choose) for name in names]
    marks = "<image>\n" * num_images
    turns = [(f"{marks}Which colour?", " and ".join(colours))] if names else [("Is there an image?", "no")]
    if num_images == 1:
        turns.append(("Is it red?", "yes" if colours == ["red"] else "no"))
    conversation = [
        {"from": speaker, "value": text} for turn in turns for speaker, text in zip(("human", "gpt"), turn, strict=True)
    ]
    image = {"image": names[0]} if num_images == 1 else {"image": names} if names else {}
    return {"id": str(index), **image, "conversations": conversation}


def _draw(path: Path, choose: random.Random) -> str:
    width, height = choose.randint(28, 64), choose.randint(28, 64)
    name = choose.choice(sorted(COLOURS))
    image = Image.new("RGB", (width, height))
    ImageDraw.Draw(image).ellipse((2, 2, width - 3, height - 3), fill=COLOURS[name])
    image.save(path)
    return name


def main() -> None:
    """Write both, for the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--output", type=Path, required=True, help="New folder, which gets `model`, `data` and `held_out`.")
    parser.add_argument("--num-samples", type=int, default=512)
    arguments = parser.parse_args()
    write_model(arguments.output / "model", kind=arguments.kind)
    write_data(arguments.output / "data", num_samples=arguments.num_samples)
    write_data(arguments.output / "held_out", num_samples=40, seed=1)


if __name__ == "__main__":
    main()
