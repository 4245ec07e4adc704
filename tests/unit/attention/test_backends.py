import math
import sys

import pytest
import torch
from hypothesis import given, settings

from multimodal.attention.attention_backend import BACKEND_NAMES, load_backend
from multimodal.attention.attention_choice import choose_backend
from multimodal.attention.attention_mask import AttentionMask
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.block_attention import attend_by_blocks, attend_densely
from multimodal.attention.flex_attention import attend_by_flex_attention
from multimodal.attention.packed_lengths import MaskRule
from multimodal.values.errors import ConfigError
from tests.unit.attention.mask_cases import (
    MASKS,
    build_mask,
    draw_inputs,
    largest_error,
    named_mask,
    output_and_gradients,
    random_masks,
)

EMBEDDED = MaskRule(is_causal=True, mode=MaskMode.EMBEDDED)


def test_the_reference_attends_by_definition():
    mask = build_mask(MASKS["embedded"][1], mode="embedded")
    query, key, value, _ = draw_inputs(mask, heads=4, groups=2)
    found = attend_densely(query, key, value, mask=mask, softmax_scale=0.3)
    seen_by = mask.tokens.to_dense()
    for token, head in ((0, 0), (6, 1), (40, 2), (63, 3)):
        scores = key[seen_by[token], head // 2] @ query[token, head] * 0.3
        assert torch.allclose(found[token, head], scores.softmax(0) @ value[seen_by[token], head // 2], rtol=0, atol=1e-14)


@given(mask=random_masks())
@settings(max_examples=40)
def test_blocks_give_the_references_output_and_gradients(mask: AttentionMask) -> None:
    inputs = draw_inputs(mask, heads=4, groups=2)
    expected = output_and_gradients(attend_densely, inputs, mask)
    assert largest_error(output_and_gradients(attend_by_blocks, inputs, mask), expected) < 1e-13


def test_blocks_in_bfloat16_are_summed_in_float32() -> None:
    mask = build_mask(MASKS["embedded"][1], mode="embedded")
    inputs = tuple(tensor.bfloat16().double() for tensor in draw_inputs(mask))
    expected = output_and_gradients(attend_densely, inputs, mask)
    found = output_and_gradients(attend_by_blocks, inputs, mask, torch.bfloat16)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    assert largest_error(found, expected) < 0.03


def test_blocks_touch_what_is_visible_only() -> None:
    mask = build_mask(MASKS["packed, empty modalities"][1], mode="embedded", query_blocks=(0,))
    query, key, value, _ = draw_inputs(mask)
    key[16:], value[16:] = math.nan, math.nan
    assert attend_by_blocks(query, key, value, mask=mask, softmax_scale=None).isfinite().all()


@pytest.mark.parametrize(
    ("name", "query_blocks"), [("embedded", None), ("packed, empty modalities", (0, 2)), ("window of 20", (1, 4))]
)
def test_flex_attention_gives_the_references_output(name: str, query_blocks: tuple[int, ...] | None) -> None:
    mask = named_mask(name, query_blocks=query_blocks)
    query, key, value, _ = draw_inputs(mask, heads=4, groups=2)
    mask.softcap = 0.5
    with torch.no_grad():
        found = attend_by_flex_attention(query, key, value, mask=mask, softmax_scale=0.2)
    expected = attend_densely(query, key, value, mask=mask, softmax_scale=0.2)
    assert largest_error((found,), (expected,)) < 1e-13


def test_flex_attention_does_not_train_on_a_cpu() -> None:
    mask = build_mask(MASKS["causal"][1], mode="causal")
    query, key, value, _ = draw_inputs(mask)
    with pytest.raises(ConfigError, match="no backward there; choose --attention-backend blocks"):
        attend_by_flex_attention(query.requires_grad_(), key, value, mask=mask, softmax_scale=None)


def test_auto_takes_sequences_where_they_suffice() -> None:
    assert choose_backend("auto", rule=MaskRule(is_causal=True)) == "sequences"
    assert choose_backend("auto", rule=MaskRule(is_causal=False, mode=MaskMode.EMBEDDED)) == "sequences"
    assert choose_backend("auto", rule=EMBEDDED) == "blocks"
    assert [choose_backend(name, rule=EMBEDDED) for name in BACKEND_NAMES[3:]] == list(BACKEND_NAMES[3:])


@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [
        ("sequences", EMBEDDED, "sequences cannot evaluate --attention-mask embedded; choose --attention-backend blocks"),
        ("sequences", MaskRule(is_causal=True, window=9), "sequences cannot evaluate sliding_window 9; choose"),
        ("flash", MaskRule(is_causal=True, softcap=5.0), "flash cannot evaluate attention_softcap 5.0; choose"),
        ("triton", MaskRule(is_causal=True, softcap=5.0), "triton cannot bound scores .* choose --attention-backend flex"),
    ],
)
def test_backends_refuse_what_they_cannot_evaluate(name: str, rule: MaskRule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(name, rule=rule)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("multimodal.attention.triton_")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="--attention-backend triton: triton is not installed"):
        load_backend("triton")
