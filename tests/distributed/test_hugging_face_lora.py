"""Adapters of a Llama: what PEFT's files say, applied by torch alone to transformers' model, gives the same under any plan."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize

from megatron.runtime.checkpoint.checkpoint import save_checkpoint
from megatron.runtime.hugging_face.load_adapter import load_adapter
from megatron.runtime.hugging_face.save_weights import save_adapter, save_hugging_face
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.hugging_face.adapter_files import read_peft_adapter
from multimodal.hugging_face.registry import read_config
from multimodal.hugging_face.weight_names import rows_of
from multimodal.values.errors import ConfigError
from tests.distributed.gradient_case import GradientCase, RankGradients, plan_case, run_step
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_comparison import FromFolder, Plans, case_of, only_text, run_transformers
from tests.distributed.hugging_face_models import LLAVAS, TEXT_MODELS, TEXTS, llama, samples_of_one_size
from tests.distributed.rank_pool import RankError
from tests.distributed.wide_transformers import build_wide_model, double_precision
from tests.unit.golden_answers import Kinds, golden_test
from tools import convert

RANK, ALPHA = 2, 6.0
PREFIX = "base_model.model."
ALONE = {"llm": (1, 1, 1)}
PLANS: Plans = {
    "tp 2, pp 2": ({"llm": (2, 2, 1)}, {"sequence_parallel": True}),
    "zero 3, tp 2, dp 2": ({"llm": (2, 1, 2)}, {"shards_weights": True}),
}


@dataclass(frozen=True)
class WithAdapters(FromFolder):
    """Also writes adapters, and the model with what they add, into folders of `target`."""

    adapter: Path | None = None
    """The folder that adapters start from."""

    def __call__(self, case: GradientCase) -> RankGradients:
        session = self.session(case)
        assert self.target is not None
        if self.adapter is not None:
            load_adapter(self.adapter, session=session, base=self.folder)
        save_adapter(self.target / "adapter", session=session, like=self.folder)
        save_hugging_face(self.target / "merged", session=session, like=self.folder)
        save_checkpoint(self.target / "run", step=0, session=session, schedulers_state={}, run_state={}, keep_last=1)
        return run_step(session, plan_case(case))


class Added(torch.nn.Module):
    """W + alpha / r x B A."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor, scale: float = ALPHA / RANK) -> None:
        super().__init__()
        self.scale = scale
        self.down, self.up = torch.nn.Parameter(down), torch.nn.Parameter(up)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.up @ self.down


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


FILES = "adapter/adapter_model.safetensors", "merged/model.safetensors"


def assert_alike(folder: Path, other: Path, files: tuple[str, ...]) -> None:
    for file in files:
        mine, theirs = load_file(folder / file), load_file(other / file)
        assert mine.keys() == theirs.keys(), f"{other / file}"
        assert all(torch.allclose(mine[key], theirs[key], rtol=1e-12, atol=1e-14) for key in mine), f"{other / file}"


def test_adapters_are_those_of_peft_under_any_plan(ranks, tmp_path):
    folder = tmp_path / "model"
    model = build_wide_model(llama, folder)
    graph = read_model(folder)
    graph = adapt_units(graph, linear_layers(graph), rank=RANK, alpha=ALPHA, targets=())
    alone = case_of(graph, TEXTS, ALONE)
    ranks.run(WithAdapters(folder, tmp_path / "alone"), alone, world_size=1)
    model.requires_grad_(False)
    with adapted(model, tmp_path / "alone" / "adapter") as theirs:
        logits, loss_sum = run_transformers(model, alone.source, only_text)
        expected = RankGradients({"llm": loss_sum}, gradients_here(alone, folder, theirs), {})
    for name, (sizes, options) in {"again": (ALONE, {}), **PLANS}.items():
        assert_matches(
            case_of(graph, TEXTS, sizes, **options), ranks, run=WithAdapters(folder, tmp_path / name), expected=expected
        )
        assert_alike(tmp_path / "alone", tmp_path / name, FILES)
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
    again = WithAdapters(folder, tmp_path / "from files", adapter=tmp_path / "alone" / "adapter")
    ranks.run(again, case_of(graph, TEXTS, PLANS["tp 2, pp 2"][0], sequence_parallel=True), world_size=4)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        mine, theirs_again = ((tmp_path / each / "adapter" / name).read_bytes() for each in ("from files", "alone"))
        assert mine == theirs_again, "adapters come back as they were written"
    plain = replace(graph, units=(replace(graph.backbone, lora=None),))
    assert read_model(tmp_path / "alone" / "merged") == plain


