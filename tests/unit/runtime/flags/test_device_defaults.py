"""On CUDA, what was not asked for is the fastest that the rest allows; what was asked for stays."""

from pathlib import Path

import pytest
import yaml

from megatron.runtime.flags.arguments import build_plan, choose_trained, parse_arguments
from megatron.runtime.flags.cross_checks import check_plan
from megatron.runtime.flags.device_defaults import with_device_defaults
from multimodal.cost.engine_limits import engine_products
from multimodal.cost.layers.registry import read_model
from tests.unit.runtime.flags.test_answers import machine_of

DOCS = Path(__file__).parents[4] / "docs"


VARIANTS = {
    "plain": "",
    "HF": "--save-hf out",
    "LoRA": "--lora-rank 4",
    "experts": "",
    "FP8": "--fp8-format hybrid",
    "zero bubble": "--schedule zb-h1 --llm-pp 2",
    "waits": "--schedule optimus --llm-tp 2",
    "ZeRO-3": "--data-parallel-sharding-strategy optim_grads_params",
    "resume": "--load saved",
}
EXAMPLES = sorted((DOCS.parent / "examples" / "models").glob("*.yaml"))


def with_experts(model: Path, folder: Path) -> Path:
    """The model with experts in its LLM, which have no biases."""
    document = yaml.safe_load(model.read_text())
    llm = document["units"][read_model(model).backbone.name]
    for name in ("add_bias_linear", "add_mlp_bias"):
        llm.pop(name, None)
    llm.setdefault("experts", {"num_experts": 4})
    changed = folder / model.name
    changed.write_text(yaml.safe_dump(document, sort_keys=False))
    return changed


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_example_has_layers_of_transformer_engine(tmp_path: Path, variant: str) -> None:
    trained, in_bfloat16 = 0, set()
    given = f"--data-path digits --global-batch-size 16 --train-iters 1 --lr 1e-3 {VARIANTS[variant]}"
    with machine_of("CUDA"):
        for model in EXAMPLES if variant in ("plain", "FP8") else EXAMPLES[::8]:
            path = with_experts(model, tmp_path) if variant == "experts" else model
            graph = read_model(path)
            if variant == "waits" and not graph.encoders:
                continue
            sharing = "--colocate-units" if len(graph.units) > 1 else ""
            config = parse_arguments(f"--model {path} {given} {sharing}".split(), environ={"WORLD_SIZE": "8"})
            graph = choose_trained(graph, config.model)
            plan = build_plan(config, graph, 8)
            found = with_device_defaults(config, graph=graph, plan=plan, has_cuda=True)
            check_plan(found, graph=graph, plan=plan)
            assert (found.training.dtype, found.model.transformer_impl) == ("bfloat16", "transformer_engine"), model.name
            trained += 1
            for unit in graph.units if variant == "FP8" else ():
                products = engine_products(graph, unit, max(plan.units[unit.name].tensor_sizes), "tensorwise")
                in_bfloat16 |= {(model.stem, product.name) for product in products if not product.is_in_fp8}
    assert trained >= (40 if variant in ("plain", "FP8") else 5)
    assert in_bfloat16 == ({(name, product) for name in NARROW for product in MLP} if variant == "FP8" else set())


MLP = ("linear_fc1", "linear_fc2")
NARROW = {"entrain-llama-1b", "entrain-llama-3b", "qwen2.5-omni-7b", "qwen2.5-vl-3b", "qwen2.5-vl-7b"}
"""Their vision encoders' MLP is 3,420 wide."""
