"""examples/recipes: every recipe is a run that can start on the GPUs that it names, and says what its plan predicts."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy.io import wavfile

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from megatron.runtime.flags.arguments import parse_arguments
from multimodal.cost.layers.registry import read_model
from multimodal.values.plan import Plan
from tests.distributed.launch import REPOSITORY, train
from tests.distributed.small_run import write_working_files
from tests.distributed.test_exported_folders import FAMILIES, write_source

FOLDER = REPOSITORY / "examples" / "recipes"
_spec = importlib.util.spec_from_file_location("make_recipes", FOLDER / "make_recipes.py")
assert _spec is not None and _spec.loader is not None
make_recipes = importlib.util.module_from_spec(_spec)
sys.modules["make_recipes"] = make_recipes  # where its dataclass looks for names
_spec.loader.exec_module(make_recipes)


@pytest.mark.parametrize("name", make_recipes.RECIPES)
def test_a_recipe_starts_on_its_gpus_and_says_its_prediction(name: str) -> None:
    recipe, config, plan = make_recipes.RECIPES[name], FOLDER / f"{name}.yaml", FOLDER / "plans" / f"{name}.yaml"
    argv = ["--config", str(config), "--data-path", "data.jsonl", "--save", "run"]
    argv += ["--model", str(REPOSITORY / "examples" / "models" / f"{recipe.model}.yaml")]
    num_ranks = Plan.from_dict(yaml.safe_load(plan.read_text())).num_ranks
    assert num_ranks == recipe.num_gpus
    found = parse_arguments(argv, environ={"WORLD_SIZE": str(num_ranks)})
    written = yaml.safe_load(config.read_text())
    assert {flag: written[flag] for flag in recipe.flags} == dict(recipe.flags)
    assert found.training.global_batch_size == recipe.flags["global-batch-size"]
    (row,) = (line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| [`{name}`]"))
    said = dict(line[4:].split(": ", 1) for line in plan.read_text().splitlines() if line.startswith("#   ") and ": " in line)
    seconds, memory = (float(said[key].split()[0]) for key in ("step", "most memory of a GPU"))
    assert f"| {num_ranks} H100 | {seconds:.2f} s |" in row and f"| {memory:.0f} GB |" in row


def write_chats(folder: Path, *, hears: bool) -> Path:
    folder.mkdir()
    kind, lines = "audio" if hears else "image", []
    for index in range(8):
        name = f"{index}.{'wav' if hears else 'png'}"
        if hears:
            wavfile.write(folder / name, 16000, np.random.default_rng(index).normal(size=3000).astype(np.float32))
        else:
            Image.effect_noise((8 + 4 * index, 12), 50).convert("RGB").save(folder / name)
        asked = [{"type": kind, kind: name}, {"type": "text", "text": "what?"}]
        said = [{"type": "text", "text": f"number {index}"}]
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "chats.jsonl"


KINDS = {
    "llava-1.5-7b-projector": "llava",
    "llava-1.5-7b-full": "llava",
    "qwen2.5-vl-7b-projector": "qwen2.5-vl",
    "qwen2.5-vl-7b-full": "qwen2.5-vl",
    "qwen2.5-vl-7b-lora": "qwen2.5-vl",
    "internvl3-8b-full": "internvl",
    "qwen2-audio-7b-lora": "qwen2-audio",
    "qwen2.5-omni-7b-full": "qwen2.5-omni",
    "qwen3-vl-30b-a3b-full": "qwen3-vl",
    "vit-22b-gpt-175b": "",
}
"""Recipe -> the family whose model of two or three layers it trains; empty: a model file, from the beginning."""
LIKE_OTHERS = ("llava-1.5-7b-full", "qwen2.5-vl-7b-projector", "qwen2.5-vl-7b-full")
"""Recipes whose family another one trains, and whose way of training another family."""


@pytest.mark.deep(when=lambda name: name in LIKE_OTHERS)
@pytest.mark.parametrize("name", make_recipes.RECIPES)
def test_a_recipe_trains_a_small_model_of_its_kind(name: str, tmp_path: Path) -> None:
    """A step with all its flags but those of its plan, which other sizes replace."""
    family, model = FAMILIES.get(KINDS[name]), tmp_path / "model"
    hears = family is not None and family.hears
    if family is not None:
        write_source(model, family)
        units, start = read_model(model).unit_names, {"--load-hf": model}
    else:
        model.mkdir()
        write_working_files(model)
        units, start = ("vision", "llm"), {"--model": model / "model.yaml", "--tokenizer-type": "ByteTokenizer"}
    written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    small = {"--global-batch-size": 4, "--train-iters": 1, "--micro-batch-size": 1, "--transformer-impl": "local"}
    small |= {"--balance": "none", "--schedule": "1f1b", "--schedule-passes": "", "--eval-iters": 0}
    small |= {f"--{flag}": 0 for flag in written if flag.startswith("lr-warmup")}
    small |= {f"--no-{flag}": None for flag in ("sequence-parallel", "tp-comm-overlap") if flag in written}
    small |= {"--data-parallel-sharding-strategy": "optim", "--num-workers": 0, **{f"--{unit}-dp": 1 for unit in units}}
    files = {"--data-path": write_chats(tmp_path / "data", hears=hears), "--log-json": tmp_path / "log.jsonl"}
    flags = {"--config": FOLDER / f"{name}.yaml", **start, **files, **small, "--save": tmp_path / "saved"}
    entries, _ = train(flags, num_ranks=len(units))
    assert [entry["step"] for entry in entries] == [1]


@pytest.mark.parametrize("name", ["jobset", "skypilot"])
def test_a_job_for_a_cloud_starts_a_recipe(name: str) -> None:
    """Its command, with the flags that it has there."""
    job = yaml.safe_load((REPOSITORY / "scripts" / "cloud" / f"{name}.yaml").read_text())
    if name == "jobset":
        (node,) = job["spec"]["replicatedJobs"]
        (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
        (*_, command), num_gpus = container["command"], container["resources"]["limits"]["nvidia.com/gpu"]
    else:
        command, num_gpus = job["run"], int(job["resources"]["accelerators"].split(":")[1])
    _, flags = command.split("pretrain_mllm.py ")
    words = flags.replace("/runs/Qwen2.5-VL-7B-Instruct", "examples/models/qwen2.5-vl-7b.yaml").replace("--load-hf", "--model")
    found = parse_arguments(words.split(), environ={"WORLD_SIZE": str(num_gpus * job.get("num_nodes", 1))})
    assert found.checkpoint.save == found.checkpoint.load == Path("/runs/mine") and found.training.global_batch_size == 128


def test_lengths_are_drawn_alike_each_time() -> None:
    recipe = make_recipes.RECIPES["qwen2.5-omni-7b-full"]
    first, second = (json.dumps(list(make_recipes.drawn_lengths(recipe))) for _ in range(2))
    assert first == second and '"audio_seconds": 0.0' in first and '"image_sizes": ""' in first
