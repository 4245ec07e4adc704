"""A split backward: input gradients first, every linear layer's weight gradient later and once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.model.weight_gradient_queue import (
    LinearWeightGradient,
    WeightGradientQueue,
    accumulate_into_buffers,
    defer_weight_gradients,
)
from multimodal.values.model_graph import ModelGraph
from tests.unit.model.rank_groups import build_stage

pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "add_bias_linear": True}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": {"patch_size": 2, "in_channels": 1}, **SHAPE},
            "llm": {"role": "backbone", "untie_embeddings_and_output_weights": False, "add_qkv_bias": True, **SHAPE},
            "painter": {"role": "generator", "image": {"patch_size": 2, "in_channels": 1}, **SHAPE},
        }
    }
)
TEXT = PackedInput(
    (3, 2),
    torch.tensor([0, 1, 2, 0, 1]),
    token_ids=torch.arange(5),
    target_rows=torch.tensor([1, 4]),
    targets=torch.tensor([3, 2]),
)
PATCHES = PackedInput((8,), torch.arange(16).reshape(8, 2), patches=torch.randn(8, 4, generator=torch.manual_seed(0)))
IMAGES_TO_MAKE = replace(PATCHES, lengths=(3, 5), condition_rows=torch.tensor([1] * 3 + [0] * 5))
CONDITIONS = torch.randn(2, 16, generator=torch.manual_seed(1), dtype=torch.float64)
INPUTS = {"vision": (PATCHES, None), "llm": (TEXT, None), "painter": (IMAGES_TO_MAKE, CONDITIONS)}
NUM_LINEARS = {"vision": 1 + 2 * 4 + 2, "llm": 2 * 4 + 1, "painter": 1 + 2 * 4 + 1}
"""Patch embedding or head, four in each transformer layer, two in an encoder's projector, one in a generator's."""


class CountedProducts(TorchDispatchMode):
    """Counts matrix products whose result has the shape of a two-dimensional parameter."""

    def __init__(self, stage: UnitStage) -> None:
        super().__init__()
        self._shapes = {tuple(parameter.shape) for parameter in stage.parameters() if parameter.dim() == 2}
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and tuple(result.shape) in self._shapes:
            self.count += 1
        return result


build = partial(build_stage, GRAPH)


def forward(stage: UnitStage) -> Tensor:
    output = stage(None, *INPUTS[stage.unit.name])
    return output.loss_sum if isinstance(output, HeadOutput) else output.square().sum()


def split_backward(stage: UnitStage) -> WeightGradientQueue:
    queue = WeightGradientQueue()
    with defer_weight_gradients(queue):
        loss = forward(stage)
    loss.backward()
    return queue


def counted(stage: UnitStage, run: Callable[[], Any]) -> tuple[int, Any]:
    with CountedProducts(stage) as products:
        result = run()
    return products.count, result


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("unit", ["vision", "llm", "painter"])
def test_each_weight_gradient_is_computed_later_and_once(unit: str, recompute: str | None) -> None:
    whole, stage = build(unit), build(unit, recompute=recompute)
    num_whole, _ = counted(whole, lambda: forward(whole).backward())
    assert num_whole == NUM_LINEARS[unit], "the counter does not see what it is meant to see"

    num_first, queue = counted(stage, lambda: split_backward(stage))
    assert (num_first, len(queue)) == (0, NUM_LINEARS[unit])
    num_second, _ = counted(stage, queue.compute)
    assert (num_second, len(queue)) == (NUM_LINEARS[unit], 0)

    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        found = gradients[name]
        assert parameter.grad is not None and found is not None, name
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14, msg=name)
    assert counted(stage, queue.compute)[0] == 0


def test_frozen_layers_leave_nothing() -> None:
    stage = build("llm")
    stage.layers.requires_grad_(False)
    stage.layers["1"].requires_grad_(True)
    queue = split_backward(stage)
    assert len(queue) == 4
    queue.compute()
    assert all((parameter.grad is not None) == name.startswith("layers.1.") for name, parameter in stage.named_parameters())


def test_the_queue_counts_each_storage_once() -> None:
    inputs, first, second = torch.zeros(3, 2), torch.zeros(3, 4), torch.zeros(3, 5)
    queue = WeightGradientQueue()
    queue.put(LinearWeightGradient(inputs, first, torch.nn.Parameter(torch.zeros(4, 2)), None))
    assert queue.size_bytes == 4 * (6 + 12)
    queue.put(LinearWeightGradient(inputs.view(3, 1, 2), second[:, None], torch.nn.Parameter(torch.zeros(5, 2)), None))
    assert queue.size_bytes == 4 * (6 + 12 + 15)
    queue.compute()
    assert queue.size_bytes == 0


def test_outside_of_the_queue_nothing_is_left() -> None:
    stage, queue = build("llm"), WeightGradientQueue()
    with defer_weight_gradients(queue), defer_weight_gradients(None):
        forward(stage).backward()
    assert len(queue) == 0
    assert all(parameter.grad is not None for parameter in stage.parameters())


def test_products_add_to_float32_buffers() -> None:
    """More exactly than in bfloat16; hooks run, and Megatron's would add nothing."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(5, 4, generator=generator).bfloat16())
    weight.main_grad = torch.ones(5, 4)  # type: ignore[attr-defined]
    accumulate_into_buffers(
        [weight],
        lambda rows, gradient, buffer: buffer.add_(gradient.float().t() @ rows.float()),  # type: ignore[arg-type,return-value]
    )
    arrived: list[int] = []

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            arrived.append(1)
            parameter.grad = None

    weight.register_post_accumulate_grad_hook(note)
    rows = torch.randn(2, 3, 4, generator=generator).bfloat16().requires_grad_()
    deferrable_linear(rows, weight, None).sum().backward()
    queue = WeightGradientQueue()
    with defer_weight_gradients(queue):
        output = deferrable_linear(rows, weight, None)
    output.sum().backward()
    assert len(arrived) == 1
    queue.compute()
    expected = 1 + 2 * rows.detach().float().flatten(0, 1).sum(0).expand(5, 4)
    assert len(arrived) == 2 and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert torch.allclose(weight.main_grad, expected, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
