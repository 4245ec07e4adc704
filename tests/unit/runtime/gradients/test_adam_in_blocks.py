import inspect
import sys

import pytest
import torch

from megatron.runtime.gradients import unit_optimizer
from megatron.runtime.gradients.unit_optimizer import AdamInBlocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_give_torchs_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(unit_optimizer, "_VALUES_AT_ONCE", 64)
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((), (63,), (13, 17), (64, 2), (8, 48))]
    starts[4] = starts[4].t()  # not contiguous
    sides = [[torch.nn.Parameter(each.clone()) for each in starts] for _ in range(2)]
    options = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [adam(side, **options) for adam, side in zip((torch.optim.AdamW, AdamInBlocks), sides, strict=True)]
    for step in range(3):
        for one, other in zip(*sides, strict=True):
            gradient = torch.randn(one.shape, generator=generator, dtype=dtype)
            one.grad = other.grad = gradient if step or one.dim() else None
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(*sides, strict=True):
        assert torch.equal(one, other)
        states = (optimizer.state[each] for optimizer, each in zip(optimizers, (one, other), strict=True))
        for (name, state), (_, found) in zip(*(each.items() for each in states), strict=True):
            assert torch.equal(state, found), name
    assert optimizers[1].state[sides[1][2]]["step"] == 3


def test_no_compiler_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("add_param_group", "state_dict", "load_state_dict"):  # each keeps what it found
        monkeypatch.delattr(inspect.unwrap(getattr(torch.optim.AdamW, name)), "__dynamo_disable", raising=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    weight = torch.nn.Parameter(torch.ones(3))
    adam = AdamInBlocks([weight], lr=0.5)
    weight.grad = torch.ones(3)
    adam.step()
    adam.load_state_dict(adam.state_dict())
    assert adam.state[weight]["step"] == 1 and (weight < 0.6).all()
