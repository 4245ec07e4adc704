"""Values that travel in one buffer, and those derived from lengths before."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention.attention_backend import AttentionShape
from multimodal.attention.attention_choice import choose_attention
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.block_attention import attend_by_blocks
from multimodal.attention.device_values import DerivedValues, Parcel, map_tensors, tensors_of
from multimodal.attention.packed_lengths import ItemSpan, MaskRule, PackedLengths
from multimodal.attention.windows import Windows
from tests.unit.attention.mask_cases import MASKS, build_mask, draw_inputs

DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float64, torch.bool)


@given(sizes=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 3), st.sampled_from(DTYPES)), max_size=6))
def test_a_parcel_gives_back_what_was_packed(sizes: list[tuple[int, int, torch.dtype]]) -> None:
    tensors = [torch.randint(0, 2, (rows, columns)).to(dtype) for rows, columns, dtype in sizes]
    value = {"all": tuple(tensors), "again": tensors[-1:] and tensors[-1], "name": (1, "two", None)}
    parcel = Parcel.pack(value)
    found = parcel.open()
    assert not any(isinstance(each, torch.Tensor) for each in tensors_of(parcel.contents)) and found["name"] == value["name"]
    assert all(torch.equal(mine, other) and mine.dtype == other.dtype for mine, other in zip(found["all"], tensors, strict=True))
    assert parcel.buffer.numel() == sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors), "nothing is there twice"


def test_derived_values_are_made_once_and_follow_the_device() -> None:
    values, made = DerivedValues(), []

    def derive() -> torch.Tensor:
        made.append(1)
        return torch.zeros(3)

    first = values.on(torch.device("cpu"), "zeros", derive)
    assert values.on(torch.device("cpu"), "zeros", derive) is first
    elsewhere = map_tensors(values, lambda tensor: tensor.to("meta"))
    assert elsewhere.on(torch.device("meta"), "zeros", derive).is_meta and len(made) == 1


def test_all_that_attention_reads_of_items_is_prepared() -> None:
    rule = MaskRule(True, MaskMode.EMBEDDED, ("vision",))
    packed = PackedLengths(lengths=(40, 30), items=(ItemSpan(3, 20, "vision"),))
    choice = choose_attention("blocks", rule=rule, shape=AttentionShape(), is_shared=False)
    choice.prepare(packed)
    opened = Parcel.pack(packed).open()
    assert opened.lengths == packed.lengths
    mask = opened.mask(rule)
    inputs = draw_inputs(packed.mask(rule))[:3]
    expected = attend_by_blocks(*inputs, mask=packed.mask(rule), softmax_scale=None)
    before = set(mask.derived._values)
    assert torch.equal(attend_by_blocks(*inputs, mask=mask, softmax_scale=None), expected)
    assert set(mask.derived._values) == before, "something was derived only when it was read"


def test_triton_and_flex_derive_nothing_later() -> None:
    from multimodal.attention.attention_backend import load_preparation
    from multimodal.attention.flex_attention import build_flex_mask
    from multimodal.attention.triton_kernels.options import longest_item
    from multimodal.attention.triton_kernels.triton_attention import _column_work, _mask_arguments, _row_work

    device, shape = torch.device("cpu"), AttentionShape(num_heads=4, num_groups=2, num_multiprocessors=132)
    mask = build_mask(MASKS["embedded"][1], mode="embedded", query_blocks=(0, 2))
    for name in ("triton", "flex"):
        load_preparation(name)(mask, shape)
    before = set(mask.derived._values)
    limit = longest_item(len(mask.by_query.blocks), num_heads=4, num_multiprocessors=132)
    _mask_arguments(mask, device), _row_work(mask, limit, device), _column_work(mask, limit, 2, device)
    build_flex_mask(mask, device)
    assert set(mask.derived._values) == before


def test_windows_are_sequences_that_travel_with_the_tokens() -> None:
    packed = PackedLengths(lengths=(6,), windows=Windows(torch.arange(6), torch.arange(6), (4, 2)))
    packed.window_sequences.starts(torch.device("cpu"))
    moved = packed.map_tensors(lambda tensor: tensor.to("meta"))
    assert moved.window_sequences.lengths == (4, 2)
    assert moved.window_sequences.starts(torch.device("meta")).is_meta and moved.windows.order.is_meta
