"""Draw the figure of docs/attention.md: the blocks of four masks, and the work of one on eight programs.

Run `python tools/draw_attention.py [FOLDER]`; the folder is docs/figures by default.
"""

import heapq
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from multimodal.attention.attention_mask import AttentionMask
from multimodal.attention.bitfield import MaskSegment, build_bitfield_mask
from multimodal.attention.triton_kernels.work_list import WorkList, order_blocks, plan_work_list

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BLOCK_SIZE, NUM_PROGRAMS = 8, 8
COLORS = {"full": "#4878a8", "partial": "#e8a33d", "empty": "#dddddd"}
IMAGE, TEXT = "image", "text"
FAMILIES: dict[str, Sequence[Sequence[tuple[str, int]]]] = {
    "causal": [[(TEXT, 96)]],
    "prefix": [[(IMAGE, 40), (TEXT, 56)]],
    "embedded": [[(TEXT, 12), (IMAGE, 30), (TEXT, 10), (IMAGE, 20), (TEXT, 24)]],
    "packed": [[(TEXT, 6), (IMAGE, 20), (TEXT, 10)], [(IMAGE, 24), (TEXT, 5)], [(TEXT, 9), (IMAGE, 12), (TEXT, 10)]],
}
"""Mode -> samples -> pieces."""


def build_mask(mode: str) -> AttentionMask:
    """The mask of a family."""
    samples = [
        [
            MaskSegment(length, IMAGE, index) if kind == IMAGE else MaskSegment(length)
            for index, (kind, length) in enumerate(pieces)
        ]
        for pieces in FAMILIES[mode]
    ]
    return AttentionMask(build_bitfield_mask(samples, modalities=(IMAGE,), mode=mode), block_size=BLOCK_SIZE)


def draw_blocks(axes: Axes, mask: AttentionMask, title: str) -> None:
    """Draw what is visible over the blocks that a kernel visits."""
    num_tokens, num_rows = mask.num_keys, len(mask.by_query.row_starts) - 1
    colors = np.full((num_rows, num_rows, 3), to_rgb(COLORS["empty"]))
    for row in range(num_rows):
        for block, is_full in zip(*mask.by_query.row(row), strict=True):
            colors[row, block] = to_rgb(COLORS["full" if is_full else "partial"])
    extent = (0, num_tokens, num_tokens, 0)
    axes.imshow(colors, extent=extent, interpolation="nearest")
    hidden = np.ma.masked_where(mask.tokens.to_dense(), np.ones((num_tokens, num_tokens)))
    axes.imshow(hidden, extent=extent, interpolation="nearest", cmap="gray", vmin=0, vmax=1, alpha=0.5)
    for border in range(0, num_tokens, BLOCK_SIZE):
        axes.axhline(border, color="white", linewidth=0.6)
        axes.axvline(border, color="white", linewidth=0.6)
    axes.set(title=title, xticks=[], yticks=[], xlabel="keys", ylabel="queries")


def plan_work(mask: AttentionMask, max_blocks_per_item: int | None) -> WorkList:
    """The work list of a mask."""
    blocks = order_blocks(
        mask.by_query, num_row_tokens=mask.num_queries, num_column_tokens=mask.num_keys, block_size=mask.block_size
    )
    return plan_work_list(blocks, max_blocks_per_item=max_blocks_per_item)


def draw_programs(axes: Axes, work: WorkList, title: str) -> None:
    """Draw which program runs which item when, each taking the next item when it is free."""
    free = [(0, program) for program in range(NUM_PROGRAMS)]
    for row, begin, full_end, end, _ in work.items.tolist():
        start, program = heapq.heappop(free)
        for length, offset, kind in ((full_end - begin, 0, "full"), (end - full_end, full_end - begin, "partial")):
            axes.barh(program, length, left=start + offset, color=COLORS[kind], height=0.8)
        axes.barh(program, end - begin, left=start, fill=False, edgecolor="white", linewidth=1.5, height=0.8)
        axes.text(start + (end - begin) / 2, program, str(row), ha="center", va="center", fontsize=7, color="white")
        heapq.heappush(free, (start + end - begin, program))
    last = max(time for time, _ in free)
    axes.axvline(last, color="black", linewidth=1)
    axes.set(title=f"{title}: {last} blocks long", xlabel="time, in blocks", ylabel="program", xlim=(0, 16.5), yticks=[])
    axes.invert_yaxis()


def main() -> None:
    """Draw into the folder given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs/figures"
    folder.mkdir(parents=True, exist_ok=True)
    figure = plt.figure(figsize=(12, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 12, height_ratios=(3, 2))
    for index, mode in enumerate(FAMILIES):
        draw_blocks(figure.add_subplot(grid[0, 3 * index : 3 * index + 3]), build_mask(mode), mode)
    mask = build_mask("causal")
    draw_programs(figure.add_subplot(grid[1, :6]), plan_work(mask, None), "causal, a program per row")
    draw_programs(figure.add_subplot(grid[1, 6:]), plan_work(mask, 3), "causal, sub-blocks of 3, longest first")
    figure.legend(handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()], loc="outside lower center", ncols=3)
    figure.savefig(folder / "attention-blocks.png", dpi=80)


if __name__ == "__main__":
    main()
