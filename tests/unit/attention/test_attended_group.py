"""Attention that gives back the memory of its keys and values between its forward and its backward."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from multimodal.attention.context_parallel import _AttendedGroup


class _Product(torch.autograd.Function):
    """Keeps its output for the backward, as flash attention does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.einsum("qhc,khc,khd->qhd", query, key, value)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output = ctx.saved_tensors
        assert torch.equal(output, torch.einsum("qhc,khc,khd->qhd", query, key, value))
        return (
            torch.einsum("qhd,khc,khd->qhc", gradient, key, value),
            torch.einsum("qhd,qhc,khd->khc", gradient, query, value),
            torch.einsum("qhd,qhc,khc->khd", gradient, query, key),
        )


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output: Tensor = _Product.apply(query, key, value)
    return output


@pytest.fixture
def _only_references_count() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_only_references_count")
def test_keys_and_values_that_come_again_give_the_gradients_of_those_that_went() -> None:
    queries, gathered = torch.randn(4, 2, 3).double(), torch.randn(5, 4, 3).double()
    again = gathered.clone()
    leaves = [tensor.clone().requires_grad_() for tensor in (queries, *again.chunk(2, dim=1))]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    seen_outside: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: seen_outside.append(tensor) or tensor, lambda tensor: tensor):
        group = _AttendedGroup(attend, queries, gathered)
    output = group.release()
    assert not seen_outside and gathered.untyped_storage().nbytes() == 0
    group.reopen().copy_(again)
    found = group.gradients(torch.ones_like(output))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(found, expected, strict=True))
    graph = weakref.ref(group._leaves[0])
    del group, found
    assert graph() is None, "no cycle keeps it"
