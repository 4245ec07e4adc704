"""Draw the figure of docs/context_parallelism.md: three mask families, each dealt to four ranks in four ways.

Run `python tools/draw_token_distribution.py [FOLDER]`; the folder is docs/figures by default.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from multimodal.attention.bitfield import BitfieldMask, MaskSegment, build_bitfield_mask
from multimodal.attention.block_summary import count_block_workloads
from multimodal.attention.token_shares import TokenShares, share_tokens
from multimodal.balance.algorithms.distribute_tokens import TokenDistribution, rank_workloads

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BLOCK_SIZE, NUM_RANKS, SEED = 16, 4, 1
COLORS = ("#4878a8", "#e8a33d", "#6a9f58", "#b65e8a")
IMAGE, TEXT = "image", "text"
FAMILIES: dict[str, Sequence[Sequence[tuple[str, int]]]] = {
    "prefix": [[(IMAGE, 160), (IMAGE, 96), (TEXT, 256)]],
    "embedded": [[(TEXT, 60), (IMAGE, 144), (TEXT, 40), (IMAGE, 100), (TEXT, 168)]],
    "packed": [
        [(TEXT, 30), (IMAGE, 120), (TEXT, 50)],
        [(IMAGE, 100), (TEXT, 20)],
        [(TEXT, 70), (IMAGE, 40), (TEXT, 82)],
    ],
}
"""Mode -> samples -> pieces."""


def build_mask(mode: str) -> BitfieldMask:
    """The mask of a family."""
    samples = [
        [
            MaskSegment(length, IMAGE, index) if kind == IMAGE else MaskSegment(length)
            for index, (kind, length) in enumerate(pieces)
        ]
        for pieces in FAMILIES[mode]
    ]
    return build_bitfield_mask(samples, modalities=(IMAGE,), mode=mode)


def draw_shares(axes: Axes, mask: BitfieldMask, shares: TokenShares) -> float:
    """Color what every query sees by the query's rank; returns the largest over the mean workload."""
    owners = np.repeat(shares.owners, BLOCK_SIZE)[: mask.num_tokens]
    by_rank = np.array([to_rgb(color) for color in COLORS])[owners]  # [num_tokens, 3]
    axes.imshow(np.where(mask.to_dense()[:, :, None], by_rank[:, None], 0.93), interpolation="nearest")
    loads = rank_workloads(
        count_block_workloads(mask, block_size=BLOCK_SIZE).num_blocks, shares.owners, num_ranks=shares.num_ranks
    )
    axes.set(xticks=[], yticks=[], xlabel=f"blocks of work: {', '.join(map(str, loads))}")
    return float(loads.max() / loads.mean())


def main() -> None:
    """Draw into the folder given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs/figures"
    folder.mkdir(parents=True, exist_ok=True)
    methods = list(TokenDistribution)
    figure, grid = plt.subplots(len(FAMILIES), len(methods), figsize=(12, 9.6), layout="constrained")
    for row, mode in zip(grid, FAMILIES, strict=True):
        mask = build_mask(mode)
        for axes, method in zip(row, methods, strict=True):
            shares = share_tokens(mask, num_ranks=NUM_RANKS, method=method, block_size=BLOCK_SIZE, seed=SEED)
            imbalance = draw_shares(axes, mask, shares)
            axes.set_title(f"{method}: largest / mean {imbalance:.2f}")
        row[0].set_ylabel(f"{mode}\nqueries")
    handles = [Patch(color=color, label=f"rank {rank}") for rank, color in enumerate(COLORS)]
    figure.legend(handles=handles, loc="outside lower center", ncols=NUM_RANKS)
    figure.savefig(folder / "context-parallelism.png", dpi=80)


if __name__ == "__main__":
    main()
