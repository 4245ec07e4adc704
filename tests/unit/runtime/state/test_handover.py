"""Weights and optimizer state handed over, and held in parts."""

from collections import Counter
from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron.runtime.state.handover import NOBODY, _find_parts
from megatron.runtime.state.held_tensors import Box, boxes_of_flat_range

SHAPE = (5, 3, 2)
NUM_RANKS = 4
KEY = "model.llm.w"


def cut(places: list[int]) -> list[Box]:
    ends = sorted({0, 30, *places})
    return [box for start, stop in pairwise(ends) for box in boxes_of_flat_range(SHAPE, range(start, stop))]


def elements(box: Box) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for start, size in zip(*box, strict=True):
        found = [(*index, start + step) for index in found for step in range(size)]
    return found


places = st.lists(st.integers(1, 29), max_size=3)


@given(
    originals=places,
    copies=st.lists(places, max_size=3),
    lost=st.sets(st.integers(0, 30), max_size=30),
    rank_of_box=st.lists(st.integers(0, NUM_RANKS - 1), min_size=60, max_size=60),
    wanted=places,
    receiver=st.integers(0, NUM_RANKS - 1),
)
def test_parts_fill_what_is_wanted_and_come_from_holders(originals, copies, lost, rank_of_box, wanted, receiver):
    """Copies that are cut otherwise make up for lost originals; nothing comes from elsewhere that the receiver holds."""
    ranks = iter(rank_of_box)
    holders: dict[Box, list[int]] = {}
    left = [box for number, box in enumerate(cut(originals)) if number not in lost]
    for box in chain(left, *map(cut, copies)):
        holders.setdefault(box, []).append(next(ranks, 0))
    boxes = {KEY: tuple(cut(wanted)), "main.llm.w": tuple(cut(wanted))}
    parts = list(_find_parts(boxes, {KEY: holders}, kind="model", receiver=receiver))
    filled = Counter(index for part in parts for index in elements(part.box))
    assert filled == Counter(elements(Box((0, 0, 0), SHAPE)))
    held = {
        rank: {index for box, able in holders.items() if rank in able for index in elements(box)} for rank in range(NUM_RANKS)
    }
    for part in parts:
        inside = set(elements(part.box))
        able = [rank for rank, own in held.items() if inside <= own]
        assert part.holder == (receiver if receiver in able else part.holder)
        assert part.holder in able if part.holder != NOBODY else not any(inside & own for own in held.values())
