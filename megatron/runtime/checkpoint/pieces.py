"""Where a rank's part of a parameter lies in the whole parameter, as rectangles.

A rank holds a tensor parallel shard, of which a sharded optimizer (ZeRO-1) keeps a range of flat elements. In the whole
parameter such a range is a few rectangles (three for a matrix: rest of a row, whole rows, start of a row; twice that for a
gated MLP's two blocks), each contiguous in the rank's memory: it is written and read in place, and nothing is gathered.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from multimodal.model.parameter_sharding import ParameterSharding


class Box(NamedTuple):
    """A rectangle of a tensor: where it starts in every dimension, and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Piece(NamedTuple):
    """A rectangle of a whole parameter, and this rank's values there."""

    offsets: tuple[int, ...]
    values: Tensor
    """Shaped like the rectangle; a view of what the rank trains with."""


def pieces_of_shard(
    values: Tensor, *, elements: range, shape: tuple[int, ...], sharding: ParameterSharding, rank: int, tensor_parallel_size: int
) -> tuple[Piece, ...]:
    """The rectangles of the whole parameter that `values` covers.

    values: [len(elements)], contiguous: these flat elements of the shard; shape: of the shard; rank: tensor parallel rank.
    """
    found, position = [], 0
    for block, box in _boxes_by_block(elements, shape=shape, sharding=sharding):
        size = math.prod(box.sizes)
        offsets = list(box.offsets)
        if sharding.dimension is not None:
            rows = shape[sharding.dimension] // sharding.num_blocks
            offsets[sharding.dimension] += rows * (block * (tensor_parallel_size - 1) + rank)
        found.append(Piece(tuple(offsets), values[position : position + size].view(box.sizes)))
        position += size
    return tuple(found)


def boxes_of_flat_range(shape: tuple[int, ...], elements: range) -> tuple[Box, ...]:
    """A range of a tensor's flat elements as rectangles, in the order of the elements."""
    if len(shape) == 1:
        return (Box((elements.start,), (len(elements),)),) if elements else ()
    row_size = math.prod(shape[1:])
    found, cursor = [], elements.start
    while cursor < elements.stop:
        row, column = divmod(cursor, row_size)
        num_rows = (elements.stop - cursor) // row_size
        if column == 0 and num_rows > 0:
            found.append(Box((row, *(0 for _ in shape[1:])), (num_rows, *shape[1:])))
            cursor += num_rows * row_size
            continue
        stop = min(elements.stop, (row + 1) * row_size)
        inner = boxes_of_flat_range(shape[1:], range(column, column + stop - cursor))
        found.extend(Box((row, *box.offsets), (1, *box.sizes)) for box in inner)
        cursor = stop
    return tuple(found)


def _boxes_by_block(elements: range, *, shape: tuple[int, ...], sharding: ParameterSharding) -> Iterator[tuple[int, Box]]:
    assert sharding.num_blocks == 1 or sharding.dimension == 0, "blocks are stacked along the first dimension"
    block_size = math.prod(shape) // sharding.num_blocks
    for block in range(sharding.num_blocks):
        inside = range(max(elements.start, block * block_size), min(elements.stop, (block + 1) * block_size))
        for box in boxes_of_flat_range(shape, inside):
            yield block, box
