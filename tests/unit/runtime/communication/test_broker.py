"""Which rows of a message travel from which rank to which; moving them is the master test's."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron.runtime.communication.broker import Link, Piece, pieces_of, share_of_rows


def replicated(num_rows: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> Link:
    return Link(sources, targets, (num_rows, 8), is_replicated=True)


def test_two_ranks_send_to_three_only_what_overlaps() -> None:
    assert pieces_of(replicated(7, (0, 1), (2, 3, 4))) == (
        Piece(0, 2, 0, 3),
        Piece(0, 3, 3, 4),
        Piece(1, 3, 4, 6),
        Piece(1, 4, 6, 7),
    )


def test_inside_a_unit_each_rank_passes_on_all_it_has() -> None:
    link = Link((4, 5), (6, 7), (3, 1, 8), is_replicated=False)
    assert pieces_of(link) == (Piece(4, 6, 0, 3), Piece(5, 7, 0, 3))


@given(num_rows=st.integers(0, 40), num_shares=st.integers(1, 9))
def test_shares_are_in_order_without_gap_and_no_longer_than_the_first(num_rows: int, num_shares: int) -> None:
    shares = [share_of_rows(num_rows, num_shares=num_shares, index=index) for index in range(num_shares)]
    assert [row for share in shares for row in share] == list(range(num_rows))
    assert all(len(share) <= len(shares[0]) for share in shares)
    # A target's share lies at index x len(shares[0]) of what its ranks gather.
    assert all(share.start == index * len(shares[0]) for index, share in enumerate(shares) if share)


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
