"""Learned queries that attend to an encoder's tokens, against plain torch, item by item."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph
from tests.unit.model.rank_groups import build_stage

pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "init_method_std": 0.3}
HEADS, HIDDEN, NUM_QUERIES = 3, 12, 5
QUERIES = {"num_queries": NUM_QUERIES, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": 20}


def graph_of(queries: dict[str, Any], **vision: Any) -> ModelGraph:
    image = {"patch_size": 2, "in_channels": 1, "merge_size": 1}
    unit = {"role": "encoder", **SHAPE, "normalization": "LayerNorm", "image": image, "queries": queries, **vision}
    return ModelGraph.from_dict({"units": {"vision": unit, "llm": {"role": "backbone", **SHAPE, "hidden_size": 8}}})


def build(graph: ModelGraph) -> UnitStage:
    last = len(graph.unit("vision").layers) - 1
    stage = build_stage(graph, "vision", layers=range(last, last + 1))
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 4)
    return stage


def expected_of(weights: dict[str, Tensor], tokens: Tensor, *, num_layers: int, has_self: bool, merge: int) -> Tensor:
    def norm(name: str, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, rows.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def product(name: str, rows: Tensor) -> Tensor:
        return rows @ weights[f"{name}.weight"].t() + weights[f"{name}.bias"]

    def heads(rows: Tensor, num_parts: int) -> list[Tensor]:
        split = rows.view(len(rows), HEADS, num_parts, HIDDEN // HEADS)
        return [split[:, :, part].transpose(0, 1) for part in range(num_parts)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query @ key.transpose(1, 2) / (HIDDEN // HEADS) ** 0.5).softmax(-1)
        return (scores @ value).transpose(0, 1).reshape(-1, HIDDEN)

    tokens, found = norm("norm", tokens).reshape(-1, 16 * merge), weights["queries"]
    for index in range(num_layers):
        layer = f"layers.{index}"
        if has_self:
            of_all = heads(product(f"{layer}.self_attention.linear_qkv", norm(f"{layer}.self_norm", found)), 3)
            found = found + product(f"{layer}.self_attention.linear_proj", attend(*of_all))
        (query,) = heads(product(f"{layer}.cross_attention.linear_q", norm(f"{layer}.cross_norm", found)), 1)
        key, value = heads(product(f"{layer}.cross_attention.linear_kv", tokens), 2)
        found = found + product(f"{layer}.cross_attention.linear_proj", attend(query, key, value))
        inner = F.gelu(product(f"{layer}.mlp.linear_fc1", norm(f"{layer}.mlp_norm", found)))
        found = found + product(f"{layer}.mlp.linear_fc2", inner)
    return norm("final_norm", found) @ weights["weight"].t() + weights["bias"]


@pytest.mark.parametrize(("num_layers", "has_self", "merge"), [(1, False, 1), (2, True, 2)])
def test_they_find_in_each_item_what_they_find_in_it_alone(num_layers: int, has_self: bool, merge: int) -> None:
    lengths = (merge * 6, merge * 2, merge * 3)
    queries = {**QUERIES, "num_layers": num_layers, "has_self_attention": has_self}
    sound = {"num_mel_bins": 4, "merge_factor": merge}
    stage = build(graph_of(queries, image=None, audio=sound, has_rotary_positions=False))
    hidden = torch.randn(sum(lengths), 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = stage(hidden, PackedInput(lengths, torch.ones(sum(lengths), 3, dtype=torch.long)))
    assert output.shape == (3 * NUM_QUERIES, 8)
    output.square().sum().backward()
    named = dict(stage.named_parameters())
    weights = {name.split(".", 2)[2]: value.detach().clone().requires_grad_() for name, value in named.items()}
    leaf = hidden.detach().clone().requires_grad_()
    options: dict[str, Any] = {"num_layers": num_layers, "has_self": has_self, "merge": merge}
    expected = torch.cat([expected_of(weights, each[:, 0], **options) for each in leaf.split(lengths)])
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(hidden.grad, leaf.grad, rtol=1e-9, atol=1e-11)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, weights[name.split(".", 2)[2]].grad, rtol=1e-9, atol=1e-11, msg=name)


def test_without_items_there_are_no_rows_and_gradients_of_zeros() -> None:
    stage = build(graph_of({**QUERIES, "has_self_attention": True}))
    hidden = torch.zeros(0, 1, 16, dtype=torch.float64).requires_grad_()
    output = stage(hidden, PackedInput((), torch.zeros(0, 2, dtype=torch.long)))
    assert output.shape == (0, 8)
    output.sum().backward()
    assert all(not parameter.grad.any() for parameter in stage.parameters() if parameter.grad is not None)
