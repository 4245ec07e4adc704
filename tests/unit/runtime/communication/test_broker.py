"""Which rows of a message travel from which rank to which, of whole units and of tokens spread over context parallel ranks."""

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
