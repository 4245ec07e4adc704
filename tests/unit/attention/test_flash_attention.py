"""Attention by one kernel for all sequences, with stand-ins for kernels that need CUDA."""

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.attention import flash_attention
from multimodal.attention.attention_backend import AttentionShape
from multimodal.attention.attention_choice import AttentionChoice, choose_attention, choose_backend
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.core_attention import CoreAttention
from multimodal.attention.packed_lengths import MaskRule, PackedLengths
from multimodal.values.errors import ConfigError

LENGTHS = (3, 5, 1)
HALF = AttentionShape(num_heads=4, num_groups=2, dtype=torch.bfloat16, num_multiprocessors=132)
ITEMS = MaskRule(is_causal=True, mode=MaskMode.EMBEDDED)


def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    bounds, groups = starts.tolist(), query.shape[1] // key.shape[1]
    outputs = []
    for first, last in pairwise(bounds):
        rows = (each[first:last].transpose(0, 1)[None] for each in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=is_causal, scale=scale, enable_gqa=groups > 1)
        outputs.append(mixed[0].transpose(0, 1))
    return torch.cat(outputs)


def package(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, softmax_scale: Any, causal: bool) -> Tensor:
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k == 5
    return attend(q, k, v, cu_q, is_causal=causal, scale=softmax_scale)


def torch_with_window(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, scale: Any, window_size: Any, enable_gqa: bool
) -> Tensor:
    assert window_size[0] == -1 and enable_gqa == (q.shape[1] > k.shape[1])
    return attend(q, k, v, cu_q, is_causal=window_size[1] == 0, scale=scale)


def torch_before(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, scale: Any, is_causal: bool) -> Tensor:
    assert q.shape[1] == k.shape[1], "it knows no groups"
    return attend(q, k, v, cu_q, is_causal=is_causal, scale=scale)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("adapt", "kernel"),
    [
        (flash_attention._of_package, package),
        (flash_attention._of_torch, torch_with_window),
        (flash_attention._of_torch, torch_before),
    ],
)
def test_every_kernel_gives_what_one_sequence_at_a_time_gives(
    monkeypatch: pytest.MonkeyPatch, adapt: Callable[..., Any], kernel: Callable[..., Any], is_causal: bool
) -> None:
    monkeypatch.setattr(flash_attention, "find_kernel", lambda: adapt(kernel))
    rule = MaskRule(is_causal=is_causal)
    choices = (AttentionChoice(rule, AttentionShape(), backend=name, alone=name) for name in ("flash", "sequences"))
    flash, plain = (CoreAttention(choice=choice) for choice in choices)
    generator = torch.Generator().manual_seed(1)
    shapes = ((9, 1, 4, 8), (9, 1, 2, 8), (9, 1, 2, 8))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    packed = PackedLengths(lengths=LENGTHS)
    found, expected = (each(*inputs, None, packed_seq_params=packed) for each in (flash, plain))
    assert found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=1e-14)


def test_torchs_kernel_is_the_one_that_is_adapted_to() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch has it from 2.10 on")
    known = list(inspect.signature(varlen.varlen_attn).parameters)
    assert known[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "scale" in known and {"window_size", "is_causal"} & set(known)


def test_auto_takes_the_fastest_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "find_kernel", lambda: attend)
    causal = MaskRule(is_causal=True)
    single = AttentionShape(dtype=torch.float32, num_multiprocessors=132)
    exact = AttentionShape(dtype=torch.float64, num_multiprocessors=132)
    assert [choose_backend("auto", rule=causal, shape=each) for each in (HALF, single, exact)] == ["flash", "triton", "blocks"]
    assert [choose_backend("auto", rule=ITEMS, shape=each) for each in (HALF, single, exact)] == ["triton", "triton", "blocks"]
    wide = AttentionShape(channels=320, dtype=torch.bfloat16, num_multiprocessors=132)
    assert [choose_backend("auto", rule=rule, shape=wide) for rule in (causal, ITEMS)] == ["flex", "flex"]
    shared = choose_attention("auto", rule=MaskRule(is_causal=False), shape=HALF, is_shared=True)
    assert (shared.backend, shared.alone) == ("triton", "flash")


def test_flash_is_refused_where_it_does_not_run() -> None:
    with pytest.raises(
        ConfigError, match="flash runs on CUDA in half precision.*found a CPU, torch.float32, heads of 64 channels"
    ):
        choose_backend("flash", rule=MaskRule(is_causal=True))
    with pytest.raises(ConfigError, match="flash cannot evaluate --attention-mask embedded"):
        choose_backend("flash", rule=ITEMS, shape=HALF)
