from multimodal.attention.bitfield import MaskMode, MaskSegment, build_bitfield_mask
from multimodal.attention.packed_lengths import ItemSpan, MaskRule, PackedLengths, build_packed_mask

MODALITIES = ("vision", "audio")
ITEMS = (ItemSpan(7, 2, "audio"), ItemSpan(2, 3, "vision"), ItemSpan(5, 1, "vision"))
"""In a first sample of 6 tokens and a second of 4; in no order."""


def rule(mode: MaskMode) -> MaskRule:
    return MaskRule(is_causal=True, mode=mode, modalities=MODALITIES)


def test_text_and_items_are_cut_at_their_borders() -> None:
    found = build_packed_mask((6, 4), items=ITEMS, rule=rule(MaskMode.EMBEDDED))
    text, item = MaskSegment, lambda length, index, modality: MaskSegment(length, modality, index)
    first = [text(2), item(3, 0, "vision"), item(1, 1, "vision")]
    second = [text(1), item(2, 0, "audio"), text(1)]
    expected = build_bitfield_mask([first, second], modalities=MODALITIES, mode="embedded")
    assert (found.to_dense() == expected.to_dense()).all()


def test_causal_masks_ignore_items() -> None:
    found = build_packed_mask((6, 4), items=ITEMS, rule=rule(MaskMode.CAUSAL)).to_dense()
    expected = [[j <= i and (i < 6) == (j < 6) for j in range(10)] for i in range(10)]
    assert found.tolist() == expected


def test_every_sequence_of_an_encoder_is_one_item() -> None:
    found = build_packed_mask((2, 0, 3), items=(), rule=MaskRule(is_causal=False)).to_dense()
    assert found.tolist() == [[(i < 2) == (j < 2) for j in range(5)] for i in range(5)]


def test_a_prefix_ends_with_the_last_item_of_its_sample() -> None:
    found = build_packed_mask((6, 4), items=ITEMS, rule=rule(MaskMode.PREFIX)).to_dense()
    assert found[:6].tolist() == [[j < 6 for j in range(10)]] * 6
    assert found[6:].tolist() == [[6 <= j < 9 for j in range(10)]] * 3 + [[j >= 6 for j in range(10)]]


def test_layers_share_one_mask() -> None:
    packed = PackedLengths(lengths=(6, 4), items=ITEMS)
    assert packed.mask(rule(MaskMode.EMBEDDED)) is packed.mask(rule(MaskMode.EMBEDDED))
    assert packed.mask(rule(MaskMode.EMBEDDED)) is not packed.mask(rule(MaskMode.CAUSAL))
