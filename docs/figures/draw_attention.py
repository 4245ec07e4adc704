"""Draws the figures of docs/attention.md (blocks of masks, and their work) and docs/context_parallelism.md (tokens on ranks).

Run `python docs/figures/draw_attention.py [FOLDER]`; the folder is docs/figures by default.
"""

import heapq
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.figures.figure_folder import figure_folder
from multimodal.attention.attention_backend import AttentionMask
from multimodal.attention.bitfield import BitfieldMask, MaskSegment, build_bitfield_mask
from multimodal.attention.block_summary import count_block_workloads
from multimodal.attention.share_tokens import TokenDistribution, share_tokens
from multimodal.attention.triton_kernels.work_list import WorkList, order_blocks, plan_work_list
from multimodal.cost.token_shares import BlockShares

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BLOCK_SIZE, NUM_PROGRAMS = 8, 8
COLORS = {"full": "#4878a8", "partial": "#e8a33d", "empty": "#dddddd"}
SHARED_BLOCK_SIZE, NUM_RANKS, SEED = 16, 4, 1
RANK_COLORS = ("#4878a8", "#e8a33d", "#6a9f58", "#b65e8a")
IMAGE, TEXT = "image", "text"
Masks = Mapping[str, Sequence[Sequence[tuple[str, int]]]]
"""Mode, or `packed` for several embedded samples -> for each sample the (kind, tokens) of its segments."""
BLOCK_MASKS: Masks = {
    "causal": [[(TEXT, 96)]],
    "prefix": [[(IMAGE, 40), (TEXT, 56)]],
    "embedded": [[(TEXT, 12), (IMAGE, 30), (TEXT, 10), (IMAGE, 20), (TEXT, 24)]],
    "packed": [[(TEXT, 6), (IMAGE, 20), (TEXT, 10)], [(IMAGE, 24), (TEXT, 5)], [(TEXT, 9), (IMAGE, 12), (TEXT, 10)]],
}
SHARED_MASKS: Masks = {
    "prefix": [[(IMAGE, 160), (IMAGE, 96), (TEXT, 256)]],
    "embedded": [[(TEXT, 60), (IMAGE, 144), (TEXT, 40), (IMAGE, 100), (TEXT, 168)]],
    "packed": [
        [(TEXT, 30), (IMAGE, 120), (TEXT, 50)],
        [(IMAGE, 100), (TEXT, 20)],
        [(TEXT, 70), (IMAGE, 40), (TEXT, 82)],
    ],
}


def build_mask(masks: Masks, mode: str) -> BitfieldMask:
    """Build the mask of a mode."""
    samples = [
        [
            MaskSegment(length, IMAGE, index) if kind == IMAGE else MaskSegment(length)
            for index, (kind, length) in enumerate(segments)
        ]
        for segments in masks[mode]
    ]
    return build_bitfield_mask(samples, modalities=(IMAGE,), mode="embedded" if mode == "packed" else mode)


def draw_blocks(axes: Axes, mask: AttentionMask, title: str) -> None:
    """Draw the visible pairs over the blocks that a kernel visits."""
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
    """Return the work list of a mask."""
    blocks = order_blocks(
        mask.by_query, num_row_tokens=mask.num_queries, num_column_tokens=mask.num_keys, block_size=mask.block_size
    )
    return plan_work_list(blocks, max_blocks_per_item=max_blocks_per_item)


def draw_programs(axes: Axes, work: WorkList, title: str) -> None:
    """Draw the items that each program runs; a program takes the next item when it has finished one."""
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


def draw_shares(axes: Axes, mask: BitfieldMask, shares: BlockShares) -> float:
    """Color the keys that every query sees by the query's rank; returns the largest workload over the mean."""
    owners = np.repeat(shares.owners, SHARED_BLOCK_SIZE)[: mask.num_tokens]
    by_rank = np.array([to_rgb(color) for color in RANK_COLORS])[owners]  # [num_tokens, 3]
    axes.imshow(np.where(mask.to_dense()[:, :, None], by_rank[:, None], 0.93), interpolation="nearest")
    workloads = count_block_workloads(mask, block_size=SHARED_BLOCK_SIZE).num_blocks
    loads = np.bincount(shares.owners, workloads, minlength=shares.num_ranks).astype(int)
    axes.set(xticks=[], yticks=[], xlabel=f"blocks of work: {', '.join(map(str, loads))}")
    return float(loads.max() / loads.mean())


def draw_block_figure() -> Figure:
    """Draw the blocks of four masks, and the work of one of them on eight programs."""
    figure = plt.figure(figsize=(12, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 12, height_ratios=(3, 2))
    masks = {mode: AttentionMask(build_mask(BLOCK_MASKS, mode), block_size=BLOCK_SIZE) for mode in BLOCK_MASKS}
    for index, (mode, mask) in enumerate(masks.items()):
        draw_blocks(figure.add_subplot(grid[0, 3 * index : 3 * index + 3]), mask, mode)
    causal = masks["causal"]
    draw_programs(figure.add_subplot(grid[1, :6]), plan_work(causal, None), "causal, a program per row")
    draw_programs(figure.add_subplot(grid[1, 6:]), plan_work(causal, 3), "causal, sub-blocks of 3, longest first")
    figure.legend(handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()], loc="outside lower center", ncols=3)
    return figure


def draw_rank_figure() -> Figure:
    """Draw three masks, each distributed over four ranks in four ways."""
    methods = [method for method in TokenDistribution if method is not TokenDistribution.BY_ITEM]
    figure, grid = plt.subplots(len(SHARED_MASKS), len(methods), figsize=(12, 9.6), layout="constrained")
    for row, mode in zip(grid, SHARED_MASKS, strict=True):
        mask = build_mask(SHARED_MASKS, mode)
        for axes, method in zip(row, methods, strict=True):
            shares = share_tokens(mask, num_ranks=NUM_RANKS, method=method, block_size=SHARED_BLOCK_SIZE, seed=SEED)
            axes.set_title(f"{method}: largest / mean {draw_shares(axes, mask, shares):.2f}")
        row[0].set_ylabel(f"{mode}\nqueries")
    handles = [Patch(color=color, label=f"rank {rank}") for rank, color in enumerate(RANK_COLORS)]
    figure.legend(handles=handles, loc="outside lower center", ncols=NUM_RANKS)
    return figure


def main() -> None:
    """Draw into the folder that the command line names."""
    folder = figure_folder(__doc__)
    draw_block_figure().savefig(folder / "attention-blocks.png", dpi=80)
    draw_rank_figure().savefig(folder / "context-parallelism.png", dpi=80)


if __name__ == "__main__":
    main()
