"""Items are dealt whole to context parallel ranks, and those are cut that leave one with too much."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from multimodal.cost.token_shares import CUT, TOLERANCE, ItemDealer, RankLoad, WholeItemShares, deal_items
from multimodal.cost.unit_load import UnitLoad, add_loads
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths

BLOCK = 8
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": {"merge_size": 2}, **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
            "painter": {"role": "generator", "image": {"merge_size": 1}, **SHAPE},
        }
    }
)


def costs_of(lengths: Sequence[int]) -> list[int]:
    return [50 * length + length * length for length in lengths]


def share(lengths: Sequence[int], *, num_ranks: int) -> WholeItemShares:
    return deal_items(lengths, costs=costs_of(lengths), num_ranks=num_ranks, block_size=BLOCK)


def work_of_ranks(lengths: Sequence[int], shares: WholeItemShares, *, num_ranks: int) -> NDArray[np.float64]:
    """Every token once, at its item's cost per token."""
    work, per_token = np.zeros(num_ranks), []
    for length, cost, owner in zip(lengths, costs_of(lengths), shares.owners.tolist(), strict=True):
        if owner == CUT:
            per_token += [cost / length] * length
        else:
            work[owner] += cost
    np.add.at(work, np.repeat(shares.cut.owners, BLOCK)[: len(per_token)], per_token)
    return work


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "owners", "block_owners"),
    [
        ([30, 30], 2, [0, 1], []),
        ([30, 20, 20, 30], 2, [0, 0, 1, 1], []),
        ([64], 4, [CUT], [0, 1, 2, 3, 0, 1, 2, 3]),
        ([10, 200, 10], 2, [1, CUT, 1], [*([0, 1] * 12), 0]),
        ([8, 6], 4, [0, 1], []),
        ([48, 48, 48], 2, [0, 1, CUT], [0, 1, 0, 1, 0, 1]),
        ([], 3, [], []),
    ],
    ids=["equal", "pairs", "one", "one among short ones", "of a block", "one too many", "none"],
)
def test_examples(lengths: list[int], num_ranks: int, owners: list[int], block_owners: list[int]) -> None:
    shares = share(lengths, num_ranks=num_ranks)
    assert (shares.owners.tolist(), shares.cut.owners.tolist()) == (owners, block_owners)


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30), num_ranks=st.integers(1, 6))
def test_every_token_has_one_rank_and_none_has_too_much(lengths: list[int], num_ranks: int) -> None:
    shares = share(lengths, num_ranks=num_ranks)
    num_cut = sum(length for length, owner in zip(lengths, shares.owners, strict=True) if owner == CUT)
    assert len(shares.cut.owners) == -(-num_cut // BLOCK)
    assert np.isin(shares.owners, (CUT, *range(num_ranks))).all() and np.isin(shares.cut.owners, range(num_ranks)).all()
    work = work_of_ranks(lengths, shares, num_ranks=num_ranks)
    assert work.sum() == pytest.approx(sum(costs_of(lengths)))
    costs_and_lengths = list(zip(costs_of(lengths), lengths, strict=True))
    even, of_block = work.sum() / num_ranks, BLOCK * max(cost / length for cost, length in costs_and_lengths)
    of_short = sum(cost for cost, length in costs_and_lengths if length <= BLOCK)
    assert work.max() <= max((1 + TOLERANCE) * even, even + of_block, of_short) + 1e-6


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30), num_ranks=st.integers(2, 6))
def test_nothing_is_cut_where_whole_items_are_near_to_even_shares(lengths: list[int], num_ranks: int) -> None:
    costs = sorted(costs_of(lengths), reverse=True)
    whole = np.zeros(num_ranks)
    for cost in costs:
        whole[whole.argmin()] += cost
    shares = share(lengths, num_ranks=num_ranks)
    is_near = whole.max() <= (1 + TOLERANCE) * whole.mean()
    assert not (is_near and (shares.owners == CUT).any())
    longer = [length for length, cost in zip(lengths, costs_of(lengths), strict=True) if cost > (1 + TOLERANCE) * whole.mean()]
    cut = [length for length, owner in zip(lengths, shares.owners, strict=True) if owner == CUT]
    assert all(length in cut for length in longer if length > BLOCK)


def test_a_cut_item_goes_to_no_more_ranks_than_have_room() -> None:
    lengths = [215, 100, 100, 100, 100]
    shares = share(lengths, num_ranks=4)
    assert shares.owners.tolist() == [CUT, 1, 2, 3, 1]
    assert set(shares.cut.owners.tolist()) == {0, 2, 3}


@pytest.mark.parametrize(("unit", "outputs"), [("vision", (10, 50, 10)), ("painter", (40, 200, 40))])
def test_loads_of_ranks_add_up_to_the_microbatch(unit: str, outputs: tuple[int, ...]) -> None:
    items = [ItemLengths(unit, length, length // 4 if unit == "vision" else 0) for length in (40, 200, 40)]
    dealer = ItemDealer(GRAPH, unit, 2, BLOCK)
    loads = dealer.loads_of(items)
    assert loads == tuple(UnitLoad(item.num_tokens, item.num_tokens**2, out, 1) for item, out in zip(items, outputs, strict=True))
    ranks = dealer.rank_loads(loads)
    total = add_loads(part for rank in ranks for part in rank)
    assert total[:2] == add_loads(loads)[:2] and total.num_outputs == sum(outputs)
    assert ranks[0] == RankLoad(UnitLoad(), UnitLoad(*ranks[0].cut))
    assert ranks[1].whole == add_loads(loads[::2]) and ranks[1].cut.num_squared == 200 * ranks[1].cut.num_tokens
    assert dealer.work(ranks[0]) == pytest.approx(dealer.work(ranks[1]), rel=0.1)
