"""Which rows of a message travel from which rank to which, of whole units and of tokens spread over context parallel ranks."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.runtime.communication.broker import Link, Piece, Rows, RowShares, pieces_of, share_of_rows
from multimodal.attention.device_values import CPU


def replicated(num_rows: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> Link:
    return Link(sources, targets, (num_rows, 8), is_replicated=True)


def test_two_ranks_send_to_three_only_what_overlaps() -> None:
    assert pieces_of(replicated(7, (0, 1), (2, 3, 4))) == (
        Piece(0, 2, 0, 3),
        Piece(0, 3, 3, 4),
        Piece(1, 3, 4, 6),
        Piece(1, 4, 6, 7),
    )


@given(num_rows=st.integers(0, 40), num_sources=st.integers(1, 5), num_targets=st.integers(1, 5), shared=st.integers(0, 5))
def test_every_row_reaches_its_target_once(num_rows: int, num_sources: int, num_targets: int, shared: int) -> None:
    sources = tuple(range(num_sources))
    first = num_sources - min(shared, num_sources)
    targets = tuple(range(first, first + num_targets))
    arrivals: Counter[int] = Counter()
    for piece in pieces_of(replicated(num_rows, sources, targets)):
        rows = range(piece.first_row, piece.last_row)
        source, target = sources.index(piece.source_rank), targets.index(piece.target_rank)
        assert set(rows) <= set(share_of_rows(num_rows, num_shares=num_sources, index=source))
        assert set(rows) <= set(share_of_rows(num_rows, num_shares=num_targets, index=target))
        arrivals.update(rows)
    assert arrivals == Counter(range(num_rows))


NUM_ROWS = 12


def places_of(rows: RowShares, target: int) -> Rows:
    places = rows.positions_taken(target, CPU)
    return np.arange(len(rows.taken[target])) if places is None else places.numpy()


@st.composite
def row_shares(draw: st.DrawFn, *, takes_once: bool = False) -> RowShares:
    """Every row has one giver; takers are one each, or any."""
    owners = np.array(draw(st.lists(st.integers(0, 2), min_size=NUM_ROWS, max_size=NUM_ROWS)))
    takers = [draw(st.sets(st.integers(0, 2), max_size=1 if takes_once else 3)) for _ in range(NUM_ROWS)]
    given_rows = tuple(np.flatnonzero(owners == rank) for rank in range(3))
    return RowShares(given=given_rows, taken=tuple(_taken_by(rank, takers) for rank in range(3)))


def _taken_by(rank: int, takers: list[set[int]]) -> Rows:
    return np.array([row for row, ranks in enumerate(takers) if rank in ranks], dtype=np.int64)


@given(rows=row_shares())
def test_every_rank_receives_what_it_takes_once(rows: RowShares) -> None:
    for target, taken in enumerate(rows.taken):
        assert rows.num_received(target) == len(taken)
        assert sorted(places_of(rows, target).tolist()) == list(range(len(taken)))
        received = [rows.given[source][rows.positions_given(source, target, CPU).numpy()] for source in range(3)]
        assert np.array_equal(taken[places_of(rows, target)], np.concatenate(received))
        assert [rows.first_row(source, target) for source in range(3)] == [
            0,
            len(received[0]),
            len(received[0]) + len(received[1]),
        ]


@given(rows=row_shares())
def test_gradients_come_back_from_all_who_took(rows: RowShares) -> None:
    back = rows.reversed
    times_taken = Counter(row for taken in rows.taken for row in taken.tolist())
    for target, own in enumerate(rows.given):
        arrived = Counter(own[places_of(back, target)].tolist())
        assert arrived == Counter({row: times_taken[row] for row in own.tolist() if times_taken[row]})


@given(rows=row_shares(), tensor_parallel_sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_tensor_parallel_ranks_cut_it_without_gap(rows: RowShares, tensor_parallel_sizes: tuple[int, int]) -> None:
    sizes = tensor_parallel_sizes
    sources, targets = tuple(range(3 * sizes[0])), tuple(range(20, 20 + 3 * sizes[1]))
    link = Link(sources, targets, (NUM_ROWS, 8), is_replicated=True, rows=rows)
    pieces = pieces_of(link)
    for index, group in enumerate(link.target_groups):
        arrived = [row for p in pieces if p.target_rank in group for row in range(p.first_row, p.last_row)]
        assert sorted(arrived) == list(range(rows.num_received(index)))
    for piece in pieces:
        source, target = piece.source_rank // sizes[0], (piece.target_rank - 20) // sizes[1]
        first = rows.first_row(source, target)
        assert first <= piece.first_row < piece.last_row <= first + len(rows.common[target][source])


@given(rows=row_shares(), rank=st.integers(0, 2))
def test_what_is_prepared_is_there_on_another_device(rows: RowShares, rank: int) -> None:
    rows.prepare(giver=rank, taker=rank)
    moved = rows.map_tensors(lambda tensor: tensor.to("meta"))
    for here, there in ((rows, moved), (rows.reversed, moved.reversed)):
        assert [mine.tolist() for mine in there.given] == [mine.tolist() for mine in here.given]
        for other in range(3):
            given_rows = there.positions_given(rank, other, torch.device("meta"))
            assert given_rows.is_meta and given_rows.shape == here.positions_given(rank, other, CPU).shape
        places = there.positions_taken(rank, torch.device("meta"))
        assert (places is None) == (here.positions_taken(rank, CPU) is None)
