"""examples/recipes: every recipe is a run that can start on the GPUs that it names, and says what its plan predicts."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from megatron.runtime.flags.arguments import parse_arguments
from multimodal.values.plan import Plan
from tests.distributed.launch import REPOSITORY, train
from tests.distributed.test_llava_example import write_inputs

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


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llava-1.5-7b-projector", "llava"), ("qwen2.5-vl-7b-full", "qwen2_5_vl"), ("qwen2.5-vl-7b-lora", "qwen2_5_vl")],
)
def test_a_recipe_trains_a_small_model_of_its_kind(name: str, kind: str, tmp_path: Path) -> None:
    """Without its plan, which other sizes replace."""
    model, data = write_inputs(tmp_path, kind)
    small = {"--global-batch-size": 4, "--train-iters": 2, "--micro-batch-size": 1, "--transformer-impl": "local"}
    small |= {
        "--vision-dp": 1,
        "--llm-dp": 1,
        "--data-parallel-sharding-strategy": "optim",
        "--balance": "none",
        "--schedule": "1f1b",
        "--schedule-passes": "",
    }
    small |= {
        "--eval-iters": 0,
        "--num-workers": 0,
        "--lr-warmup-fraction": 0,
        "--log-json": tmp_path / "log.jsonl",
        "--save": tmp_path / "saved",
    }
    entries, _ = train({"--config": FOLDER / f"{name}.yaml", "--load-hf": model, "--data-path": data, **small}, num_ranks=2)
    assert [entry["step"] for entry in entries] == [1, 2]


def test_lengths_are_drawn_alike_each_time() -> None:
    recipe = make_recipes.RECIPES["qwen2.5-omni-7b-full"]
    first, second = (json.dumps(list(make_recipes.drawn_lengths(recipe))) for _ in range(2))
    assert first == second and '"audio_seconds": 0.0' in first and '"image_sizes": ""' in first
