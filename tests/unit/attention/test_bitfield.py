import numpy as np
import pytest

from multimodal.attention.bitfield import BitfieldMask, MaskMode, MaskSegment, build_bitfield_mask
from multimodal.values.errors import DataError, ModelError

TEXT2, TEXT1 = MaskSegment(2), MaskSegment(1)


def item(num_tokens, index, modality="vision"):
    return MaskSegment(num_tokens, modality, index)


def rows(mask):
    return ["".join("x" if seen else "." for seen in row) for row in mask.to_dense()]


def build(*samples, **options):
    return build_bitfield_mask(samples, modalities=("vision", "audio"), **options)


def test_items_see_themselves_and_text_sees_all_before_it():
    assert rows(build([TEXT1, item(2, 0), TEXT2], mode="embedded")) == ["x....", ".xx..", ".xx..", "xxxx.", "xxxxx"]


def test_items_do_not_see_other_items_of_their_modality():
    assert rows(build([item(2, 0), item(1, 1), TEXT1], mode="embedded")) == ["xx..", "xx..", "..x.", "xxxx"]


def test_a_prefix_sees_itself_in_both_directions():
    """Markers before and between items are part of it, items of any modality see each other, text behind it is causal."""
    found = build([TEXT1, item(1, 0), TEXT1, item(1, 1, "audio"), TEXT2], [TEXT2, item(0, 0)], mode="prefix")
    assert rows(found) == ["xxxx....", "xxxx....", "xxxx....", "xxxx....", "xxxxx...", "xxxxxx..", "......x.", "......xx"]


def test_a_prefix_needs_an_item():
    assert rows(build_bitfield_mask([[TEXT2]], modalities=(), mode="prefix")) == ["x.", "xx"]


def test_items_see_other_items_of_their_modality_in_the_published_mask():
    mask = build([item(1, 0), item(1, 1, "audio"), TEXT1, item(1, 2)], mode="modality")
    assert rows(mask) == ["x..x", ".x..", "xxx.", "x..x"]


def test_parts_of_an_item_see_each_other_around_text():
    assert rows(build([item(1, 0), TEXT1, item(1, 0), TEXT1])) == ["x.x.", "xx..", "x.x.", "xxxx"]


def test_samples_never_see_each_other():
    assert rows(build([TEXT1, item(1, 0)], [item(1, 0), TEXT1])) == ["x...", ".x..", "..x.", "..xx"]


def test_causal_mode_is_a_triangle_per_sample():
    dense = build([TEXT1, item(2, 0)], [item(2, 0)], mode=MaskMode.CAUSAL).to_dense()
    assert np.array_equal(dense[:3, :3], np.tri(3, dtype=bool))
    assert np.array_equal(dense[3:, 3:], np.tri(2, dtype=bool))
    assert not dense[3:, :3].any()


def test_empty_segments_and_samples_leave_no_tokens():
    assert rows(build([], [MaskSegment(0), item(0, 0), TEXT1], [])) == ["x"]
    assert build().num_tokens == 0
    assert build().to_dense().shape == (0, 0)


def test_some_tokens_are_evaluated_alone():
    mask = build([TEXT2, item(3, 0), TEXT2], [TEXT2])
    queries, keys = np.array([6, 3, 8]), np.array([4, 7, 0, 6])
    assert np.array_equal(mask.visible(queries, keys), mask.to_dense()[queries][:, keys])


def test_all_61_encoders_have_their_bit():
    names = [f"encoder{index}" for index in range(61)]
    mask = build_bitfield_mask([[MaskSegment(1, name, index) for index, name in enumerate(names)] + [TEXT1]], modalities=names)
    assert np.array_equal(mask.to_dense()[:-1, :-1], np.eye(61, dtype=bool))
    assert mask.to_dense()[-1].all()


def test_64_modalities_are_refused():
    with pytest.raises(
        ModelError, match="64 modalities besides text do not fit an attention mask of 64 bits; expected at most 61"
    ):
        build_bitfield_mask([], modalities=[f"encoder{index}" for index in range(64)])


@pytest.mark.parametrize(
    ("segments", "options", "message"),
    [
        ([MaskSegment(1, "smell", 0)], {}, "sample 0, segment 0: modality 'smell' is none of text, vision, audio"),
        ([TEXT1, MaskSegment(-1)], {}, "segment 1: has -1 tokens"),
        ([item(1, -1)], {}, "an item of 'vision' has index -1; number items from 0"),
        ([item(1, 0), item(1, 0, "audio")], {}, "item 0 is of 'audio' here and of 'vision' before"),
        ([TEXT1], {"mode": "sliding"}, "'sliding' is no mask mode; expected one of causal, prefix, embedded, modality"),
    ],
)
def test_wrong_segments_are_named(segments, options, message):
    with pytest.raises(DataError, match=message):
        build(segments, **options)


def test_modalities_need_distinct_names():
    with pytest.raises(ModelError, match="not distinct or contain 'text'"):
        build_bitfield_mask([], modalities=("vision", "text"))


def test_arrays_of_another_type_or_length_are_refused():
    bits, ids = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int32)
    with pytest.raises(DataError, match=r"item_ids are int64 of shape \(3,\); expected int32 of shape \(3,\)"):
        BitfieldMask(bits, ids, bits)
    with pytest.raises(DataError, match=r"sample_ids are int32 of shape \(2,\)"):
        BitfieldMask(bits, ids[:2], ids)
