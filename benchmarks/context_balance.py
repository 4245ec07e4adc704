"""Claim: from 64k tokens on, `lpt` leaves no rank of context parallelism more than 1 % above the mean workload.

The workload of a rank is the number of key blocks that its query blocks of 128 tokens compute, since a kernel that skips empty
blocks takes time for those only. The table has the largest workload over the mean of the ranks, and under `least` a bound for it:
blocks are whole, so some rank has the mean rounded up, and some rank has the longest block. Where this bound is above 1.01, the
claim is to reach it.

Masks: the paper's three families (Cornstarch: encoder outputs prepended, embedded, and several samples packed; encoder tokens
see all tokens of their encoder, as published), one causal text, and packed documents of `--lengths DIR` (by default
`shared/data/lengths` beside the checkout, left out where that is absent), whose items see only themselves.

A second table has the milliseconds of counting the blocks of a mask and of dealing them by `lpt`, the best of `--repeats`.
Claimed are 20 for counting packed masks of 1 M tokens and 1 for dealing them to 64 ranks.

Run `python benchmarks/context_balance.py [--json] [--tokens 65536 ...] [--ranks 8 64] [--lengths DIR] [--seed N]`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from multimodal.attention.bitfield import BitfieldMask, MaskSegment, build_bitfield_mask
from multimodal.attention.block_summary import count_block_workloads
from multimodal.attention.share_tokens import TokenDistribution, distribute_tokens
from multimodal.data.length_table import read_length_table
from multimodal.values.model_graph import AudioInput, ImageInput, ModelGraph, Role, Transformer, Unit
from multimodal.values.sample_lengths import SampleLengths

NUM_TOKENS = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
NUM_RANKS = (8, 16, 32, 64)
BLOCK_SIZE = 128
MODALITIES = ("vision", "audio")
ONE_SAMPLE = ("causal", "prefix", "embedded")
"""Masks that are not packed."""
CLAIMED_IMBALANCE, CLAIMED_FROM_TOKENS = 1.01, 1 << 16
CLAIMED_COUNT_MILLISECONDS, CLAIMED_DEAL_MILLISECONDS = 20.0, 1.0
DEFAULT_LENGTHS = Path(__file__).parents[2] / "shared" / "data" / "lengths"

METHODS = tuple(method for method in TokenDistribution if method is not TokenDistribution.BY_ITEM)
"""Methods that distribute blocks; `cut_items.py` measures the one that distributes whole items."""

Sample = Sequence[MaskSegment]


@dataclass(frozen=True)
class Row:
    """The imbalance of every distribution on one mask."""

    mask: str
    num_tokens: int
    num_ranks: int
    least: float
    """Lower bound of the imbalance of every distribution of whole blocks."""
    imbalance: Mapping[str, float]
    """Distribution -> largest workload of a rank over the mean."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds that `lpt` takes for one mask, with the largest measured number of ranks."""

    mask: str
    num_tokens: int
    num_samples: int
    count_milliseconds: float
    deal_milliseconds: float


def draw_items(draw: np.random.Generator, num_tokens: int) -> Iterator[MaskSegment]:
    """Draw images (mostly of 250 to 2,000 tokens) and clips with `num_tokens` tokens in all."""
    index = 0
    while num_tokens > 0:
        length = min(num_tokens, int(draw.lognormal(6.5, 0.6)) + 1)
        yield MaskSegment(length, MODALITIES[int(draw.random() < 0.2)], index)
        num_tokens -= length
        index += 1


