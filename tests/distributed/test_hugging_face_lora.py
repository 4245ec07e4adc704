"""Adapters of a Llama: what PEFT's files say, applied by torch alone to transformers' model, gives the same under any plan."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from safetensors.torch import load_file
from torch.nn.utils import parametrize

from megatron.runtime.checkpoint.checkpoint import save_checkpoint
from megatron.runtime.hugging_face.save_adapter import save_adapter
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.hugging_face.registry import read_config
from multimodal.hugging_face.weight_names import rows_of
from tests.distributed.gradient_case import GradientCase, RankGradients, plan_case, run_step
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_case import FromFolder
from tests.distributed.hugging_face_comparison import Plans, case_of, only_text, run_transformers
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_hugging_face_text import SAMPLES, llama
from tests.distributed.wide_transformers import build_wide_model, double_precision
from tools import convert

RANK, ALPHA = 2, 6.0
PREFIX = "base_model.model."
ALONE = {"llm": (1, 1, 1)}
PLANS: Plans = {
    "tp 2, pp 2": ({"llm": (2, 2, 2)}, {"sequence_parallel": True}),
    "zero 3, tp 2, dp 3": ({"llm": (2, 1, 3)}, {"shards_weights": True}),
}


@dataclass(frozen=True)
class WithAdapters(FromFolder):
    """Also writes adapters, and the model with what they add, into folders of `target`."""

    def __call__(self, case: GradientCase) -> RankGradients:
        session = self.session(case)
        assert self.target is not None
        save_adapter(self.target / "adapter", session=session, like=self.folder)
        save_hugging_face(self.target / "merged", session=session, like=self.folder)
        save_checkpoint(self.target / "run", step=0, session=session, schedulers_state={}, run_state={}, keep_last=1)
        return run_step(session, plan_case(case))


class Added(torch.nn.Module):
    """W + alpha / r x B A."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.down, self.up = torch.nn.Parameter(down), torch.nn.Parameter(up)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + ALPHA / RANK * self.up @ self.down


@contextmanager
def adapted(model: Any, folder: Path) -> Iterator[dict[str, Added]]:
    """The model with the adapters of a folder of PEFT, by the module that they are added to."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    halves, found = load_file(folder / "adapter_model.safetensors"), {}
    for name in config["target_modules"]:
        pair = [halves.pop(f"{PREFIX}{name}.lora_{half}.weight") for half in "AB"]
        found[name] = Added(*pair)
        parametrize.register_parametrization(model.get_submodule(name), "weight", found[name])
    assert not halves, "nothing but adapters"
    yield found
    for name in found:
        parametrize.remove_parametrizations(model.get_submodule(name), "weight", leave_parametrized=False)


def gradients_here(case: GradientCase, folder: Path, theirs: Mapping[str, Added]) -> dict[tuple[str, str], np.ndarray]:
    """Gradients of adapters here: those of all B's that make up one, and the sum of those of the A's that are one."""
    unit, names = case.graph.backbone, read_config(folder)[0].names[0]
    found: dict[tuple[str, str], np.ndarray] = {}
    heads = unit.transformer.num_attention_heads + 2 * unit.transformer.query_groups
    sizes = {"linear_qkv": heads * unit.transformer.head_channels, "linear_fc1": 2 * unit.transformer.ffn_hidden_size}
    for layer in range(1, len(unit.layers) - 1):
        for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            size = sizes.get(module.split(".")[1], unit.transformer.hidden_size)
            up, down = np.zeros((size, RANK)), 0.0
            rows = rows_of(names, unit, f"layers.{layer}.{module}.weight", num_rows=size)
            for part in rows:
                gradient = theirs[part.key.removesuffix(".weight")].up.grad
                assert gradient is not None
                up[part.target : part.target + part.num_rows] = gradient[part.start : part.start + part.num_rows]
            for key in dict.fromkeys(part.key for part in rows):
                gradient = theirs[key.removesuffix(".weight")].down.grad
                assert gradient is not None
                down = down + gradient.numpy()
            found["llm", f"layers.{layer}.{module}.lora_a"], found["llm", f"layers.{layer}.{module}.lora_b"] = down, up
    return found


def test_adapters_are_those_of_peft_under_any_plan(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = build_wide_model(llama, folder)
    graph = read_model(folder)
    graph = adapt_units(graph, linear_layers(graph), rank=RANK, alpha=ALPHA, targets=())
    alone = case_of(graph, SAMPLES, ALONE)
    ranks.run(WithAdapters(folder, tmp_path / "alone"), alone, world_size=1)
    model.requires_grad_(False)
    with adapted(model, tmp_path / "alone" / "adapter") as theirs:
        logits, loss_sum = run_transformers(model, alone.source, only_text)
        expected = RankGradients({"llm": loss_sum}, gradients_here(alone, folder, theirs), {})
    for name, (sizes, options) in {"again": (ALONE, {}), **PLANS}.items():
        assert_matches(
            case_of(graph, SAMPLES, sizes, **options), ranks, run=WithAdapters(folder, tmp_path / name), expected=expected
        )
        for kind, file in (("adapter", "adapter_model.safetensors"), ("merged", "model.safetensors")):
            one, other = (load_file(tmp_path / each / kind / file) for each in ("alone", name))
            assert all(torch.allclose(one[key], other[key], rtol=1e-12, atol=1e-14) for key in one) and one.keys() == other.keys()
    with double_precision():
        merged = type(model).from_pretrained(tmp_path / "alone" / "merged", dtype=torch.float64)
    for mine, of_adapters in zip(run_transformers(merged, alone.source, only_text)[0], logits, strict=True):
        assert np.abs(mine - of_adapters).max() < 1e-12
    converted = tmp_path / "converted"
    assert (
        convert.main(["--load", str(tmp_path / "tp 2, pp 2" / "run"), "--save-adapter", str(converted), "--like", str(folder)])
        == 0
    )
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (converted / name).read_bytes() == (tmp_path / "alone" / "adapter" / name).read_bytes()
    plain = replace(graph, units=(replace(graph.backbone, lora=None),))
    assert read_model(tmp_path / "alone" / "merged") == plain
