"""One context parallel rank's part of a packed microbatch."""

import numpy as np
import pytest
import torch

from multimodal.attention.packed_lengths import ItemSpan
from multimodal.cost.token_shares import BlockShares, RankShare
from multimodal.model.stage_input import PackedInput, find_row_ends, share_input

SHARES = BlockShares(np.array([0, 1, 1, 0, 2], dtype=np.int32), 4, num_tokens=9, block_size=2)
"""Tokens 0 1 | 2 3 4 5 | 6 7 | 8; the last of four ranks has none."""
TEXT = PackedInput(
    (5, 4),
    torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]),
    token_ids=torch.arange(10, 19),
    items=(ItemSpan(1, 3, "vision"), ItemSpan(6, 2, "vision")),
    item_rows=torch.tensor([6, 7, 1, 2, 3]),
    target_rows=torch.tensor([0, 4, 8]),
    targets=torch.tensor([7, 8, 9]),
    generator_rows=torch.tensor([8, 5]),
)


@pytest.mark.parametrize(
    ("rank", "positions", "item_rows", "targets", "generator_rows"),
    [
        (0, [0, 1, 1, 2], [2, 3, 1], [(0, 7)], []),
        (1, [2, 3, 4, 0], [0, 1], [(2, 8)], [3]),
        (2, [3], [], [(0, 9)], [0]),
        (3, [], [], [], []),
    ],
)
def test_a_rank_keeps_what_belongs_to_its_tokens(
    rank: int, positions: list[int], item_rows: list[int], targets: list[tuple[int, int]], generator_rows: list[int]
) -> None:
    own = share_input(TEXT, RankShare(SHARES, rank))
    assert own.positions.tolist() == positions
    assert own.num_tokens == len(positions)
    assert own.token_ids is not None and own.token_ids.tolist() == [10 + at for at in SHARES.positions_of(rank)]
    assert own.item_rows is not None and own.item_rows.tolist() == item_rows
    assert own.target_rows is not None and own.targets is not None
    assert list(zip(own.target_rows.tolist(), own.targets.tolist(), strict=True)) == targets
    assert own.generator_rows is not None and own.generator_rows.tolist() == generator_rows
    assert (own.lengths, own.items) == (TEXT.lengths, TEXT.items)  # the mask is the whole microbatch's


def test_a_generator_counts_the_conditions_that_its_tokens_take() -> None:
    rows = torch.tensor([2, 2, 2, 0, 0, 1, 1, 1, 1])
    whole = PackedInput((3, 2, 4), torch.zeros(9, 2, dtype=torch.long), patches=torch.arange(9.0)[:, None], condition_rows=rows)
    found = [share_input(whole, RankShare(SHARES, rank)) for rank in range(4)]
    assert [own.condition_rows.tolist() for own in found if own.condition_rows is not None] == [
        [1, 1, 0, 0],
        [2, 0, 0, 1],
        [0],
        [],
    ]
    assert [own.patches.flatten().tolist() for own in found if own.patches is not None] == [[0, 1, 6, 7], [2, 3, 4, 5], [8], []]


def test_rows_of_patches_end_with_a_token_that_comes_from_none() -> None:
    """Of images with 2 x 2 patches, 3 x 1 and 1 x 3."""
    grids = [(2, 2), (3, 1), (1, 3)]
    places = torch.tensor([(row, column) for rows, columns in grids for row in range(rows) for column in range(columns)])
    assert find_row_ends(places).tolist() == [0, 1, 10, 2, 3, 10, 4, 10, 5, 10, 6, 10, 7, 8, 9, 10]
    assert find_row_ends(places[:0]).tolist() == []
