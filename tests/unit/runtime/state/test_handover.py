"""Every wanted rectangle is filled once, by its own rank where that holds it; moving the values is the distributed tests'."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron.runtime.state.handover import _parts
from megatron.runtime.state.held_tensors import Box, boxes_of_flat_range

SHAPE = (5, 3, 2)
NUM_RANKS = 4


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
    filled = Counter(index for part, _ in parts for index in elements(part.box))
    assert filled == Counter(elements(Box((0, 0, 0), SHAPE)))
    for part, source in parts:
        able = holders["model.llm.w"][source]
        assert part.holder == receiver if receiver in able else part.holder in able
        assert set(elements(part.box)) <= set(elements(source))
