import itertools
import math

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from multimodal.attention.packed_attention import PackedAttention, PackedLengths, RecomputedPackedAttention

LENGTHS = (3, 1, 4)


def token_by_token(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """Attention by its definition, with one decision per pair of tokens."""
    num_tokens, _, num_heads, channels = query.shape
    sequence = [index for index, length in enumerate(LENGTHS) for _ in range(length)]
    mixed = torch.zeros(num_tokens, 1, num_heads, channels, dtype=query.dtype)
    for token, head in itertools.product(range(num_tokens), range(num_heads)):
        group = head * key.shape[2] // num_heads
        seen = [t for t in range(num_tokens) if sequence[t] == sequence[token] and (t <= token or not is_causal)]
        scores = torch.stack([query[token, 0, head] @ key[other, 0, group] for other in seen]) / math.sqrt(channels)
        mixed[token, 0, head] = scores.softmax(0) @ value[seen, 0, group]
    return mixed.flatten(2)


@pytest.mark.parametrize("kind", [PackedAttention, RecomputedPackedAttention])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 4), (4, 2), (4, 1)])
def test_equals_attention_by_definition(kind: type[PackedAttention], is_causal: bool, num_heads: int, num_groups: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(LENGTHS), 1, heads, 5) for heads in (num_heads, num_groups, num_groups)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    attention = kind(config=None, attn_mask_type=AttnMaskType.causal if is_causal else AttnMaskType.no_mask)  # type: ignore[arg-type]
    found = attention(*inputs, None, packed_seq_params=PackedLengths(lengths=LENGTHS))
    expected = token_by_token(*inputs, is_causal=is_causal)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-12)
