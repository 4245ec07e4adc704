"""The loss of target tokens by two Triton kernels, a program for each row; each reads the logits once.

The first keeps a running maximum and a sum of exponentials (Milakov and Gimelshein 2018, algorithm 3), the second writes the
gradient where the logits were. Tiles are those of Transformer Engine's kernels for the same, which cannot leave out the columns
that pad a vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS, NUM_WARPS = 2**15, 32


@triton.jit(do_not_specialize=("num_rows",))
def row_sums_kernel(logits, targets, found, first_id, num_known, width, num_rows, COLUMNS: tl.constexpr):
    """Write each row's maximum, sum of exponentials and target's logit (0 if it is not here) into `found`, [3, num_rows]."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    maximum, total = float("-inf"), 0.0
    for start in range(0, num_known, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        entries = tl.load(logits + columns, mask=columns < num_known, other=float("-inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(entries, 0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(entries - new_maximum), 0)
        maximum = new_maximum
    column = tl.load(targets + row) - first_id
    is_mine = (column >= 0) & (column < num_known)
    tl.store(found + row, maximum)
    tl.store(found + num_rows + row, total)
    tl.store(found + 2 * num_rows + row, tl.load(logits + column, mask=is_mine, other=0.0).to(tl.float32))


@triton.jit
def gradient_kernel(logits, targets, largest, totals, scales, first_id, num_known, width, COLUMNS: tl.constexpr):
    """Replace each row's logits by (exponential - total where the target is) * scale, and by 0 what pads the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    maximum, total, scale = tl.load(largest + row), tl.load(totals + row), tl.load(scales + row)
    target = tl.load(targets + row) - first_id
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_known = columns < num_known
        entries = tl.load(logits + columns, mask=is_known, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(entries - maximum) - tl.where((columns == target) & is_known, total, 0.0)
        tl.store(logits + columns, gradient * scale, mask=columns < width)


def row_sums(logits: Tensor, targets: Tensor, *, first_id: int, num_known: int) -> Tensor:
    """Return [3, num_tokens], float32: the first kernel's results; logits and targets: contiguous."""
    num_rows, width = logits.shape
    found = logits.new_empty(3, num_rows, dtype=torch.float32)
    row_sums_kernel[(num_rows,)](logits, targets, found, first_id, num_known, width, num_rows, **_tiles(width))
    return found


def overwrite_by_gradient(
    logits: Tensor, targets: Tensor, *, largest: Tensor, totals: Tensor, scales: Tensor, first_id: int, num_known: int
) -> None:
    """Run the second kernel; largest, totals, scales: [num_tokens], float32, of the whole vocabulary."""
    num_rows, width = logits.shape
    gradient_kernel[(num_rows,)](logits, targets, largest, totals, scales, first_id, num_known, width, **_tiles(width))


def _tiles(width: int) -> dict[str, int]:
    return {"COLUMNS": min(MOST_COLUMNS, triton.next_power_of_2(width)), "num_warps": NUM_WARPS}
