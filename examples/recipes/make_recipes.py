"""Writes the recipes of this folder: the flags of each training, a plan for a machine, and the plan's prediction.

python examples/recipes/make_recipes.py                                     all of them, as they are here
python examples/recipes/make_recipes.py qwen2.5-vl-7b-full --num-gpus 16 --lengths mine.csv.gz     for your data and machine

--lengths: of your own samples (tools/lengths.py writes them); without, samples are drawn. A plan for one node takes about a
minute, those for 64 and 1,536 GPUs many. Other flags of tools/plan.py may follow, as --flag=value.
"""

import argparse
import contextlib
import csv
import io
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from tools import plan  # noqa: E402

NUM_DRAWN = 4096
FROM_THE_BEGINNING = "vit-22b-gpt-175b"
ALL = {"log-interval": 10, "save-interval": 500, "eval-interval": 500, "eval-iters": 4, "split": "99,1,0"}
COSINE = {"lr-decay-style": "cosine", "lr-warmup-fraction": 0.03}


@dataclass(frozen=True)
class Recipe:
    """The training of a published model, and the samples that its plan is made for."""

    what: str
    source: str
    """The origin of learning rates, batch and the like."""
    model: str
    flags: Mapping[str, Any]
    images: tuple[int, int] = (0, 0)
    """Fewest and most images of a sample."""
    image_side: tuple[int, int] = (336, 336)
    """Median of an image's shorter side in pixels, and the longest one; equal if all are alike."""
    text_tokens: tuple[int, int] = (200, 2000)
    """Median and most."""
    audio_seconds: tuple[float, float] = (0.0, 0.0)
    """Median and longest."""
    num_gpus: int = 8

    @property
    def plan_flags(self) -> list[str]:
        """Those of the training's flags that are also the planner's."""
        found = []
        for flag in ("freeze", "freeze-projector", "lora-rank", "lora-targets"):
            if flag in self.flags:
                value = self.flags[flag]
                found += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
        return found


