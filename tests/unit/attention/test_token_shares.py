import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention.attention_mask import AttentionMask
from multimodal.attention.packed_lengths import MaskRule, PackedLengths
from multimodal.attention.share_tokens import TokenDistribution, share_tokens
from multimodal.cost.token_shares import BlockShares, RankShare, WholeItemShares
from tests.unit.attention.mask_cases import build_mask, item, random_masks, text


def test_shares_keep_the_order_of_the_sequence() -> None:
    shares = BlockShares(np.array([1, 0, 1, 0], dtype=np.int32), num_ranks=3, num_tokens=14, block_size=4)
    assert shares.blocks_of(0) == (1, 3) and shares.positions_of(0).tolist() == [4, 5, 6, 7, 12, 13]
    assert shares.blocks_of(1) == (0, 2) and shares.positions_of(1).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert shares.blocks_of(2) == () and shares.num_rows == 8
    assert shares.gathered_rows.tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 12, 13, 14, 15, 4, 5]


@given(mask=random_masks(), num_ranks=st.integers(1, 5), method=st.sampled_from(TokenDistribution))
def test_every_token_is_gathered_from_where_its_owner_put_it(
    mask: AttentionMask, num_ranks: int, method: TokenDistribution
) -> None:
    shares = share_tokens(mask.tokens, num_ranks=num_ranks, method=method, block_size=mask.block_size)
    gathered = np.full(num_ranks * shares.num_rows, -1)
    for rank in range(num_ranks):
        positions = shares.positions_of(rank)
        gathered[rank * shares.num_rows :][: len(positions)] = positions
        blocks = AttentionMask(mask.tokens, block_size=mask.block_size, query_blocks=shares.blocks_of(rank))
        assert blocks.query_positions.tolist() == positions.tolist()
    assert gathered[shares.gathered_rows].tolist() == list(range(mask.num_keys))


@pytest.mark.parametrize("method", TokenDistribution)
def test_the_work_of_all_ranks_is_the_masks(method: TokenDistribution) -> None:
    mask = build_mask([[text(50), item(60, 0), text(90)], [item(40, 0), text(20)]], mode="embedded")
    shares = share_tokens(mask.tokens, num_ranks=3, method=method, block_size=16)
    parts = [AttentionMask(mask.tokens, block_size=16, query_blocks=shares.blocks_of(rank)) for rank in range(3)]
    assert sum(len(part.by_query.blocks) for part in parts) == len(mask.by_query.blocks)
    if method is TokenDistribution.LPT:
        work = [len(part.by_query.blocks) for part in parts]
        assert max(work) - min(work) <= 2


def test_whole_items_and_parts_of_cut_ones_keep_the_order_of_the_sequence() -> None:
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
