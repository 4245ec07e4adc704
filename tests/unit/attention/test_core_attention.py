import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from multimodal.attention.attention_backend import AttentionShape
from multimodal.attention.attention_choice import choose_attention
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.block_attention import attend_densely
from multimodal.attention.core_attention import CoreAttention
from multimodal.attention.packed_lengths import ItemSpan, MaskRule, PackedLengths
from multimodal.cost.token_shares import BlockShares, RankShare, WholeItemShares

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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 4), (4, 2), (4, 1)])
def test_equals_attention_by_definition(recompute: bool, is_causal: bool, num_heads: int, num_groups: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(LENGTHS), 1, heads, 5) for heads in (num_heads, num_groups, num_groups)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    choice = choose_attention("sequences", rule=MaskRule(is_causal=is_causal), shape=AttentionShape(), is_shared=False)
    attention = CoreAttention(choice=choice, recompute=recompute)
    found = attention(*inputs, None, packed_seq_params=PackedLengths(lengths=LENGTHS))
    expected = token_by_token(*inputs, is_causal=is_causal)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-12)


EMBEDDED = MaskRule(is_causal=True, mode=MaskMode.EMBEDDED, modalities=("vision",))
PACKED = PackedLengths(lengths=(6, 4), items=(ItemSpan(1, 4, "vision"), ItemSpan(6, 3, "vision")))


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(10, 1, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("recompute", [False, True])
def test_equals_the_reference_in_megatrons_layout(recompute: bool) -> None:
    choice = choose_attention("blocks", rule=EMBEDDED, shape=AttentionShape(), is_shared=False)
    attention = CoreAttention(choice=choice, recompute=recompute)
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
    given = {"rule": MaskRule(is_causal=is_causal), "shape": AttentionShape(), "is_shared": False}
    attentions = (CoreAttention(choice=choose_attention(name, **given)) for name in ("blocks", "sequences"))  # type: ignore[arg-type]
    packed = PackedLengths(lengths=(6, 4))
    found, expected = (each(*draw(), None, packed_seq_params=packed) for each in attentions)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def test_ranks_with_whole_items_attend_without_each_other() -> None:
    """No process group is there to be asked; the third rank has nothing but its row of padding."""
    inputs = [torch.randn(sum(LENGTHS), 1, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    choice = choose_attention("blocks", rule=MaskRule(is_causal=False), shape=AttentionShape(), is_shared=True)
    attention = CoreAttention(choice=choice, recompute=True)
    expected = token_by_token(*inputs, is_causal=False)
    nothing = BlockShares(np.empty(0, dtype=np.int32), 3, num_tokens=0, block_size=2)
    shares = WholeItemShares(LENGTHS, np.array([1, 0, 1], dtype=np.int32), nothing, num_ranks=3)
    for rank, positions in enumerate([[3], [0, 1, 2, 4, 5, 6, 7], []]):
        own = [torch.cat((tensor[positions], torch.zeros(1, 1, 2, 5))) for tensor in inputs]
        found = attention(*own, None, packed_seq_params=PackedLengths(lengths=LENGTHS, share=RankShare(shares, rank)))
        assert torch.allclose(found[:-1], expected[positions], rtol=0, atol=1e-12) and not found[-1].any()
        torch.autograd.grad(found.sum(), inputs[:1])
