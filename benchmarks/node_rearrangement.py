"""Claim: at 2,560 replicas, 8 per node, the most that a rank sends to other nodes is within 5 % of the LP bound in 50 ms.

60 samples per replica and modality, lengths as in `balance.py`, post-balanced over the replicas; each modality is rearranged on
its own. `before` and `after` are the most bytes that any rank sends to other nodes, over the LP bound (Alg. 3 with fractions of
batches). `over best` divides `after` by the better of that bound and the bound of a single node that picks whole batches freely:
1 means that the result is optimal. `ms` is the processor time of one rearrangement, checks included, the best of `--repeats`.

The peer is OrchMLLM's integer program as published, through scipy's HiGHS, up to `--peer-replicas` replicas and for
`--peer-seconds`. Run `python benchmarks/node_rearrangement.py [--json] [--replicas 64 256 ...] [--lengths DIR] [--no-peer]`.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.sparse import csr_matrix

from benchmarks.balance import DEFAULT_LENGTHS, NUM_REPLICAS, SAMPLES_PER_REPLICA, Lengths, generate_lengths, read_lengths
from benchmarks.node_optimum import inter_node_bytes, lp_bound, single_node_bound
from benchmarks.published_node_rearrangement import published_node_rearrangement
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.rearrange_nodes import rearrange_nodes

RANKS_PER_NODE = 8
CLAIMED_RATIO, CLAIMED_MILLISECONDS = 1.05, 50.0
BYTES_PER_TOKEN: Mapping[str, int] = {"vision": 2 * 14 * 14 * 3, "audio": 2 * 2 * 128, "llm": 8}
"""Bytes per token before the unit: bf16 pixels of a patch, bf16 mel features of two frames, an int64."""


@dataclass(frozen=True)
class Row:
    """Results of one rearrangement."""

    modality: str
    num_replicas: int
    before: int
    """The most bytes that any rank sends to other nodes. The next four are in bytes, too."""
    after: int
    lp_bound: float
    node_bound: float
    peer: int | None
    """None if the peer was not run or found nothing in time."""
    total_before: int
    """Bytes that all ranks send to other nodes together."""
    total_after: int
    milliseconds: float
    bound_seconds: float
    peer_seconds: float | None

    @property
    def over_lp(self) -> float:
        """Return the result over the linear program's bound, which the claim is about."""
        return self.after / self.lp_bound

    @property
    def over_best(self) -> float:
        """Return the result over the better bound: 1 if the result is proven to be the optimum."""
        return self.after / max(self.lp_bound, self.node_bound)


def build_volume(lengths: Lengths, *, num_replicas: int, bytes_per_token: int) -> csr_matrix:
    """Return the bytes that each replica holds of each new batch; replica i loaded the i-th share of the samples."""
    batches = post_balance(lengths, num_bins=num_replicas)
    sources = np.repeat(np.arange(num_replicas), SAMPLES_PER_REPLICA)
    return csr_matrix((lengths * bytes_per_token, (sources, batches)), shape=(num_replicas, num_replicas))


def measure(modality: str, lengths: Lengths, *, num_replicas: int, repeats: int, peer_seconds_allowed: float | None) -> Row:
    """Rearrange one modality, compute its bounds, and run the peer if it may take time."""
    volume = build_volume(lengths, num_replicas=num_replicas, bytes_per_token=BYTES_PER_TOKEN[modality])
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        found = rearrange_nodes(volume, ranks_per_node=RANKS_PER_NODE)
        seconds.append(time.process_time() - start)
    worst_node = int(found.bytes_after.argmax()) // RANKS_PER_NODE
    start = time.perf_counter()
    bound = lp_bound(volume, ranks_per_node=RANKS_PER_NODE)
    bound_seconds = time.perf_counter() - start
    peer, peer_seconds = None, None
    if peer_seconds_allowed is not None:
        start = time.perf_counter()
        permutation = published_node_rearrangement(volume, ranks_per_node=RANKS_PER_NODE, time_limit_seconds=peer_seconds_allowed)
        peer_seconds = time.perf_counter() - start
        if permutation is not None:
            peer = int(inter_node_bytes(volume, permutation, ranks_per_node=RANKS_PER_NODE).max())
    return Row(
        modality,
        num_replicas,
        int(found.bytes_before.max()),
        int(found.bytes_after.max()),
        bound,
        single_node_bound(volume, ranks_per_node=RANKS_PER_NODE, node=worst_node),
        peer,
        int(found.bytes_before.sum()),
        int(found.bytes_after.sum()),
        1000 * min(seconds),
        bound_seconds,
        peer_seconds,
    )


