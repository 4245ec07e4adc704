"""Adapters (LoRA) in costs: weights and activations as real layers have them, FLOPs and seconds of what is trained alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from multimodal.cost.layers.registry import describe_layer, read_model
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.estimate.memory_estimate import range_bytes
from multimodal.plan.planners.planning_request import StageSize
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.action import Action, ActionKind
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Lora, ModelGraph
from tests.unit.cost.test_activation_memory import VOCABULARY, check_layer, fake_groups, graph_of
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, request
from tests.unit.schedule.schedule_cases import build_case, build_graph

__all__ = ["fake_groups"]
MLP = ("linear_fc1", "linear_fc2")
MODULES = ("linear_qkv", "linear_proj", *MLP)
CASES = [
    ("llm", "transformer", MODULES),
    ("llm", "transformer", ("linear_qkv", "linear_fc2")),
    ("llm", "transformer", ("linear_proj", "linear_fc1")),
    ("llm", "head", ("output_layer",)),
    ("vision", "projector", MLP),
]


def adapted(graph: ModelGraph, unit: str, kind: str, modules: tuple[str, ...]) -> ModelGraph:
    lora = Lora(3, 6.0, tuple(f"{kind}.{name}" for name in modules))
    units = (
        replace(each, lora=lora, untie_embeddings_and_output_weights=True) if each.name == unit else each for each in graph.units
    )
    return replace(graph, units=tuple(units))


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama", "gpt"])
@pytest.mark.parametrize(("unit", "kind", "modules"), CASES)
def test_layers_have_and_keep_what_is_predicted(
    unit: str, kind: str, modules: Any, shape: str, dtype: Any, recompute: Any
) -> None:
    graph = adapted(graph_of(shape), unit, kind, modules)
    layer, stage = check_layer(graph, unit, kind, dtype=dtype, recompute=recompute, within=0.02)
    assert layer.num_trained_weights == sum(each.numel() for each in stage.parameters() if each.requires_grad)


def test_weight_gradients_are_those_of_adapters_alone() -> None:
    graph = adapted(graph_of("llama"), "llm", "transformer", MODULES[:2])
    layer = describe_layer(graph, graph.backbone, "transformer", vocab_size=VOCABULARY)
    load = UnitLoad(10, 100, 3, 1)
    weights = 3 * (64 + 128) + 3 * (64 + 64)
    assert layer.weight_gradient_flops(load) == layer.adapter_flops(load) == 2.0 * 10 * weights
    whole = describe_layer(graph_of("llama"), graph.backbone, "head", vocab_size=VOCABULARY)
    assert whole.weight_gradient_flops(load) == whole.forward_flops(load).linear


def test_a_stage_with_adapters_passes_its_gradient_on_and_little_else() -> None:
    graph = build_graph("vision")
    lora = Lora(2, None, ("transformer.linear_qkv",))
    with_adapters = replace(graph, units=(graph.units[0], replace(graph.units[1], lora=lora)))
    action = Action(ActionKind.BACKWARD, "llm", 0, 1, 0)
    costs = [
        unit_cost(action, build_case(each, {"vision": (1, 1, 1), "llm": (1, 2, 1)}, {"vision": [[[0]]], "llm": [[[0]]]}))
        for each in (graph, with_adapters)
    ]
    assert costs == [2, 1]


def test_planners_see_shorter_steps_and_less_memory() -> None:
    seconds, memory, num_layers = {}, {}, len(TEXT_ONLY.backbone.layers)
    for name, lora in (("whole", None), ("adapters", Lora(8, None, tuple(f"transformer.{name}" for name in MODULES)))):
        asked = request(replace(TEXT_ONLY, units=(replace(TEXT_ONLY.backbone, lora=lora),)), transformer_impl="local")
        seconds[name] = predict_run(PLANNERS["megatron"](asked), asked).iteration_seconds
        memory[name] = range_bytes(asked, "llm", ((0, num_layers),), StageSize(1), 1)[0]
    assert 0.6 * seconds["whole"] < seconds["adapters"] < 0.85 * seconds["whole"], "a third of the products is left out"
    assert memory["adapters"] < 0.2 * memory["whole"], "2 of 18 bytes per weight are left, and adapters"


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, "lora, rank: expected a positive integer, found 0"),
        ({"rank": 4, "alpha": -1}, "lora, alpha: expected a positive number, found -1"),
        ({"rank": 4, "targets": ["linear_qkv", "q_proj"]}, r"lora, targets\[1\]: 'q_proj' matches no linear layer that may have"),
        ({"rank": 4, "targets": ["output_layer"]}, r"lora, targets\[0\]: 'output_layer' matches no linear layer"),
    ],
)
def test_wrong_adapters_in_a_model_file_name_their_line(lora: Any, message: str, tmp_path: Path) -> None:
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
    llm = {"role": "backbone", "untie_embeddings_and_output_weights": False, **shape, "lora": lora}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": {"llm": llm}}))
    with pytest.raises(ModelError, match=rf"model.yaml, line \d+: unit 'llm', {message}"):
        read_model(tmp_path / "model.yaml")


def test_a_model_file_may_name_patterns(tmp_path: Path) -> None:
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
    units = {
        "vision": {"role": "encoder", **shape, "lora": {"rank": 2, "targets": ["*_fc1"]}},
        "llm": {"role": "backbone", **shape},
    }
    units["llm"]["lora"] = {"rank": 4, "alpha": 8}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    graph = read_model(tmp_path / "model.yaml")
    assert graph.unit("vision").lora == Lora(2, None, ("transformer.linear_fc1", "projector.linear_fc1"))
    assert graph.unit("llm").lora == Lora(4, 8.0, tuple(f"transformer.{name}" for name in MODULES))
    assert [graph.unit("llm").is_trainable(index) for index in range(4)] == [False, True, True, False]
    assert ModelGraph.from_dict(graph.to_dict()) == graph