QWEN_VL = {"global-batch-size": 128, "train-iters": 2000, "seq-length": 4096, **COSINE, "weight-decay": 0.01, "clip-grad": 1.0}
QWEN_SAMPLES: dict[str, Any] = {"images": (1, 4), "image_side": (560, 1344), "text_tokens": (250, 1600)}
QWEN_SOURCE = "public scripts that call the fine-tuning program of Qwen2.5-VL"
LORA_SOURCE = "public scripts that call ms-swift for Qwen2.5-VL (rank 8, alpha 32, learning rate 1e-4); the rest is a choice"
LLAVA = {"seq-length": 2048, **COSINE, "weight-decay": 0.0}
LLAVA_SOURCE = "scripts/v1_5 in haotian-liu/LLaVA"
RECIPES = {
    "llava-1.5-7b-projector": Recipe(
        "LLaVA-1.5 7B, first stage: the projector learns from 558,000 captions",
        LLAVA_SOURCE,
        "llava-1.5-7b",
        {"freeze": ["vision", "llm"], "global-batch-size": 256, "train-iters": 2181, "lr": 1e-3, **LLAVA},
        images=(1, 1),
        text_tokens=(30, 120),
    ),
    "llava-1.5-7b-full": Recipe(
        "LLaVA-1.5 7B, second stage: projector and LLM learn from 665,000 conversations",
        LLAVA_SOURCE,
        "llava-1.5-7b",
        {"freeze": ["vision"], "global-batch-size": 128, "train-iters": 5197, "lr": 2e-5, **LLAVA},
        images=(0, 1),
        text_tokens=(300, 1400),
    ),
    "qwen2.5-vl-7b-projector": Recipe(
        "Qwen2.5-VL 7B, projector alone",
        f"{QWEN_SOURCE} (the projector's rate there)",
        "qwen2.5-vl-7b",
        {"freeze": ["vision", "llm"], "lr": 1e-5, **QWEN_VL},
        **QWEN_SAMPLES,
    ),
    "qwen2.5-vl-7b-full": Recipe(
        "Qwen2.5-VL 7B, all parts, each with a learning rate of its own",
        QWEN_SOURCE,
        "qwen2.5-vl-7b",
        {"lr": 5e-7, "vision-lr": 1e-6, "projector-lr": 1e-5, **QWEN_VL},
        **QWEN_SAMPLES,
    ),
    "qwen2.5-vl-7b-lora": Recipe(
        "Qwen2.5-VL 7B, adapters of rank 8 in the LLM",
        LORA_SOURCE,
        "qwen2.5-vl-7b",
        {"freeze": ["vision"], "freeze-projector": ["vision"], "lora-rank": 8, "lora-alpha": 32, **QWEN_VL, "lr": 1e-4},
        **QWEN_SAMPLES,
    ),
    "internvl3-8b-full": Recipe(
        "InternVL3 8B, projector and LLM",
        "internvl_chat/shell/internvl3.0/2nd_finetune in OpenGVLab/InternVL",
        "internvl3-8b",
        {
            "freeze": ["vision"],
            "global-batch-size": 128,
            "train-iters": 2000,
            "seq-length": 16384,
            "lr": 2e-5,
            **COSINE,
            "weight-decay": 0.05,
        },
        images=(1, 12),
        image_side=(448, 448),
        text_tokens=(300, 3000),
    ),
    "qwen2-audio-7b-lora": Recipe(
        "Qwen2-Audio 7B, adapters of rank 8 in the LLM",
        LORA_SOURCE,
        "qwen2-audio-7b",
        {
            "freeze": ["audio"],
            "freeze-projector": ["audio"],
            "lora-rank": 8,
            "lora-alpha": 32,
            "lr": 1e-4,
            "global-batch-size": 128,
            "train-iters": 2000,
            "seq-length": 2048,
            **COSINE,
            "weight-decay": 0.1,
        },
        text_tokens=(60, 400),
        audio_seconds=(8.0, 30.0),
    ),
    "qwen2.5-omni-7b-full": Recipe(
        "Qwen2.5-Omni 7B (thinker), projectors and LLM, on images, sound and text",
        "a choice: those of qwen2.5-vl-7b-full",
        "qwen2.5-omni-7b",
        {"freeze": ["vision", "audio"], "lr": 5e-7, "projector-lr": 1e-5, **QWEN_VL},
        **{**QWEN_SAMPLES, "images": (0, 3)},
        audio_seconds=(8.0, 30.0),
    ),
    "qwen3-vl-30b-a3b-full": Recipe(
        "Qwen3-VL 30B-A3B, LLM with 128 experts, and projector",
        "a choice, after those of qwen2.5-vl-7b-full",
        "qwen3-vl-30b-a3b",
        {"freeze": ["vision"], "lr": 1e-6, "projector-lr": 1e-5, **QWEN_VL, "global-batch-size": 512},
        **QWEN_SAMPLES,
        num_gpus=64,
    ),
    FROM_THE_BEGINNING: Recipe(
        "ViT-22B and GPT-175B from the beginning, Optimus' largest model",
        "Feng et al., Optimus (model, 1,536 GPUs, batch 1,536); a choice after GPT-3 (learning rate, weight decay, betas)",
        "vit-22b-gpt-175b",
        {
            "global-batch-size": 1536,
            "train-iters": 100000,
            "seq-length": 2048,
            "lr": 6e-5,
            "min-lr": 6e-6,
            "lr-decay-style": "cosine",
            "lr-warmup-iters": 500,
            "weight-decay": 0.1,
            "adam-beta2": 0.95,
            "clip-grad": 1.0,
        },
        images=(1, 1),
        image_side=(448, 448),
        text_tokens=(1000, 1000),
        num_gpus=1536,
    ),
}


