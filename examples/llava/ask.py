"""Asks a trained model the first question of every held-out sample, by transformers alone, and counts right answers.

python examples/llava/ask.py --model runs/llava/trained --data runs/llava/held_out/conversations.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

MARK = "<image>\n"
MAX_NEW_TOKENS = 32


class Answerer:
    """A folder that --save-hf wrote, as transformers opens it; its own generation_config.json says where answers end."""

    def __init__(self, folder: Path) -> None:
        try:
            self.processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        except ImportError as problem:
            raise SystemExit(f"error: transformers lacks what this processor needs: {' '.join(str(problem).split())}") from None
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()

    @torch.no_grad()
    def answer(self, question: str, images: list[Image.Image]) -> str:
        """Return what the model says, taking the likeliest token each time."""
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        prompt = self.processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        given = self.processor(text=[prompt], images=images or None, return_tensors="pt")
        found = self.model.generate(**given, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        said = self.processor.tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        return str(said)


def ask(answerer: Answerer, sample: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return what the model says and what it should."""
    listed = sample.get("image", [])
    names = [listed] if isinstance(listed, str) else listed
    question, answer = (turn["value"] for turn in sample["conversations"][:2])
    images = [Image.open(folder / name).convert("RGB") for name in names]
    return answerer.answer(question.replace(MARK, ""), images), answer


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what --save-hf wrote")
    parser.add_argument("--data", type=Path, required=True, help="conversations beside their images, which were not trained on")
    parser.add_argument("--num-shown", type=int, default=4)
    options = parser.parse_args()
    answerer, samples = Answerer(options.model), json.loads(options.data.read_text())
    found = [ask(answerer, sample, options.data.parent) for sample in samples]
    for said, answer in found[: options.num_shown]:
        print(f"  {answer}\n    -> {said}")
    print(f"transformers answers {sum(said == answer for said, answer in found)} of {len(found)} held-out samples right")


if __name__ == "__main__":
    main()
