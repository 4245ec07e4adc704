"""Attention by one kernel for all sequences, with stand-ins for kernels that need CUDA."""

import inspect
import math
import sys
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from multimodal.attention import core_attention
from multimodal.attention.attention_backend import AttentionShape, load_backend
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.block_attention import attend_by_blocks, attend_densely
from multimodal.attention.core_attention import AttentionChoice, CoreAttention, choose_attention, choose_backend
from multimodal.attention.flex_attention import attend_by_flex_attention
from multimodal.attention.packed_lengths import ItemSpan, MaskRule, PackedLengths
from multimodal.values.errors import ConfigError
from tests.unit.attention import mask_cases
from tests.unit.golden_answers import Kinds, golden_test

EMBEDDED = MaskRule(is_causal=True, mode=MaskMode.EMBEDDED)


def test_the_reference_attends_by_definition():
    mask = mask_cases.build_mask(mask_cases.MASKS["embedded"][1], mode="embedded")
    query, key, value, _ = mask_cases.draw_inputs(mask, heads=4, groups=2)
    found = attend_densely(query, key, value, mask=mask, softmax_scale=0.3)
    seen_by = mask.tokens.to_dense()
    for token, head in ((0, 0), (6, 1), (40, 2), (63, 3)):
        scores = key[seen_by[token], head // 2] @ query[token, head] * 0.3
        assert torch.allclose(found[token, head], scores.softmax(0) @ value[seen_by[token], head // 2], rtol=0, atol=1e-14)


@given(mask=mask_cases.random_masks())
@settings(max_examples=40)
def test_blocks_give_the_references_output_and_gradients(mask):
    inputs = mask_cases.draw_inputs(mask, heads=4, groups=2)
    expected = mask_cases.output_and_gradients(attend_densely, inputs, mask)
    assert mask_cases.largest_error(mask_cases.output_and_gradients(attend_by_blocks, inputs, mask), expected) < 1e-13


def test_blocks_in_bfloat16_are_summed_in_float32():
    mask = mask_cases.build_mask(mask_cases.MASKS["embedded"][1], mode="embedded")
    inputs = tuple(tensor.bfloat16().double() for tensor in mask_cases.draw_inputs(mask))
    expected = mask_cases.output_and_gradients(attend_densely, inputs, mask)
    found = mask_cases.output_and_gradients(attend_by_blocks, inputs, mask, torch.bfloat16)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    assert mask_cases.largest_error(found, expected) < 0.03


def test_blocks_touch_what_is_visible_only():
    mask = mask_cases.build_mask(mask_cases.MASKS["packed, empty modalities"][1], mode="embedded", query_blocks=(0,))
    query, key, value, _ = mask_cases.draw_inputs(mask)
    key[16:], value[16:] = math.nan, math.nan
    assert attend_by_blocks(query, key, value, mask=mask, softmax_scale=None).isfinite().all()


@pytest.mark.parametrize(
    ("name", "query_blocks"), [("embedded", None), ("packed, empty modalities", (0, 2)), ("window of 20", (1, 4))]
)
def test_flex_attention_gives_the_references_output(name, query_blocks):
    mask = mask_cases.named_mask(name, query_blocks=query_blocks)
    query, key, value, _ = mask_cases.draw_inputs(mask, heads=4, groups=2)
    mask.softcap = 0.5
    with torch.no_grad():
        found = attend_by_flex_attention(query, key, value, mask=mask, softmax_scale=0.2)
    expected = attend_densely(query, key, value, mask=mask, softmax_scale=0.2)
    assert mask_cases.largest_error((found,), (expected,)) < 1e-13


def test_flex_attention_does_not_train_on_a_cpu():
    mask = mask_cases.build_mask(mask_cases.MASKS["causal"][1], mode="causal")
    query, key, value, _ = mask_cases.draw_inputs(mask)
    with pytest.raises(ConfigError, match="no backward there; choose --attention-backend blocks"):
        attend_by_flex_attention(query.requires_grad_(), key, value, mask=mask, softmax_scale=None)


def chosen_backend(document: dict[str, Any]) -> str:
    """Choose a backend for a rule and a device, with a kernel of torch's or the package's there, or without."""
    rule = MaskRule(document["is_causal"], MaskMode(document["mode"]), window=document["window"], softcap=document["softcap"])
    shape = AttentionShape(**{**document["shape"], "dtype": getattr(torch, document["dtype"])})
    with patch.object(core_attention, "find_kernel", (lambda: attend) if document["has_kernel"] else core_attention.find_kernel):
        return choose_backend(document["name"], rule=rule, shape=shape)


CHOICE = {"name": "auto", "is_causal": True, "mode": "causal", "window": None, "softcap": None}
BACKENDS: Kinds = {"backend": ({**CHOICE, "shape": {}, "dtype": "float32", "has_kernel": False}, chosen_backend)}
test_backends_are_chosen_and_refused_as_written = golden_test("backends.txt", BACKENDS)


def test_a_missing_package_is_named(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("multimodal.attention.triton_")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="--attention-backend triton: triton is not installed"):
        load_backend("triton")


EMBEDDED_VISION = MaskRule(is_causal=True, mode=MaskMode.EMBEDDED, modalities=("vision",))
PACKED = PackedLengths(lengths=(6, 4), items=(ItemSpan(1, 4, "vision"), ItemSpan(6, 3, "vision")))


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(10, 1, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("recompute", [False, True])
def test_equals_the_reference_in_megatrons_layout(recompute):
    choice = choose_attention("blocks", rule=EMBEDDED_VISION, shape=AttentionShape(), is_shared=False)
    attention = CoreAttention(choice=choice, recompute=recompute)
    inputs = draw()
    found = attention(*inputs, None, packed_seq_params=PACKED)
    expected = attend_densely(*(each[:, 0] for each in inputs), mask=PACKED.mask(EMBEDDED_VISION), softmax_scale=None)
    assert found.shape == (10, 1, 32)
    assert torch.allclose(found, expected.flatten(1)[:, None], rtol=0, atol=1e-14)
    weights = torch.linspace(-1, 1, 320, dtype=torch.float64).view(10, 1, 32)
    gradients = [torch.autograd.grad((each * weights.view_as(each)).sum(), inputs) for each in (found, expected)]
    for gradient, expected_gradient in zip(*gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-14)


CUT_LENGTHS = (3, 5, 1)
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
        (core_attention._of_package, package),
        (core_attention._of_torch, torch_with_window),
        (core_attention._of_torch, torch_before),
    ],
)
def test_every_kernel_gives_what_one_sequence_at_a_time_gives(monkeypatch, adapt, kernel, is_causal):
    monkeypatch.setattr(core_attention, "find_kernel", lambda: adapt(kernel))
    rule = MaskRule(is_causal=is_causal)
    choices = (AttentionChoice(rule, AttentionShape(), backend=name, alone=name) for name in ("flash", "sequences"))
    flash, plain = (CoreAttention(choice=choice) for choice in choices)
    generator = torch.Generator().manual_seed(1)
    shapes = ((9, 1, 4, 8), (9, 1, 2, 8), (9, 1, 2, 8))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    packed = PackedLengths(lengths=CUT_LENGTHS)
    found, expected = (each(*inputs, None, packed_seq_params=packed) for each in (flash, plain))
    assert found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("lengths", [(3, 3, 3), (150, 150), (64, 1, 129, 0), (1100, 70)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_queries_give_the_references_output_and_gradients(is_causal, lengths):
    choice = AttentionChoice(MaskRule(is_causal=is_causal), AttentionShape(), backend="sequences", alone="sequences")
    generator, packed = torch.Generator().manual_seed(1), PackedLengths(lengths=lengths)
    shapes = [(sum(lengths), 1, heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(sum(lengths), 1, 32, generator=generator, dtype=torch.float64)
    found = CoreAttention(choice=choice)(*inputs, None, packed_seq_params=packed)
    expected = attend_densely(*(each[:, 0] for each in inputs), mask=packed.mask(choice.rule), softmax_scale=None)
    sides = [(each, *torch.autograd.grad(each, inputs, weights)) for each in (found, expected.flatten(1)[:, None])]
    assert mask_cases.largest_error(*sides) < 1e-13


def test_torchs_kernel_is_the_one_that_is_adapted_to():
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch has it from 2.10 on")
    known = list(inspect.signature(varlen.varlen_attn).parameters)
    assert known[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "scale" in known and {"window_size", "is_causal"} & set(known)


def test_where_ranks_share_tokens_flash_attends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_attention, "find_kernel", lambda: attend)
    shared = choose_attention("auto", rule=MaskRule(is_causal=False), shape=HALF, is_shared=True)
    assert (shared.backend, shared.alone) == ("triton", "flash")