def drawn_lengths(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield samples in the columns that --lengths reads: lognormal around the medians, the same at every call."""
    random = np.random.default_rng(0)

    def draw(median: float, most: float) -> float:
        return median if median == most else float(min(most, median * random.lognormal(0.0, 0.6)))

    for index in range(NUM_DRAWN):
        count = int(random.integers(recipe.images[0], recipe.images[1] + 1))
        sides = [draw(*recipe.image_side) for _ in range(count)]
        stretch = [1.0 if recipe.image_side[0] == recipe.image_side[1] else float(random.uniform(1, 1.8)) for _ in sides]
        sizes = ";".join(f"{int(side * wide)}x{int(side)}" for side, wide in zip(sides, stretch, strict=True))
        seconds = draw(*recipe.audio_seconds) if recipe.audio_seconds[0] and random.random() < 0.8 else 0.0
        text = int(max(1, draw(*recipe.text_tokens)))
        yield {"sample_id": index, "image_sizes": sizes, "text_tokens": text, "audio_seconds": round(seconds, 2)}


def make(name: str, recipe: Recipe, arguments: argparse.Namespace, more: list[str]) -> str:
    """Plan, write the plan and the flags beside it, and return the recipe's line of the table."""
    plan_file = FOLDER / "plans" / f"{name}.yaml"
    plan_file.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lengths = arguments.lengths
        if lengths is None:
            lengths = Path(folder) / "drawn.csv"
            with lengths.open("w") as file:
                rows = list(drawn_lengths(recipe))
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        cluster = arguments.cluster or ROOT / "examples" / "clusters" / "h100.yaml"
        flags: dict[str, Any] = {
            "--model": ROOT / "examples" / "models" / f"{recipe.model}.yaml",
            "--cluster": cluster,
            "--num-gpus": arguments.num_gpus or recipe.num_gpus,
            "--global-batch-size": recipe.flags["global-batch-size"],
            "--lengths": lengths,
            "--output": plan_file,
        }
        given = [str(part) for pair in flags.items() for part in pair] + recipe.plan_flags + [*more, "--json"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            if plan.main(given) != 0:
                raise SystemExit(f"{name}: no plan")
    found = json.loads(said.getvalue())
    text = plan_file.read_text().replace(str(plan_file), plan_file.name).replace(f"{ROOT}/", "").replace(str(lengths), "LENGTHS")
    plan_file.write_text(text)
    write_flags(name, recipe, text, num_gpus=found["num_gpus_used"])
    return (
        f"| [`{name}`]({name}.yaml) | {recipe.what} | {found['num_gpus_used']} {Path(cluster).stem.upper()} | "
        f"{found['iteration_seconds']:.2f} s | {found['mfu']:.0%} | {found['peak_memory_bytes'] / 1e9:.0f} GB |"
    )


def write_flags(name: str, recipe: Recipe, plan_text: str, *, num_gpus: int) -> None:
    """Write the recipe: the training's flags, and those that the plan was judged with."""
    (line,) = (line for line in plan_text.splitlines() if line.startswith("#   pretrain_mllm.py --plan "))
    words = shlex.split(line.removeprefix("#   pretrain_mllm.py --plan "))[1:]
    of_plan: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            of_plan[word[2:]] = True
        else:
            of_plan[list(of_plan)[-1]] = yaml.safe_load(word.replace("examples/", "../"))
    start = " --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR" if name == FROM_THE_BEGINNING else " --load-hf DIR"
    if of_plan.get("transformer-impl") == "transformer_engine":
        del of_plan["transformer-impl"]  # the default on CUDA; elsewhere, as for tools/lengths.py, there is none
    config = f"examples/recipes/{name}.yaml"
    if num_gpus <= 8:
        command = f"torchrun --nproc-per-node {num_gpus} pretrain_mllm.py --config {config}{start}"
        more = "--data-path DATA --save RUN --load RUN"
    else:
        command = f"CONFIG={config} RUN=RUN sbatch --nodes={num_gpus // 8} scripts/slurm/pretrain.sh{start}"
        more = "--data-path DATA"
    parts = [
        f"# {recipe.what}.\n# Learning rates and batch: {recipe.source}.\n#\n#   {command} \\\n#       {more}\n",
        as_lines({**recipe.flags, **ALL}),
        "\n# The plan, and what it was made for; for other data, machines or batches: make_recipes.py\n",
        as_lines({"plan": f"plans/{name}.yaml", **of_plan}),
    ]
    if name == FROM_THE_BEGINNING:
        parts.insert(1, as_lines({"model": f"../models/{recipe.model}.yaml"}))
    (FOLDER / f"{name}.yaml").write_text("".join(parts))


def as_lines(flags: Mapping[str, Any]) -> str:
    """Return a configuration file of a line for each flag."""
    return "".join(f"{flag}: {yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}\n" for flag, value in flags.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--lengths", type=Path, help="your samples")
    parser.add_argument("--num-gpus", type=int, help="in place of the recipe's")
    parser.add_argument("--cluster", type=Path, help="in place of examples/clusters/h100.yaml")
    chosen, rest = parser.parse_known_args()
    if unknown := [name for name in chosen.names if name not in RECIPES]:
        parser.error(f"there is no recipe {unknown[0]}; there are {', '.join(RECIPES)}")
    for name in chosen.names or RECIPES:
        print(make(name, RECIPES[name], chosen, rest), flush=True)
