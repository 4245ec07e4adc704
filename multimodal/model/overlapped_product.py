"""Matrix products whose rows come from, or go to, tensor parallel ranks in parts, each beside the product of another part.

DistTrain, section 6 (StepCCL): a collective and the product beside it are cut into the same parts, so ranks wait for one part of
the collective only. Gathered rows are put into their places as they arrive, so nothing is left to be remapped after the products
(Figure 14). These pairs overlap (SP: sequence parallelism):

    layer          forward                        backward
    column, SP     all-gather | product           reduce-scatter | product, then weight gradient
    column         (product)                      all-reduce     | product, then weight gradient
    row, SP        reduce-scatter | product       all-gather | product, (weight gradient)
    row            all-reduce     | product       (product, weight gradient)
"""

import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.attention.context_parallel import reduce_scatter_single
from multimodal.model.collectives import Arriving, RankLink, sequence_parts


def gather_then_multiply(share: Tensor, matrix: Tensor, link: RankLink | None) -> tuple[Tensor, Tensor]:
    """Gather rows and multiply each part as soon as it has arrived, while later parts are on their way.

    share: [num_rows, batch, size]; matrix: [size, output_size]; link: None for a product of this rank alone.
    Returns [num_ranks * num_rows, batch, output_size] and the gathered rows.
    """
    if link is None or link.num_parts == 1 or not link.is_sequence_parallel:
        rows = share if link is None else link.complete(link.start_gathering(share))
        return _multiply(rows, matrix), rows
    rows, works = link.start_gathering(share)
    product = rows.new_empty((*rows.shape[:-1], matrix.shape[1]))
    parts = sequence_parts(len(share), num_parts=link.num_parts)
    for part, work in zip(parts, works, strict=True):
        work.wait()
        blocks, made = (each.unflatten(0, (link.group.size(), -1)) for each in (rows, product))  # by the rank that owns them
        _multiply(blocks[:, part], matrix, into=made[:, part])
    return product, rows


Added = tuple[Tensor, Tensor] | None
"""[num_rows, batch, rank] and [rank, output_size], whose product is added to another with as many rows."""


def add_product(product: Tensor, added: Added) -> Tensor:
    """Add the product of two matrices in place, if there are any."""
    if added is not None:
        product.flatten(0, -2).addmm_(added[0].flatten(0, -2), added[1])
    return product


def multiply_then_sum(rows: Tensor, matrix: Tensor, link: RankLink, *, added: Added) -> Arriving:
    """Multiply part by part, and sum each part over the ranks while later parts are multiplied.

    rows: [num_rows, batch, size]. The result is [num_rows, batch, output_size] on all ranks, or under sequence parallelism this
    rank's share of them, [num_rows / num_ranks, batch, output_size].
    """
    if link.num_parts == 1:
        return link.start_summing(add_product(_multiply(rows, matrix), added))
    num_blocks = link.group.size() if link.is_sequence_parallel else 1
    blocks = rows.contiguous().unflatten(0, (num_blocks, -1))
    inner = None if added is None else added[0].contiguous().unflatten(0, (num_blocks, -1))
    _, num_rows, batch, _ = blocks.shape
    result = rows.new_empty((num_rows, batch, matrix.shape[1]))
    works = []
    for part in sequence_parts(num_rows, num_parts=link.num_parts):
        product = rows.new_empty((num_blocks, *result[part].shape)) if link.is_sequence_parallel else result[None, part]
        _multiply(blocks[:, part], matrix, into=product)
        if inner is not None and added is not None:
            product.flatten(1, 2).baddbmm_(inner[:, part].flatten(1, 2), added[1].expand(num_blocks, *added[1].shape))
        if link.is_sequence_parallel:
            works.append(reduce_scatter_single(result[part], product.flatten(0, 1), group=link.group, async_op=True))
        else:
            works.append(dist.all_reduce(result[part], group=link.group, async_op=True))
    return Arriving(result, tuple(works))


def _multiply(rows: Tensor, matrix: Tensor, *, into: Tensor | None = None) -> Tensor:
    """rows: [num_rows, batch, size], or a slice of each rank's, [num_ranks, num_rows, batch, size], whose products go `into`."""
    if into is None:
        return rows.matmul(matrix)
    torch.bmm(rows.flatten(1, 2), matrix.expand(len(rows), *matrix.shape), out=into.flatten(1, 2))
    return into
