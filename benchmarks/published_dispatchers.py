"""Claim: an all-gather of mini-batches takes seconds where OrchMLLM's all-to-all takes milliseconds, at 2,560 GPUs.

OrchMLLM 5.2: the strawman gathers all mini-batches on every rank (Eq. 3, (d - 1) max L), the dispatcher exchanges lengths only
and sends each example once (Eq. 4), node-wise rearrangement then keeps bytes inside nodes (Eq. 5). MLLM-10B's mini-batches of 80
samples (`published_setups/orchmllm.py`: half LLaVA, half Librispeech), post-balanced for each of three phases: pixels of patches,
mel features, and embeddings on their way from the encoders to the LLM; `h100.yaml`. Seconds are those of the rank that sends or
receives most, links as the cost model has them; the all-gather's are a ring's. The published figures are those of the whole
dispatcher, 16.7 ms on 64 GPUs and 53.9 ms on 2,560, and 0.436 to 0.722 of the bytes between nodes left by rearrangement.

Run `python benchmarks/published_dispatchers.py [--json] [--replicas 64 256 ...] [--lengths DIR]`.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.sparse import csr_matrix

from benchmarks.published_setups.orchmllm import MINI_BATCHES, mixed_samples
from benchmarks.published_setups.planned import read_cluster, read_model
from benchmarks.published_training import LENGTHS
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.rearrange_nodes import rearrange_nodes
from multimodal.cost.cluster import Cluster, collective_seconds

NUM_REPLICAS = (64, 256, 1024, 2560)
BYTES_PER_TOKEN = {"vision": 2 * 14 * 14 * 3, "audio": 2 * 2 * 128, "llm": 2 * 3584}
"""bf16 pixels of a patch, mel features of two frames, an embedding of the LLM."""


@dataclass(frozen=True)
class Row:
    """The dispatchers of one phase on so many replicas."""

    replicas: int
    phase: str
    gathered_mb: float
    """Megabytes that a rank holds after an all-gather."""
    all_gather_ms: float
    sent_mb: float
    """Most megabytes that a rank sends to other ranks in the all-to-all."""
    all_to_all_ms: float
    node_wise_ms: float
    left: float
    """Most bytes from one rank to other nodes after node-wise rearrangement, over before."""


def measure(count: int, cluster: Cluster, folder: Path) -> Iterator[Row]:
    """Draw and balance the mini-batches of so many replicas."""
    graph, size = read_model("orchmllm-10b"), MINI_BATCHES["10b"]["orchmllm"]
    samples = mixed_samples(graph, folder, count=count * size)
    lengths = {
        unit: np.array([sum(item.num_tokens for item in sample.items if item.unit == unit) for sample in samples])
        for unit in ("vision", "audio")
    } | {"llm": np.array([sample.num_tokens for sample in samples])}
    for phase, each in lengths.items():
        batches = post_balance(each, num_bins=count)
        sources = np.repeat(np.arange(count), size)
        volume = csr_matrix((each * BYTES_PER_TOKEN[phase], (sources, batches)), shape=(count, count))
        found = rearrange_nodes(volume, ranks_per_node=cluster.gpus_per_node)
        held, rank_of_batch = float(volume.sum(axis=1).max()), np.argsort(found.permutation)
        yield Row(
            count,
            phase,
            count * held / 1e6,
            1e3 * collective_seconds(count * held, ranks=range(count), cluster=cluster),
            float((volume.sum(axis=1) - volume.diagonal()[:, None]).max()) / 1e6,
            1e3 * exchange_seconds(volume, np.arange(count), cluster),
            1e3 * exchange_seconds(volume, rank_of_batch, cluster),
            float(found.bytes_after.max() / found.bytes_before.max()),
        )


def exchange_seconds(volume: csr_matrix, rank_of_batch: NDArray[np.int64], cluster: Cluster) -> float:
    """Return the seconds of the rank that sends or receives longest, inside its node and between nodes one after another."""
    entries = volume.tocoo()
    sources, targets = entries.row.astype(np.int64), rank_of_batch[entries.col]
    crosses, moves = sources // cluster.gpus_per_node != targets // cluster.gpus_per_node, sources != targets
    inside, network = cluster.intra_node, cluster.inter_node
    per_rank = network.bandwidth_gbytes_per_second * network.nics_per_node / cluster.gpus_per_node

    def seconds(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        between, within = (np.bincount(ranks, entries.data * kind, len(rank_of_batch)) for kind in (crosses, moves & ~crosses))
        return between / (per_rank * 1e9) + within / (inside.bandwidth_gbytes_per_second * 1e9)

    latency_us = network.latency_us if crosses.any() else inside.latency_us
    return float(max(seconds(sources).max(), seconds(targets).max())) + 1e-6 * latency_us


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--replicas", type=int, nargs="+", default=NUM_REPLICAS, help="numbers of replicas, multiples of 8")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, metavar="DIR", help="folder of lengths files")
    given = parser.parse_args()
    cluster = read_cluster("h100")
    rows = [row for count in given.replicas for row in measure(count, cluster, given.lengths)]
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(*(name.replace("_", " ") for name in asdict(rows[0])), box=None)
    for row in rows:
        table.add_row(*(f"{each:.4g}" if isinstance(each, float) else str(each) for each in asdict(row).values()))
    Console(width=130, highlight=False).print(table)


if __name__ == "__main__":
    main()