def draw_embedded(draw: np.random.Generator, num_tokens: int) -> Sample:
    """Draw text and items in turn; half of the tokens are text."""
    items = list(draw_items(draw, num_tokens // 2))
    return interleave(items, num_text_tokens=num_tokens - num_tokens // 2, draw=draw)


def interleave(items: Sequence[MaskSegment], *, num_text_tokens: int, draw: np.random.Generator) -> Sample:
    """Cut a text at random, one piece before every item and one after the last."""
    cuts = np.sort(draw.integers(0, num_text_tokens + 1, len(items)))
    texts = [MaskSegment(int(length)) for length in np.diff(cuts, prepend=0, append=num_text_tokens)]
    return [segment for pair in zip(texts, items, strict=False) for segment in pair] + [texts[-1]]


def causal(draw: np.random.Generator, num_tokens: int) -> BitfieldMask:
    """Build the mask of one text."""
    return build_bitfield_mask([[MaskSegment(num_tokens)]], modalities=MODALITIES)


def prefix(draw: np.random.Generator, num_tokens: int) -> BitfieldMask:
    """Build the mask of encoder outputs before one text."""
    sample = [*draw_items(draw, num_tokens // 2), MaskSegment(num_tokens - num_tokens // 2)]
    return build_bitfield_mask([sample], modalities=MODALITIES, mode="prefix")


def embedded(draw: np.random.Generator, num_tokens: int) -> BitfieldMask:
    """Build the mask of encoder outputs inside one text."""
    return build_bitfield_mask([draw_embedded(draw, num_tokens)], modalities=MODALITIES, mode="modality")


def packed(draw: np.random.Generator, num_tokens: int) -> BitfieldMask:
    """Build the mask of several long-tailed samples with encoder outputs inside."""
    samples, missing = [], num_tokens
    while missing > 0:
        length = min(missing, int(draw.lognormal(8.3, 1.0)) + 16)
        samples.append(draw_embedded(draw, length))
        missing -= length
    return build_bitfield_mask(samples, modalities=MODALITIES, mode="modality")


def documents_of(lengths: Sequence[SampleLengths]) -> Callable[[np.random.Generator, int], BitfieldMask]:
    """Return a function that packs documents, drawn with replacement, up to a number of tokens; the last one's text is cut."""

    def documents(draw: np.random.Generator, num_tokens: int) -> BitfieldMask:
        samples, missing = [], num_tokens
        while missing > 0:
            sample = lengths[int(draw.integers(len(lengths)))]
            if sample.num_tokens > missing:
                samples.append([MaskSegment(missing)])
                break
            items = [MaskSegment(item.num_output_tokens, item.unit, index) for index, item in enumerate(sample.items)]
            samples.append(interleave(items, num_text_tokens=sample.num_text_tokens, draw=draw))
            missing -= sample.num_tokens
        return build_bitfield_mask(samples, modalities=MODALITIES)

    return documents


def read_documents(folder: Path) -> dict[str, Sequence[SampleLengths]]:
    """Return file name -> lengths of the samples, for every file of a folder."""
    shape = Transformer(1, 1280, 16, 5120)
    graph = ModelGraph(
        (
            Unit("vision", Role.ENCODER, shape, image=ImageInput()),
            Unit("audio", Role.ENCODER, shape, audio=AudioInput()),
            Unit("llm", Role.BACKBONE, shape),
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((".csv", ".csv.gz", ".parquet")))
    return {path.name.split(".")[0]: read_length_table(path, graph=graph) for path in paths}


def measure(mask: str, built: BitfieldMask, *, num_ranks: Sequence[int], seed: int) -> Iterator[Row]:
    """Distribute the blocks of one mask with every method."""
    workloads = count_block_workloads(built, block_size=BLOCK_SIZE).num_blocks
    for count in num_ranks:
        imbalance = {}
        mean = workloads.sum() / count
        least = max(np.ceil(mean), workloads.max()) / mean
        for method in METHODS:
            owners = distribute_tokens(workloads, num_ranks=count, method=method, seed=seed)
            loads = np.bincount(owners, workloads, minlength=count)
            imbalance[method.value] = float(loads.max() / loads.mean())
        yield Row(mask, built.num_tokens, count, float(least), imbalance)


def time_lpt(mask: str, built: BitfieldMask, *, num_ranks: int, repeats: int) -> Timing:
    """Time the two steps of a distribution with `lpt`: counting and dealing."""
    workloads = count_block_workloads(built, block_size=BLOCK_SIZE).num_blocks
    count = _best(lambda: count_block_workloads(built, block_size=BLOCK_SIZE), repeats)
    deal = _best(lambda: distribute_tokens(workloads, num_ranks=num_ranks), repeats)
    return Timing(mask, built.num_tokens, len(np.unique(built.sample_ids)), count, deal)


def _best(work: Callable[[], object], repeats: int) -> float:
    milliseconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        milliseconds.append(1000 * (time.process_time() - start))
    return min(milliseconds)


def show(rows: Sequence[Row], timings: Sequence[Timing], console: Console) -> None:
    """Print both tables."""
    table = Table("mask", "tokens", "ranks", "least", *METHODS, title="largest workload of a rank over the mean")
    for row in rows:
        ratios = [f"{each:.4f}" for each in (row.least, *row.imbalance.values())]
        table.add_row(row.mask, str(row.num_tokens), str(row.num_ranks), *ratios)
    console.print(table)
    table = Table("mask", "tokens", "samples", "count ms", "deal ms", title="time of lpt")
    for each in timings:
        sizes = str(each.num_tokens), str(each.num_samples)
        table.add_row(each.mask, *sizes, f"{each.count_milliseconds:.2f}", f"{each.deal_milliseconds:.2f}")
    console.print(table)


def main() -> None:
    """Build, distribute and print; also print whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS, help="tokens of the sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=NUM_RANKS, help="sizes of context parallelism")
    parser.add_argument("--lengths", type=Path, help="folder of lengths files; default: see above")
    parser.add_argument("--repeats", type=int, default=7, help="take the best of so many runs")
    parser.add_argument("--seed", type=int, default=0, help="of the masks and the random distribution")
    arguments = parser.parse_args()
    masks: dict[str, Callable[[np.random.Generator, int], BitfieldMask]] = {
        "causal": causal,
        "prefix": prefix,
        "embedded": embedded,
        "packed": packed,
    }
    folder = arguments.lengths or (DEFAULT_LENGTHS if DEFAULT_LENGTHS.is_dir() else None)
    if folder:
        files = read_documents(folder)
        masks |= {name: documents_of(lengths) for name, lengths in files.items()}
        masks["all files"] = documents_of([sample for lengths in files.values() for sample in lengths])
    rows, timings = [], []
    for name, build in masks.items():
        for num_tokens in arguments.tokens:
            built = build(np.random.default_rng(arguments.seed), num_tokens)
            rows += measure(name, built, num_ranks=arguments.ranks, seed=arguments.seed)
        timings.append(time_lpt(name, built, num_ranks=max(arguments.ranks), repeats=arguments.repeats))
    long = [row for row in rows if row.num_tokens >= CLAIMED_FROM_TOKENS]
    missed = [row for row in long if row.imbalance["lpt"] > max(CLAIMED_IMBALANCE, row.least + 1e-9)]
    worst = max((row.imbalance["lpt"] for row in long), default=float("nan"))
    count = max(each.count_milliseconds for each in timings if each.mask not in ONE_SAMPLE)
    deal = max(each.deal_milliseconds for each in timings)
    holds = not missed and count <= CLAIMED_COUNT_MILLISECONDS and deal <= CLAIMED_DEAL_MILLISECONDS
    if arguments.json:
        details = {"rows": [asdict(row) for row in rows], "timings": [asdict(each) for each in timings]}
        source = folder.name if folder else "generated"
        print(json.dumps({"lengths": source, "seed": arguments.seed, **details, "worst_lpt": worst, "holds": holds}))
        return
    console = Console(width=130)
    show(rows, timings, console)
    console.print(
        f"lpt from {CLAIMED_FROM_TOKENS} tokens on: worst {worst:.4f}, {len(missed)} of {len(long)} above both "
        f"{CLAIMED_IMBALANCE} and the least; packed masks counted in {count:.1f} ms (claimed {CLAIMED_COUNT_MILLISECONDS}), "
        f"dealt in {deal:.2f} ms (claimed {CLAIMED_DEAL_MILLISECONDS}): {'holds' if holds else 'does not hold'}"
    )


if __name__ == "__main__":
    main()
