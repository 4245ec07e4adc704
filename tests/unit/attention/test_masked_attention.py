import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from multimodal.attention.bitfield import MaskMode
from multimodal.attention.dense_attention import attend_densely
from multimodal.attention.masked_attention import MaskedAttention
from multimodal.attention.packed_attention import PackedAttention
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.attention.packed_mask import ItemSpan, MaskRule

EMBEDDED = MaskRule(is_causal=True, mode=MaskMode.EMBEDDED, modalities=("vision",))
PACKED = PackedLengths(lengths=(6, 4), items=(ItemSpan(1, 4, "vision"), ItemSpan(6, 3, "vision")))


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(10, 1, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("recompute", [False, True])
def test_equals_the_reference_in_megatrons_layout(recompute: bool) -> None:
    attention = MaskedAttention(
        config=None,  # type: ignore[arg-type]
        attn_mask_type=AttnMaskType.causal,
        rule=EMBEDDED,
        backend="blocks",
        recompute=recompute,
    )
    inputs = draw()
    found = attention(*inputs, None, packed_seq_params=PACKED)
    expected = attend_densely(*(each[:, 0] for each in inputs), mask=PACKED.mask(EMBEDDED), softmax_scale=None)
    assert found.shape == (10, 1, 32)
    assert torch.allclose(found, expected.flatten(1)[:, None], rtol=0, atol=1e-14)
    weights = torch.linspace(-1, 1, 320, dtype=torch.float64).view(10, 1, 32)
    gradients = [torch.autograd.grad((each * weights.view_as(each)).sum(), inputs) for each in (found, expected)]
    for gradient, expected_gradient in zip(*gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize("is_causal", [True, False])
def test_without_items_equals_one_sequence_at_a_time(is_causal: bool) -> None:
    kind = AttnMaskType.causal if is_causal else AttnMaskType.no_mask
    rule = MaskRule(is_causal=is_causal)
    masked = MaskedAttention(config=None, attn_mask_type=kind, rule=rule, backend="blocks")  # type: ignore[arg-type]
    sequences = PackedAttention(config=None, attn_mask_type=kind)  # type: ignore[arg-type]
    packed = PackedLengths(lengths=(6, 4))
    found, expected = (each(*draw(), None, packed_seq_params=packed) for each in (masked, sequences))
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
