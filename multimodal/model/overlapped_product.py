"""Matrix products whose rows come from, or go to, tensor parallel ranks in parts, each beside the product of another part.

DistTrain, section 6 (StepCCL): a collective and the product beside it are cut into the same parts, so ranks wait for one part of
the collective only. All collectives are started with `async_op=True`: with NCCL they run on its stream, where `wait` orders
streams and blocks no thread; gloo runs them in its threads.

Under sequence parallelism rank r holds the r-th block of the rows, so a part is the same slice of every rank's block. Gathered
rows are put into their places as they arrive, so nothing is left to be remapped after the products (Figure 14).
"""

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.attention.context_parallel import reduce_scatter_single
from multimodal.model.collectives import Arriving


class Overlap(NamedTuple):
    """The ranks of a collective, and the number of its parts."""

    group: dist.ProcessGroup
    num_parts: int
    is_sequence_parallel: bool
    """True if ranks of the group share the rows outside of the products, False if each has all of them."""


def start_gathering(share: Tensor, overlap: Overlap) -> Arriving:
    """Start gathering the rows of all ranks, part by part.

    share: [num_rows, batch, size], as many rows on every rank. The result is [num_ranks * num_rows, batch, size].
    """
    share = share.contiguous()
    blocks = share.new_empty((overlap.group.size(), *share.shape))
    works = [
        dist.all_gather([block[part] for block in blocks], share[part], group=overlap.group, async_op=True)
        for part in sequence_parts(len(share), num_parts=overlap.num_parts)
    ]
    return Arriving(blocks.flatten(0, 1), tuple(works))


class Factor(NamedTuple):
    """The matrix that rows are multiplied with: one matrix, or one plus a product of low rank."""

    matrix: Tensor
    """[size, output_size]."""
    low_rank: tuple[Tensor, Tensor] | None = None
    """[size, rank] and [rank, output_size], whose product is added to the matrix without being formed."""


def gather_then_multiply(share: Tensor, factor: Factor, overlap: Overlap) -> tuple[Tensor, Tensor]:
    """Gather rows and multiply each part as soon as it has arrived, while later parts are on their way.

    share: [num_rows, batch, size]. Returns [num_ranks * num_rows, batch, output_size] and the gathered rows.
    """
    rows, works = start_gathering(share, overlap)
    product = rows.new_empty((*rows.shape[:-1], factor.matrix.shape[1]))
    parts = sequence_parts(len(share), num_parts=overlap.num_parts)
    for part, work in zip(parts, works, strict=True):
        work.wait()
        _multiply(_in_blocks(rows, overlap)[:, part], factor, into=_in_blocks(product, overlap)[:, part])
    return product, rows


def multiply_then_reduce(rows: Tensor, factor: Factor, overlap: Overlap) -> Arriving:
    """Multiply part by part, and sum each part over the ranks while later parts are multiplied.

    rows: [num_rows, batch, size]. The result is [num_rows, batch, output_size] on all ranks, or
    under sequence parallelism this rank's share of them, [num_rows / num_ranks, batch, output_size].
    """
    return (_multiply_then_scatter if overlap.is_sequence_parallel else _multiply_then_sum)(rows, factor, overlap)


def _multiply_then_scatter(rows: Tensor, factor: Factor, overlap: Overlap) -> Arriving:
    blocks = _in_blocks(rows.contiguous(), overlap)
    num_ranks, num_rows, batch, _ = blocks.shape
    share = rows.new_empty((num_rows, batch, factor.matrix.shape[1]))
    works = []
    for part in sequence_parts(num_rows, num_parts=overlap.num_parts):
        product = rows.new_empty((num_ranks, *share[part].shape))
        _multiply(blocks[:, part], factor, into=product)
        works.append(reduce_scatter_single(share[part], product.flatten(0, 1), group=overlap.group, async_op=True))
    return Arriving(share, tuple(works))


def _multiply_then_sum(rows: Tensor, factor: Factor, overlap: Overlap) -> Arriving:
    product = rows.new_empty((*rows.shape[:-1], factor.matrix.shape[1]))
    works = []
    for part in sequence_parts(len(rows), num_parts=overlap.num_parts):
        _multiply(rows[None, part], factor, into=product[None, part])
        works.append(dist.all_reduce(product[part], group=overlap.group, async_op=True))
    return Arriving(product, tuple(works))


def _in_blocks(rows: Tensor, overlap: Overlap) -> Tensor:
    """Return rows by the rank that owns them: [num_ranks, num_rows / num_ranks, batch, size]."""
    return rows.unflatten(0, (overlap.group.size(), -1))


def _multiply(blocks: Tensor, factor: Factor, *, into: Tensor) -> None:
    """blocks: [num_ranks, num_rows, batch, size], a slice of each rank's rows; products go to the places of their rows."""
    num_ranks = len(blocks)
    rows, product = blocks.flatten(1, 2), into.flatten(1, 2)
    torch.bmm(rows, factor.matrix.expand(num_ranks, *factor.matrix.shape), out=product)
    if factor.low_rank is not None:
        left, right = factor.low_rank
        product.baddbmm_(rows.matmul(left), right.expand(num_ranks, *right.shape))


def sequence_parts(num_rows: int, *, num_parts: int) -> tuple[slice, ...]:
    """Return `num_parts` consecutive slices of `num_rows` rows, of sizes that differ by at most one, the larger ones last.

    Fewer if there are fewer rows, at least one (of no rows, if there are none). Ranks with equally many rows cut alike. With the
    larger parts last, the first part, which is waited for, is no longer than the others.
    """
    count = max(1, min(num_parts, num_rows))
    bounds = [num_rows * index // count for index in range(count + 1)]
    return tuple(slice(first, last) for first, last in itertools.pairwise(bounds))