def show(rows: Sequence[Row], source: str, console: Console) -> None:
    """Print the table."""
    columns = ("replicas", "modality", "before", "after", "over best", "total", "ms", "LP s", "published ILP", "ILP s")
    table = Table(*columns, title=f"most bytes from one rank to other nodes, over the LP bound; lengths: {source}")
    for row in rows:
        table.add_row(
            str(row.num_replicas),
            row.modality,
            f"{row.before / row.lp_bound:.3f}",
            f"{row.over_lp:.4f}",
            f"{row.over_best:.4f}",
            f"{row.total_after / row.total_before:.3f}",
            f"{row.milliseconds:.1f}",
            f"{row.bound_seconds:.1f}",
            f"{row.peer / row.lp_bound:.4f}" if row.peer is not None else "-",
            f"{row.peer_seconds:.1f}" if row.peer_seconds is not None else "-",
        )
    console.print(table)


def main() -> None:
    """Draw, measure and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--lengths", type=Path, help="folder of lengths files; default: as in balance.py")
    parser.add_argument("--replicas", type=int, nargs="+", default=NUM_REPLICAS, help="numbers of replicas, multiples of 8")
    parser.add_argument("--no-peer", action="store_true", help="do not run the published integer program")
    parser.add_argument("--peer-replicas", type=int, default=256, help="run it up to so many replicas")
    parser.add_argument("--peer-seconds", type=float, default=60.0, help="stop it after so many seconds")
    parser.add_argument("--repeats", type=int, default=7, help="take the best of so many runs")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn lengths")
    arguments = parser.parse_args()
    generator = np.random.default_rng(arguments.seed)
    folder = arguments.lengths or (DEFAULT_LENGTHS if DEFAULT_LENGTHS.is_dir() else None)
    pools = read_lengths(folder) if folder else generate_lengths(generator)
    rows = [
        measure(
            modality,
            generator.choice(pool, count * SAMPLES_PER_REPLICA),
            num_replicas=count,
            repeats=arguments.repeats,
            peer_seconds_allowed=None if arguments.no_peer or count > arguments.peer_replicas else arguments.peer_seconds,
        )
        for count in arguments.replicas
        for modality, pool in pools.items()
    ]
    largest = [row for row in rows if row.num_replicas == max(arguments.replicas)]
    ratio, milliseconds = max(row.over_lp for row in largest), max(row.milliseconds for row in largest)
    holds = ratio <= CLAIMED_RATIO and milliseconds <= CLAIMED_MILLISECONDS
    source = folder.name if folder else "generated"
    if arguments.json:
        details = [asdict(row) | {"over_lp": row.over_lp, "over_best": row.over_best} for row in rows]
        print(json.dumps({"lengths": source, "seed": arguments.seed, "rows": details, "holds": holds}))
        return
    console = Console(width=130)
    show(rows, source, console)
    console.print(
        f"{largest[0].num_replicas} replicas: {ratio:.4f} of the LP bound in {milliseconds:.1f} ms, claimed {CLAIMED_RATIO} in "
        f"{CLAIMED_MILLISECONDS} ms: {'holds' if holds else 'does not hold'}"
    )


if __name__ == "__main__":
    main()