NEW = range(57, 63)
"""Of these tokens the model's vocabulary of 61 has room for four; two make it grow."""


@pytest.mark.deep  # a run has both in test_hugging_face_runs.py, and test_lora.py their gradients
@pytest.mark.parametrize(
    ("make", "plan"),
    [(llama, "tp 2, pp 2"), (TEXT_MODELS["llama of long contexts"], "zero 3, tp 2, dp 2")],
    ids=["untied", "tied"],
)
def test_new_rows_beside_adapters_are_those_of_peft_under_a_plan(make, plan, ranks, tmp_path):
    folder, alone = tmp_path / "model", tmp_path / "alone"
    model = build_wide_model(make, folder)
    graph = read_model(folder)
    unit = replace(graph.backbone, vocab_size=NEW.stop, new_tokens=(NEW.start, NEW.stop))
    adapted_graph = adapt_units(replace(graph, units=(unit,)), linear_layers(graph), rank=RANK, alpha=ALPHA, targets=())
    frozen = case_of(replace(graph, units=(replace(unit, freeze_module=True),)), TEXTS, ALONE)
    ranks.run(WithAdapters(folder, alone), case_of(adapted_graph, TEXTS, ALONE), world_size=1)
    ranks.run(FromFolder(folder, tmp_path / "frozen"), frozen, world_size=1)
    before, merged = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "frozen"))
    rows = load_file(alone / "adapter" / "adapter_model.safetensors")
    config = json.loads((alone / "adapter" / "adapter_config.json").read_text())
    matrices = {"model.embed_tokens": 0, **({} if unit.ties_embeddings else {"lm_head": len(unit.layers) - 1})}
    assert config["trainable_token_indices"] == {key.rpartition(".")[2]: list(NEW) for key in matrices}
    with double_precision():
        model = type(model).from_pretrained(tmp_path / "frozen", dtype=torch.float64)
    _, loss_sum = run_transformers(model, frozen.source, only_text)
    gradients = {}
    for key, layer in matrices.items():
        name = f"{key}.weight"
        assert torch.equal(merged[name][: NEW.start], before[name][: NEW.start]), "old rows stay bit for bit"
        assert torch.equal(rows[f"{PREFIX}{key}.token_adapter.trainable_tokens_delta"], merged[name][NEW.start :])
        assert (merged[name][NEW.start : 61] != before[name][NEW.start :]).all(), "rows to spare are drawn, too"
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        module = "output_layer" if layer else "word_embeddings"
        gradients["llm", f"layers.{layer}.{module}.new_rows"] = gradient[NEW.start :].numpy()
    expected = RankGradients({"llm": loss_sum}, gradients, {})
    sizes, options = PLANS[plan]
    assert_matches(case_of(frozen.graph, TEXTS, sizes, **options), ranks, run=FromFolder(folder), expected=expected)
    case = case_of(adapted_graph, TEXTS, sizes, **options)
    for name, adapter in (("drawn", None), ("from files", alone / "adapter")):
        ranks.run(WithAdapters(folder, tmp_path / name, adapter=adapter), case, world_size=case.plan.num_ranks)
        assert_alike(alone, tmp_path / name, FILES)
    converted = tmp_path / "converted"
    assert convert.main(["--load-hf", str(folder), "--load-adapter", str(alone / "adapter"), "--save-hf", str(converted)]) == 0
    assert_alike(alone / "merged", converted, ("model.safetensors",))


