"""A run of the small model with one mutation, or with none to save what others start from and change."""

import json
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multimodal.cost.layers.registry import read_model
from multimodal.hugging_face.processors import PROCESSOR_NAME, write_image_processor
from tests.distributed.launch import HANG_SECONDS, train
from tests.distributed.mutations.data import write_chats
from tests.distributed.mutations.judge import Outcome, base_flags, judge, launch_inputs
from tests.distributed.mutations.mutation import Given, Inputs, Mutation
from tests.distributed.small_run import NUM_RANKS, write_working_files
from tests.unit.data.chat.templates import CHATML, SPECIAL, write_tokenizer

IMAGE_TOKEN = 264
"""The first id that bytes leave free."""


def save_given(folder: Path) -> Path:
    """Save what mutations start from: a checkpoint and, where transformers is installed, a folder and adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    write_working_files(folder)
    train(base_flags(folder) | {"--save": folder / Given.CHECKPOINT}, num_ranks=NUM_RANKS)
    if find_spec("transformers") is not None:
        small_llava(IMAGE_TOKEN).save_pretrained(folder / Given.FOLDER)
        _save_chat(folder / Given.CHAT)
        adapted = {"--freeze": "vision", "--lora-rank": 2, "--save-adapter": folder / Given.ADAPTER}
        train(_from_folder(folder) | adapted, num_ranks=NUM_RANKS)
    return folder


def _save_chat(folder: Path) -> None:
    write_tokenizer(folder, template=CHATML)
    image_token = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][SPECIAL.index("<|image_pad|>")]["id"]
    small_llava(image_token).save_pretrained(folder, max_shard_size="9KB")
    processor = write_image_processor(read_model(folder))
    (folder / PROCESSOR_NAME).write_text(json.dumps(processor))


def _from_folder(folder: Path) -> dict[str, object]:
    flags = {name: value for name, value in base_flags(folder).items() if name != "--model"}
    return flags | {"--load-hf": folder / Given.FOLDER, "--tokenizer-type": "ByteTokenizer"}


def small_llava(image_token: int) -> Any:
    """Return a LLaVA of two layers each, as transformers builds it."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    shape = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_hidden_layers": 2}
    vision = CLIPVisionConfig(**shape, image_size=16, patch_size=4)
    text = LlamaConfig(**shape, vocab_size=300)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token))


def run_mutation(mutation: Mutation, *, folder: Path, given: Path, seed: int = 0) -> Outcome:
    """Launch the small run with one mutation and judge what became of it.

    folder: a new folder for its files; given: what `save_given` returned.
    """
    folder.mkdir(parents=True)
    write_working_files(folder)
    inputs = Inputs(folder, random.Random(f"{seed} {mutation.name}"), base_flags(folder))
    if mutation.given is not None:
        needed = (Given.FOLDER, mutation.given) if mutation.given is Given.ADAPTER else (mutation.given,)
        for each in needed:
            shutil.copytree(given / each, folder / each)
        inputs.flags = _flags_of(mutation.given, folder)
    mutation.apply(inputs)
    launched = launch_inputs(inputs)
    if isinstance(launched, str):
        return Outcome(mutation, (), (launched,), "", HANG_SECONDS, "")
    return judge(mutation, inputs, launched)


def _flags_of(given: Given, folder: Path) -> dict[str, object]:
    if given is Given.CHECKPOINT:
        return base_flags(folder) | {"--load": folder / given, "--train-iters": 4, "--exit-interval": 4}
    if given is Given.CHAT:
        flags = {name: value for name, value in base_flags(folder).items() if name != "--model"}
        return flags | {"--load-hf": folder / given, "--data-path": write_chats(folder / "data")}
    return _from_folder(folder) | ({"--load-adapter": folder / given} if given is Given.ADAPTER else {})
