"""Attention that gives back the memory of its keys and values between its forward and its backward."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from multimodal.attention.attention_backend import AttentionMask
from multimodal.attention.context_parallel import _AttendedGroup
from multimodal.attention.packed_lengths import MaskRule, PackedLengths
from multimodal.attention.share_tokens import TokenDistribution, distribute_tokens, share_tokens
from multimodal.cost.token_shares import BlockShares, RankShare, WholeItemShares
from tests.unit.attention.mask_cases import build_mask, item, random_masks, text
from tests.unit.without_kernels import without_kernels

WORKLOADS = st.one_of(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 2**57), max_size=30)).map(
    lambda workloads: np.array(workloads, dtype=np.int64)
)
BOTH = [distribute_tokens, without_kernels(distribute_tokens)]


def loads(workloads, num_ranks, *, distribute=distribute_tokens, **options):
    found = np.zeros(num_ranks, np.int64)  # sums may be larger than what a float counts exactly
    np.add.at(found, distribute(np.array(workloads), num_ranks=num_ranks, **options), workloads)
    return found


@pytest.mark.parametrize("distribute", BOTH)
def test_the_longest_block_goes_to_the_least_loaded_rank(distribute):
    assert distribute([7, 5, 4, 4], num_ranks=2).tolist() == [0, 1, 1, 0]
    assert loads([6, 1, 1, 1, 1, 2], 2, distribute=distribute).tolist() == [8, 4]


def test_blocks_are_exchanged_after_the_greedy_step():
    # Greedy alone: 7 + 4 + 3 = 14 and 6 + 5 + 1 = 12.
    assert loads([7, 6, 5, 4, 3, 1], 2).tolist() == [13, 13]


def test_zigzag_pairs_the_first_chunk_with_the_last():
    assert distribute_tokens([1] * 8, num_ranks=2, method="zigzag").tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert loads(range(1, 33), 4, method="zigzag").tolist() == [132] * 4


def test_ring_cuts_in_order():
    assert distribute_tokens([1] * 5, num_ranks=2, method="ring").tolist() == [0, 0, 0, 1, 1]


def test_random_depends_on_the_seed_alone():
    first = distribute_tokens([5] * 64, num_ranks=4, method="random", seed=1)
    assert np.array_equal(first, distribute_tokens([0] * 64, num_ranks=4, method="random", seed=1))
    assert not np.array_equal(first, distribute_tokens([5] * 64, num_ranks=4, method="random", seed=2))


@pytest.mark.parametrize("distribute", BOTH)
@pytest.mark.parametrize(("method", "largest_difference"), [("lpt", 1), ("random", 1), ("ring", 1), ("zigzag", 2)])
@given(workloads=WORKLOADS, num_ranks=st.integers(1, 9))
def test_every_block_has_a_rank_and_counts_are_even(method, largest_difference, distribute, workloads, num_ranks):
    owners = distribute(workloads, num_ranks=num_ranks, method=method)
    assert owners.dtype == np.int32
    assert owners.shape == workloads.shape
    counts = np.bincount(owners, minlength=num_ranks)
    assert len(counts) == num_ranks
    assert counts.max() - counts.min() <= largest_difference


@given(workloads=WORKLOADS, num_ranks=st.integers(1, 9))
def test_exchanges_never_load_the_most_loaded_rank_further(workloads, num_ranks):
    exchanged, placed = (loads(workloads, num_ranks, distribute=distribute).max() for distribute in BOTH)
    assert exchanged <= placed


@given(mask=random_masks(), num_ranks=st.integers(1, 5), method=st.sampled_from(TokenDistribution))
def test_every_token_is_gathered_from_where_its_owner_put_it(mask, num_ranks, method):
    shares = share_tokens(mask.tokens, num_ranks=num_ranks, method=method, block_size=mask.block_size)
    gathered = np.full(num_ranks * shares.num_rows, -1)
    for rank in range(num_ranks):
        positions = RankShare(shares, rank).positions
        gathered[rank * shares.num_rows :][: len(positions)] = positions
        blocks = AttentionMask(mask.tokens, block_size=mask.block_size, query_blocks=shares.blocks_of(rank))
        assert blocks.query_positions.tolist() == positions.tolist()
    assert gathered[shares.gathered_rows].tolist() == list(range(mask.num_keys))


@pytest.mark.parametrize("method", TokenDistribution)
def test_the_work_of_all_ranks_is_the_masks(method):
    mask = build_mask([[text(50), item(60, 0), text(90)], [item(40, 0), text(20)]], mode="embedded")
    shares = share_tokens(mask.tokens, num_ranks=3, method=method, block_size=16)
    parts = [AttentionMask(mask.tokens, block_size=16, query_blocks=shares.blocks_of(rank)) for rank in range(3)]
    assert sum(len(part.by_query.blocks) for part in parts) == len(mask.by_query.blocks)
    if method is TokenDistribution.LPT:
        work = [len(part.by_query.blocks) for part in parts]
        assert max(work) - min(work) <= 2


def test_whole_items_and_parts_of_cut_ones_keep_the_order_of_the_sequence():
    cut = BlockShares(np.array([0, 0, 1], dtype=np.int32), 2, num_tokens=9, block_size=4)
    shares = WholeItemShares((2, 5, 1, 4), np.array([1, -1, 0, -1], dtype=np.int32), cut, num_ranks=2)
    assert shares.owner_of_token.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert shares.lengths_of(1) == (2,) and shares.cut_lengths == (5, 4)
    share = RankShare(shares, 0)
    packed = PackedLengths(lengths=shares.lengths, share=share)
    assert share.positions.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10] and packed.item_parts is not None
    assert packed.item_parts.whole_rows.tolist() == [5] and packed.item_parts.whole.lengths == (1,)
    of_cut = packed.item_parts.cut
    assert of_cut.lengths == (5, 4) and packed.item_parts.cut_rows.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    mask = of_cut.mask(MaskRule(is_causal=False))
    assert (mask.num_keys, mask.num_queries) == (9, 8)


class _Product(torch.autograd.Function):
    """Keeps its output for the backward, as flash attention does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.einsum("qhc,khc,khd->qhd", query, key, value)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output = ctx.saved_tensors
        assert torch.equal(output, torch.einsum("qhc,khc,khd->qhd", query, key, value))
        return (
            torch.einsum("qhd,khc,khd->qhc", gradient, key, value),
            torch.einsum("qhd,qhc,khd->khc", gradient, query, value),
            torch.einsum("qhd,qhc,khc->khd", gradient, query, key),
        )


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output: Tensor = _Product.apply(query, key, value)
    return output


@pytest.fixture
def _only_references_count() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_only_references_count")
def test_keys_and_values_that_come_again_give_the_gradients_of_those_that_went():
    queries, gathered = torch.randn(4, 2, 3).double(), torch.randn(5, 4, 3).double()
    again = gathered.clone()
    leaves = [tensor.clone().requires_grad_() for tensor in (queries, *again.chunk(2, dim=1))]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    seen_outside: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: seen_outside.append(tensor) or tensor, lambda tensor: tensor):
        group = _AttendedGroup(attend, queries, gathered)
    output = group.release()
    assert not seen_outside and gathered.untyped_storage().nbytes() == 0
    group.reopen().copy_(again)
    found = group.gradients(torch.ones_like(output))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(found, expected, strict=True))
    graph = weakref.ref(group._leaves[0])
    del group, found
    assert graph() is None, "no cycle keeps it"