PEFT_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules")),
    **dict.fromkeys(("kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config")),
    **dict.fromkeys(("megatron_config", "modules_to_save", "monteclora_config", "parent_library", "revision")),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora"), False),
}
PEFT_DEFAULTS |= {"base_model_name_or_path": "a/b", "bias": "none", "inference_mode": True, "init_lora_weights": True}
PEFT_DEFAULTS |= {"loftq_config": {}, "lora_dropout": 0.0, "megatron_core": "megatron.core", "peft_version": "0.18.0"}
PEFT_DEFAULTS |= {"qalora_group_size": 16, "task_type": "CAUSAL_LM"}
"""The keys that PEFT writes beside those that matter, with its values."""


def write_peft(model: Any, folder: Path) -> dict[str, Added]:
    """Adapters as PEFT saves them: each with an A of its own, of two ranks, some with another alpha, none in the last layer.

    Returns them by module.
    """
    folder.mkdir()
    generator, tensors, found = torch.Generator().manual_seed(8), {}, {}
    for layer in range(2):
        for name, rank, alpha in (("self_attn.q_proj", 2, 8.0), ("self_attn.v_proj", 3, 4.0), ("mlp.down_proj", 2, 8.0)):
            module = f"model.layers.{layer}.{name}"
            outputs, inputs = model.get_submodule(module).weight.shape
            halves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((rank, inputs), (outputs, rank))]
            found[module] = Added(*halves, scale=alpha / rank)
            tensors |= {f"{PREFIX}{module}.lora_{half}.weight": value for half, value in zip("AB", halves, strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["q_proj", "v_proj", "down_proj", "query_key_value"]  # the last is another family's
    config = {**PEFT_DEFAULTS, "peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": targets}
    config |= {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 4}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return found


def test_adapters_of_peft_are_trained_on_and_merged(ranks, tmp_path):
    folder, adapter = tmp_path / "model", tmp_path / "peft"
    model = build_wide_model(llama, folder)
    theirs = write_peft(model, adapter)
    graph = read_model(folder)
    read = read_peft_adapter(adapter, graph=graph, base=folder)
    assert (read.rank, read.alpha) == (5, 20.0)
    assert read.targets == ("llm.transformer.linear_fc2", "llm.transformer.linear_qkv")
    adapted_graph = adapt_units(graph, linear_layers(graph), rank=read.rank, alpha=read.alpha, targets=read.targets)
    for name, added in theirs.items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", added)
    alone = case_of(adapted_graph, TEXTS, ALONE)
    logits, _ = run_transformers(model, alone.source, only_text)
    for name, (sizes, options) in {"alone": (ALONE, {}), **PLANS}.items():
        case = case_of(adapted_graph, TEXTS, sizes, **options)
        ranks.run(WithAdapters(folder, tmp_path / name, adapter=adapter), case, world_size=case.plan.num_ranks)
    assert convert.main(["--load-hf", str(folder), "--load-adapter", str(adapter), "--save-hf", str(tmp_path / "converted")]) == 0
    for merged in (*(tmp_path / name / "merged" for name in ("alone", *PLANS)), tmp_path / "converted"):
        with double_precision():
            found = type(model).from_pretrained(merged, dtype=torch.float64)
        for mine, expected in zip(run_transformers(found, alone.source, only_text)[0], logits, strict=True):
            assert np.abs(mine - expected).max() < 1e-12, merged


@cache
def small_llama() -> Any:
    return llama()


def read_adapters(document: Mapping[str, Any]) -> None:
    """Read adapters of PEFT, beside a model, with other values in their config and with tensors of some shapes added."""
    small_llama().save_pretrained("model")
    shutil.rmtree("peft", ignore_errors=True)
    write_peft(small_llama(), Path("peft"))
    described = json.loads(Path("peft/adapter_config.json").read_text())
    Path("peft/adapter_config.json").write_text(json.dumps(described | document["config"]))
    added = {PREFIX + key: torch.zeros(shape) for key, shape in document["tensors"].items()}
    save_file(load_file("peft/adapter_model.safetensors") | added, "peft/adapter_model.safetensors")
    read_peft_adapter(Path("peft"), graph=read_model(Path("model")), base=Path("model"))


ADAPTERS: Kinds = {"adapters": ({"config": {}, "tensors": {}}, read_adapters)}
test_adapters_that_are_no_lora_of_the_model_are_refused = golden_test("adapters.txt", ADAPTERS)


def test_a_folder_without_adapters_is_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no adapter_config.json; give a folder that save_pretrained of PEFT"):
        read_peft_adapter(tmp_path, graph=read_model(tmp_path), base=tmp_path)


def test_embeddings_that_peft_unties_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_peft(model := build_wide_model(partial(llama, tie_word_embeddings=True), Path("model")), Path("peft"))
    rows = {f"{PREFIX}model.embed_tokens.weight": model.get_input_embeddings().weight.detach()}
    save_file(load_file("peft/adapter_model.safetensors") | rows, "peft/adapter_model.safetensors")
    assert convert.main(["--load-hf", "model", "--load-adapter", "peft", "--save-hf", "merged"]) == 2
    assert "PEFT trained embeddings apart from the output" in capsys.readouterr().err


def test_adapters_of_a_model_of_another_size_are_refused(ranks, tmp_path):
    folder, adapter = tmp_path / "model", tmp_path / "peft"
    write_peft(build_wide_model(llama, folder), adapter)
    path = adapter / "adapter_model.safetensors"
    halves = load_file(path).items()
    save_file({key: value[:, :-1].contiguous() if "lora_A" in key else value for key, value in halves}, path)
    graph = read_model(folder)
    read = read_peft_adapter(adapter, graph=graph, base=folder)
    graph = adapt_units(graph, linear_layers(graph), rank=read.rank, alpha=read.alpha, targets=read.targets)
    with pytest.raises(RankError, match=r"(?s)rank 0.*has shape \[\d, \d+\], expected \d+ columns.*rank 1.*expected \d+ columns"):
        case = case_of(graph, TEXTS, {"llm": (2, 1, 1)})
        ranks.run(WithAdapters(folder, tmp_path / "none", adapter=adapter), case, world_size=2)


@pytest.mark.deep
def test_projectors_beside_adapters_come_back(ranks, tmp_path):
    folder = tmp_path / "model"
    build_wide_model(LLAVAS["clip and llama"], folder)
    graph = read_model(folder)
    graph = replace(graph, units=(replace(graph.unit("vision"), freeze_module=True), graph.backbone))
    graph = adapt_units(graph, linear_layers(graph), rank=RANK, alpha=ALPHA, targets=())
    sizes = {"vision": (1, 1, 1), "llm": (2, 1, 1)}
    case = case_of(graph, samples_of_one_size(1), sizes)
    ranks.run(WithAdapters(folder, tmp_path / "first"), case, world_size=3)
    path = tmp_path / "first" / "adapter" / "adapter_model.safetensors"
    changed = {key: value + 1 for key, value in load_file(path).items()}
    save_file(changed, path)
    assert any("multi_modal_projector.linear_1.bias" in key for key in changed)
    ranks.run(WithAdapters(folder, tmp_path / "second", adapter=path.parent), case, world_size=3)
    found = load_file(tmp_path / "second" / "adapter" / "adapter_model.safetensors")
    assert found.keys() == changed.keys() and all(torch.equal(found[key], changed[key]) for key in found)
    save_file(changed | {f"{PREFIX}model.tower.weight": torch.zeros(2)}, path)
    with pytest.raises(RankError, match="the model has nothing that is called base_model.model.model.tower.weight"):
        ranks.run(WithAdapters(folder, tmp_path / "third", adapter=path.parent), case, world_size=3)
