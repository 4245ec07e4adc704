"""Experts against a loop over tokens, and the loss that balances them against its formula."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from multimodal.model.expert_mlp import Expert, ExpertMLP, Router, RowSequences, attach_loss, sequence_balance_loss
from multimodal.model.grouped_linear import grouped_linear
from multimodal.model.transformer_config import BuildOptions, build_transformer_config
from multimodal.model.weight_gradient_queue import WeightGradientQueue, defer_weight_gradients
from multimodal.values.model_graph import Experts, Role, Transformer, Unit

SHAPE = Transformer(2, 8, 2, 12, experts=Experts(4, router_topk=2))
CONFIG = build_transformer_config(Unit("llm", Role.BACKBONE, SHAPE), tensor_parallel_size=1, options=BuildOptions(torch.float64))


def build(experts: Experts, group: dist.ProcessGroup) -> ExpertMLP:
    mlp = ExpertMLP(CONFIG, experts, 12, ProcessGroupCollection(tp=group, ep=group, cp=group))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0, 0.5)
    return mlp


def mlp_of(expert: Expert, row: Tensor) -> Tensor:
    gate, value = (expert.linear_fc1.weight @ row).chunk(2)
    return expert.linear_fc2.weight @ (torch.nn.functional.silu(gate) * value)


@pytest.mark.parametrize("is_pre_softmax", [False, True])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("shared", [None, 6])
def test_every_token_is_computed_by_its_experts(world_of_one, topk, shared, is_pre_softmax):
    experts = Experts(4, topk, shared_expert_intermediate_size=shared, router_pre_softmax=is_pre_softmax)
    mlp = build(experts, world_of_one)
    hidden = torch.randn(9, 1, 8, dtype=torch.float64)
    for index, row in enumerate(hidden[:, 0]):
        scores = mlp.router.weight @ row
        best = sorted(range(4), key=lambda expert: -scores[expert])[:topk]
        exponents = {expert: math.exp(scores[expert]) for expert in range(4)}
        total = sum(exponents[expert] for expert in (range(4) if is_pre_softmax else best))
        expected = sum(exponents[expert] / total * mlp_of(mlp.experts[str(expert)], row) for expert in best)
        if mlp.shared_expert is not None:
            expected = expected + mlp_of(mlp.shared_expert, row)
        assert torch.allclose(mlp(hidden)[0][index, 0], expected, rtol=1e-12, atol=1e-12)


def test_no_rows_are_computed_and_no_expert_without_rows_loses_its_gradient(world_of_one):
    mlp = build(Experts(4, router_topk=1), world_of_one)
    mlp(torch.zeros(0, 1, 8, dtype=torch.float64))[0].sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in mlp.experts.parameters())


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("is_even", [False, True])
def test_the_grouped_kernel_multiplies_as_slices_do(is_deferred, is_even):
    """Weights in one buffer or apart; one expert has no rows, and gradients of zero."""
    rows, counts = torch.randn(10, 16), [3, 0, 5, 2]
    matrices = torch.randn(4, 2, 8, 16)[:, 1] if is_even else [torch.randn(8, 16) for _ in counts]
    found = []
    for given in (counts, torch.tensor(counts)):
        weights = [torch.nn.Parameter(each) for each in matrices]
        inputs, queue = rows.clone().requires_grad_(), WeightGradientQueue()
        with defer_weight_gradients(queue if is_deferred else None):
            output = grouped_linear(inputs, given, weights)
        output.sin().sum().backward()
        assert is_deferred == all(each.grad is None for each in weights)
        queue.compute()
        found.append([output, inputs.grad, *(each.grad for each in weights)])
    for sliced, grouped in zip(*found, strict=True):
        assert torch.allclose(sliced, grouped, rtol=1e-5, atol=1e-6)
    assert not found[1][3].any()


def sequence_loss(shares: np.ndarray, chosen: np.ndarray, *, topk: int) -> float:
    """DeepSeek-V3's (2.1.2): sum over experts of f P, without alpha."""
    num_tokens, num_experts = shares.shape
    fractions = [num_experts / (topk * num_tokens) * (chosen == expert).sum() for expert in range(num_experts)]
    return float(sum(fractions[expert] * shares[:, expert].mean() for expert in range(num_experts)))


def test_the_balance_loss_is_the_mean_of_all_sequences_by_length():
    torch.manual_seed(1)
    experts, lengths = Experts(4, router_topk=2), (3, 5)
    router = Router(CONFIG, experts)
    with torch.no_grad():
        router.weight.normal_()
    routing = router(torch.randn(10, 8, dtype=torch.float64))
    numbers = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, -1, -1])
    found = sequence_balance_loss(routing, RowSequences(numbers, lengths), experts=experts)
    shares, chosen = routing.shares.detach().numpy(), routing.experts.numpy()
    expected = sum(
        length * sequence_loss(shares[rows], chosen[rows], topk=2)
        for length, rows in zip(lengths, (slice(0, 3), slice(3, 8)), strict=True)
    )
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_an_attached_loss_gets_its_gradient():
    values, weight = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    noted: list[torch.Tensor] = []
    attached = attach_loss(values, 5 * weight, weight=0.5, note=noted.append)
    assert not noted
    (attached * 3).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [3, 3, 3]
    assert weight.grad is not None and float(weight.grad) == 2.5
    assert noted == [10]


def test_the_balance_loss_reaches_the_router_alone_where_it_is_wanted(world_of_one):
    mlp = build(Experts(4, aux_loss_coeff=0.5), world_of_one)
    hidden = torch.randn(6, 1, 8, dtype=torch.float64)
    gradients = []
    for coefficient, num_step_tokens in ((0.0, 1), (0.5, 10), (1.0, 10)):
        mlp.zero_grad()
        mlp.experts_shape = replace(mlp.experts_shape, aux_loss_coeff=coefficient)
        mlp.sequences, mlp.num_step_tokens = RowSequences(torch.zeros(6, dtype=torch.int64), (6,)), num_step_tokens
        mlp(hidden)[0].sum().backward()
        assert mlp.router.weight.grad is not None
        gradients.append(mlp.router.weight.grad.clone())
    added, doubled = gradients[1] - gradients[0], gradients[2] - gradients[0]
    assert added.abs().max() > 1e-3
    assert torch.allclose(doubled, 2 * added)
    once = sequence_balance_loss(mlp.router(hidden[:, 0]), mlp.sequences, experts=mlp.experts_shape)
    assert mlp.take_losses() == pytest.approx(3 * float(once)) and mlp.take_losses() == 0
