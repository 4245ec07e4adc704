"""Every wanted rectangle is filled once, by its own rank where that holds it; moving the values is the distributed tests'."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron.runtime.state.handover import _join_holders, _parts
from megatron.runtime.state.held_tensors import Box, boxes_of_flat_range

SHAPE = (5, 3, 2)
NUM_RANKS = 4
KEY = "model.llm.w"


def cut(places: list[int]) -> list[Box]:
    """Rectangles that fill a tensor, cut at these places of its flat elements."""
    ends = sorted({0, 30, *places})
    return [box for start, stop in pairwise(ends) for box in boxes_of_flat_range(SHAPE, range(start, stop))]


def elements(box: Box) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for start, size in zip(*box, strict=True):
        found = [(*index, start + step) for index in found for step in range(size)]
    return found


places = st.lists(st.integers(1, 29), max_size=3)


@given(
    held=places,
    wanted=places,
    ranks=st.lists(st.lists(st.integers(0, NUM_RANKS - 1), min_size=1, unique=True), min_size=30, max_size=30),
    receiver=st.integers(0, NUM_RANKS - 1),
)
def test_parts_fill_what_is_wanted_and_come_from_holders(
    held: list[int], wanted: list[int], ranks: list[list[int]], receiver: int
) -> None:
    holders = {"model.llm.w": dict(zip(cut(held), ranks, strict=False))}
    boxes = {"model.llm.w": tuple(cut(wanted)), "main.llm.w": tuple(cut(wanted))}
    parts = list(_parts(boxes, holders, kind="model", receiver=receiver))
    filled = Counter(index for part in parts for index in elements(part.box))
    assert filled == Counter(elements(Box((0, 0, 0), SHAPE)))
    for part in parts:
        (able,) = (able for box, able in holders["model.llm.w"].items() if set(elements(part.box)) <= set(elements(box)))
        assert part.holder == receiver if receiver in able else part.holder in able


@given(
    originals=places,
    copies=st.lists(places, min_size=1, max_size=3),
    lost=st.sets(st.integers(0, 30), max_size=30),
    rank_of_box=st.lists(st.integers(0, NUM_RANKS - 1), min_size=60, max_size=60),
)
def test_copies_that_are_cut_otherwise_make_up_for_lost_originals(
    originals: list[int], copies: list[list[int]], lost: set[int], rank_of_box: list[int]
) -> None:
    ranks = iter(rank_of_box)
    held: list[list[Box]] = [[] for _ in range(NUM_RANKS)]
    copied: list[list[Box]] = [[] for _ in range(NUM_RANKS)]
    for number, box in enumerate(cut(originals)):
        if number not in lost:
            held[next(ranks)].append(box)
    for each in copies:
        for box in cut(each):
            copied[next(ranks, 0)].append(box)
    found = _join_holders([{KEY: tuple(boxes)} for boxes in held], [{KEY: tuple(dict.fromkeys(boxes))} for boxes in copied])[KEY]
    covered = Counter(index for box in found for index in elements(box))
    assert covered == Counter(elements(Box((0, 0, 0), SHAPE)))
    for box, holders in found.items():
        assert len(set(holders)) == len(holders) > 0
        for rank in holders:
            assert any(set(elements(box)) <= set(elements(own)) for own in (*held[rank], *copied[rank]))
