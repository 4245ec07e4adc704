"""A run of the small model with one mutation, or with none to save what others start from; and whether it went as it must."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.cost.layers.registry import read_model
from multimodal.hugging_face.processors import PROCESSOR_NAME, write_image_processor
from tests.distributed.launch import HANG_SECONDS, Launched, as_arguments, launch, read_log, train
from tests.distributed.mutations.data import write_chats
from tests.distributed.mutations.mutation import Given, Inputs, Mutation
from tests.distributed.small_run import NUM_RANKS, working_flags, write_working_files
from tests.unit.data.chat.templates import CHATML, SPECIAL, write_tokenizer

_SIZES = ("--vision-", "--llm-")
_WITHOUT_EFFECT = frozenset(
    {
        *("--plan", "--colocate-units", "--sequence-parallel", "--data-parallel-sharding-strategy", "--schedule"),
        *("--schedule-passes", "--recompute-granularity", "--micro-batch-size", "--balance", "--balance-granularity"),
        *("--balance-num-microbatches", "--merge-encoders", "--refine-encoders", "--unit-costs", "--rearrange-nodes"),
        *("--context-parallel-distribution", "--context-parallel-block-size", "--lengths-from", "--num-workers"),
        *("--save", "--tensorboard-dir", "--report-dir", "--cluster", "--producers", "--producer-token"),
    }
)
"""Flags that say how a run trains or what it writes, and not what it learns: one process does without them."""
_FIX = re.compile(
    r"\b(use|set|give|leave|remove|choose|raise|lower|add|keep|write|rename|replace|correct|change|launch|install|start|list|take|make|"
    r"must be|must|expected|expects|needs|make room|save|resume|put|name|regenerate|copy|repair|convert|re-create|delete|shorten|"
    r"pass|did you mean|has no|are|is one of|invalid choice|lists all flags)\b"
)


def launch_inputs(inputs: Inputs) -> Launched | str:
    shared = {
        flag: value for flag, value in inputs.flags.items() if not any(flag in own for own in inputs.flags_of_rank.values())
    }
    own = {
        rank: as_arguments(
            {flag: value for flag, value in inputs.flags.items() if flag not in shared} | inputs.flags_of_rank.get(rank, {})
        )
        for rank in range(inputs.num_ranks)
    }
    try:
        return launch(
            shared,
            num_ranks=inputs.num_ranks,
            flags_of_rank=own,
            environment_of_rank=inputs.environment_of_rank,
            folder=inputs.folder,
        )
    except subprocess.TimeoutExpired:
        return f"it hangs: no end after {HANG_SECONDS:g} s"


def base_flags(folder: Path) -> dict[str, object]:
    """Return the flags that mutations start from; the run's files are in `folder`."""
    return working_flags(folder) | {
        "--dtype": "float64",
        "--exit-interval": 2,
        "--log-json": folder / "log.jsonl",
        "--no-progress-bar": None,
        "--distributed-timeout-minutes": 0.25,
    }


class Outcome(NamedTuple):
    mutation: Mutation
    exit_codes: tuple[int, ...]
    """By rank; none where it hangs."""
    problems: tuple[str, ...]
    """Empty: as it should be."""
    message: str
    """The refusal, or nothing."""
    seconds: float
    output: str

    @property
    def is_refused(self) -> bool:
        return bool(self.exit_codes) and 0 not in self.exit_codes


def judge(mutation: Mutation, inputs: Inputs, launched: Launched) -> Outcome:
    output, codes = launched.output, launched.exit_codes
    messages = [line for line in output.splitlines() if "error:" in line]
    message = messages[0] if messages else ""
    if all(code == 0 for code in codes):
        problems = ["it was accepted, but must be refused"] if mutation.must_be_refused else _compare(inputs)
    elif 0 in codes:
        problems = [f"some ranks ended well and some did not: {codes}"]
    else:
        problems = _problems_of_refusal(mutation, messages)
    if "Traceback" in output or "frame #" in output:
        problems.append("the output holds a traceback")
    return Outcome(mutation, codes, tuple(problems), message, launched.seconds, output)


def _problems_of_refusal(mutation: Mutation, messages: Sequence[str]) -> list[str]:
    if mutation.area == "environment":  # ranks that do not know each other all say the same
        messages = list(dict.fromkeys(message.rpartition(" [")[0] for message in messages))
    if len(messages) != 1:
        return [f"expected one message, found {len(messages)}"]
    problems = [f"the message does not name {name!r}" for name in mutation.names if name not in messages[0]]
    if not _FIX.search(messages[0].split("error:", 1)[1]):
        problems.append("the message names no fix")
    return problems


def _compare(inputs: Inputs) -> list[str]:
    log = inputs.flags.get("--log-json")
    if log != inputs.folder / "log.jsonl":
        return []
    found = _losses(inputs.folder / "log.jsonl")
    flags = {flag: value for flag, value in inputs.flags.items() if flag not in _WITHOUT_EFFECT and not flag.startswith(_SIZES)}
    alone = Inputs(inputs.folder, inputs.random, flags | {"--log-json": inputs.folder / "alone.jsonl"}, num_ranks=1)
    launched = launch_inputs(alone)
    if isinstance(launched, str) or launched.exit_codes != (0,):
        return [
            f"it was accepted on {NUM_RANKS} ranks, but not on one: {launched if isinstance(launched, str) else launched.output}"
        ]
    expected = _losses(inputs.folder / "alone.jsonl")
    tolerance = 1e-9 if inputs.flags["--dtype"] == "float64" else 2e-2
    if len(found) != len(expected) or any(abs(a - b) > tolerance * abs(b) for a, b in zip(found, expected, strict=True)):
        return [f"losses and norms {found} differ from one process's {expected}"]
    return []


def _losses(log: Path) -> list[float]:
    lines = read_log(log)
    return [line[name] for line in lines for name in ("loss", "grad_norm") if "grad_norm" in line]


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
