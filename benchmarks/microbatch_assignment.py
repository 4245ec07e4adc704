"""Claim: Entrain's whole assignment of 512 samples to 4 replicas of 32 microbatches takes 5 ms, reordering 64 microbatches 2 ms.

Microbatches: batches of `--samples` are drawn from each file of `--lengths DIR` (by default `shared/data/lengths` beside the
checkout; where that is absent, long-tailed lengths are generated), without replacement where there are enough, and go to
`--replicas` replicas in `--microbatches` microbatches each. A sample's time is that of a ViT-like encoder of hidden size 1280 per
image or clip and of an LLM of hidden size 4096 per packed sample, both linear plus quadratic in tokens. DistTrain keeps samples
whole: its groups' samples are cut into microbatches of equally many in the order of the batch.

`replicas` is the largest load of a replica over the mean, of encoder and LLM together; `over least` that of encoder or LLM,
whichever is worse, over the least that it could be: the mean, or the largest sample; `std` the standard deviation of a
replica's microbatch times over their mean, averaged over replicas and batches; `max` the largest over the mean of any replica;
`K` the mean number of microbatches of a replica (Entrain as published lowers it where one sample would dominate).

Reordering: pipelines whose first stages (the encoder) take lognormal times, in the given order, in DistTrain's, and with
exchanges; `bubble` is the time over that of the busiest stage, minus 1.

`ms` is processor time, the best of `--repeats`.
Run `python benchmarks/microbatch_assignment.py [--json] [--lengths DIR] [--samples N] [--replicas N] [--microbatches N ...]`.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.published_microbatch_assignment import (
    published_entrain,
    published_inter_reordering,
    published_intra_reordering,
)
from benchmarks.reordering_steps import pipeline_seconds
from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.algorithms.post_balance import partition_longest_first
from multimodal.balance.algorithms.reorder_microbatches import pipeline_steps, reorder_microbatches
from multimodal.data.length_table import read_length_table
from multimodal.values.model_graph import AudioInput, ImageInput, ModelGraph, Role, Transformer, Unit

Loads = NDArray[np.float64]
Groups = Sequence[Sequence[int]]
Result = TypeVar("Result")

DEFAULT_LENGTHS = Path(__file__).parents[2] / "shared" / "data" / "lengths"
ENCODER_HIDDEN_SIZE, LLM_HIDDEN_SIZE = 1280, 4096
CLAIMED_ENTRAIN_MILLISECONDS, CLAIMED_REORDERING_MILLISECONDS = 5.0, 2.0
PIPELINES = ((4, 1, 16), (8, 1, 64), (8, 2, 64), (8, 4, 64), (16, 1, 64))
"""(stages, chunks per stage, microbatches)."""


@dataclass(frozen=True)
class Pool:
    """Work of encoder and LLM for each sample of a data set, in any unit of time."""

    encoder: Loads
    llm: Loads


@dataclass(frozen=True)
class AssignmentRow:
    """One method on the batches of one data set."""

    lengths: str
    num_microbatches: int
    method: str
    replica_max: float
    over_least: float
    encoder_std: float
    encoder_max: float
    llm_std: float
    llm_max: float
    mean_num_microbatches: float
    milliseconds: float


MEANS = "replica_max", "over_least", "encoder_std", "encoder_max", "llm_std", "llm_max", "mean_num_microbatches"
"""Of all batches."""


@dataclass(frozen=True)
class ReorderingRow:
    """One way to order the microbatches of pipelines of one shape."""

    num_stages: int
    num_chunks: int
    num_microbatches: int
    method: str
    bubble: float
    milliseconds: float


def read_pools(folder: Path) -> dict[str, Pool]:
    """Return one pool per file."""
    encoder, llm = (Transformer(1, size, 16, 4 * size) for size in (ENCODER_HIDDEN_SIZE, LLM_HIDDEN_SIZE))
    graph = ModelGraph(
        (
            Unit("vision", Role.ENCODER, encoder, image=ImageInput()),
            Unit("audio", Role.ENCODER, encoder, audio=AudioInput()),
            Unit("llm", Role.BACKBONE, llm),
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    pools = {}
    for path in sorted(path for path in folder.iterdir() if path.name.endswith((".csv", ".csv.gz", ".parquet"))):
        samples = read_length_table(path, graph=graph)
        encoded = [sum(seconds_of(item.num_tokens, ENCODER_HIDDEN_SIZE) for item in sample.items) for sample in samples]
        pools[path.name.split(".")[0]] = Pool(
            np.array(encoded), np.array([seconds_of(sample.num_tokens, LLM_HIDDEN_SIZE) for sample in samples])
        )
    return pools


def generate_pools(generator: np.random.Generator) -> dict[str, Pool]:
    """Generate long-tailed pools: with one image in each sample, and with one image in 60 % of samples."""
    pools = {}
    for name, share in (("generated", 1.0), ("generated, partly text", 0.6)):
        patches = np.clip(generator.lognormal(7.2, 0.8, 20_000), 16, 16384) * (generator.random(20_000) < share)
        text = np.clip(generator.lognormal(6.0, 1.0, 20_000), 1, 32768)
        pools[name] = Pool(seconds_of(patches, ENCODER_HIDDEN_SIZE), seconds_of(patches / 4 + text, LLM_HIDDEN_SIZE))
    return pools


def seconds_of(num_tokens: Loads, hidden_size: int) -> Loads:
    """Return a layer's FLOPs, 24 h^2 t + 4 h t^2, in units of those of one token in linear layers."""
    return num_tokens * (1 + num_tokens / (6 * hidden_size))


Assign = Callable[[Loads, Loads, int, int], Sequence[tuple[Groups, Groups]]]
"""(loads of encoder and LLM, replicas, microbatches) -> encoder and LLM microbatches of each replica."""


def _in_order(encoder: Loads, llm: Loads, num_replicas: int, num_microbatches: int) -> Sequence[tuple[Groups, Groups]]:
    groups = np.array_split(np.arange(len(llm)), num_replicas)
    return [_cut(group, num_microbatches) for group in groups]


def _disttrain(encoder: Loads, llm: Loads, num_replicas: int, num_microbatches: int) -> Sequence[tuple[Groups, Groups]]:
    groups = partition_longest_first((encoder + llm).tolist(), num_bins=num_replicas)
    return [_cut(np.sort(group), num_microbatches) for group in groups]


def _llm_only(encoder: Loads, llm: Loads, num_replicas: int, num_microbatches: int) -> Sequence[tuple[Groups, Groups]]:
    groups = partition_longest_first(llm.tolist(), num_bins=num_replicas)
    return [_cut(np.sort(group), num_microbatches) for group in groups]


def _published_disttrain(encoder: Loads, llm: Loads, num_replicas: int, num_microbatches: int) -> Sequence[tuple[Groups, Groups]]:
    groups = published_intra_reordering((encoder + llm).tolist(), num_groups=num_replicas)
    return [_cut(np.sort(group), num_microbatches) for group in groups]


def _cut(samples: NDArray[np.int64], num_microbatches: int) -> tuple[Groups, Groups]:
    microbatches = [part.tolist() for part in np.array_split(samples, min(num_microbatches, len(samples)))]
    return microbatches, microbatches


def _entrain(*, lower_count: bool = False) -> Assign:
    def assign(encoder: Loads, llm: Loads, num_replicas: int, num_microbatches: int) -> Sequence[tuple[Groups, Groups]]:
        placed = assign_entrain(
            llm,
            encoder_loads=encoder,
            num_replicas=num_replicas,
            num_microbatches=num_microbatches,
            min_num_microbatches=1 if lower_count else None,
        )
        return group_samples(placed)

    return assign


def group_samples(placed: Any) -> Sequence[tuple[Groups, Groups]]:
    """Convert a result of `assign_entrain` into the encoder and LLM microbatches of each replica."""
    replicas, *microbatches, counts = placed
    groups = [([[] for _ in range(count)], [[] for _ in range(count)]) for count in counts]
    for sample, (replica, *each) in enumerate(zip(replicas, *microbatches, strict=True)):
        for own, microbatch in zip(groups[replica], each, strict=True):
            own[microbatch].append(sample)
    return groups


def _published_entrain(encoder: Loads, llm: Loads, num_replicas: int, num_microbatches: int) -> Sequence[tuple[Groups, Groups]]:
    return published_entrain(llm.tolist(), encoder=encoder.tolist(), num_replicas=num_replicas, num_microbatches=num_microbatches)


METHODS: Mapping[str, Assign] = {
    "in order": _in_order,
    "the LLM's work, longest first": _llm_only,
    "DistTrain as published (ascending), Python": _published_disttrain,
    "DistTrain, descending": _disttrain,
    "Entrain as published, Python": _published_entrain,
    "Braid's Entrain, K_eff": _entrain(lower_count=True),
    "Braid's Entrain": _entrain(),
}


def measure_assignment(
    name: str, pool: Pool, *, num_samples: int, num_replicas: int, num_microbatches: int, num_batches: int, repeats: int
) -> list[AssignmentRow]:
    """Measure every method on the same batches."""
    generator = np.random.default_rng(0)
    has_few = num_samples > len(pool.llm)
    batches = [generator.choice(len(pool.llm), num_samples, replace=has_few) for _ in range(num_batches)]
    rows = []
    for method, assign in METHODS.items():
        spread, milliseconds = [], []
        for batch in batches:
            encoder, llm = pool.encoder[batch], pool.llm[batch]
            placed, took = _timed(
                lambda encoder=encoder, llm=llm, assign=assign: assign(encoder, llm, num_replicas, num_microbatches),
                1 if method.endswith("Python") else repeats,
            )
            milliseconds.append(took)
            spread.append(
                [
                    _replica_max(encoder + llm, [replica[1] for replica in placed]),
                    max(_over_least(loads, [replica[1] for replica in placed]) for loads in (encoder, llm)),
                    *_spread(encoder, [replica[0] for replica in placed]),
                    *_spread(llm, [replica[1] for replica in placed]),
                    np.mean([len(replica[1]) for replica in placed]),
                ]
            )
        values = zip(MEANS, np.mean(spread, axis=0).tolist(), strict=True)
        rows.append(AssignmentRow(name, num_microbatches, method, **dict(values), milliseconds=min(milliseconds)))
    return rows


def _spread(loads: Loads, replicas: Sequence[Groups]) -> tuple[float, float]:
    deviations, largest = [], []
    for microbatches in replicas:
        times = np.array([loads[list(members)].sum() for members in microbatches])
        deviations.append(times.std() / times.mean() if times.any() else 0.0)
        largest.append(times.max() / times.mean() if times.any() else 1.0)
    return float(np.mean(deviations)), max(largest)


def _replica_max(loads: Loads, replicas: Sequence[Groups]) -> float:
    totals = np.array([sum(loads[list(members)].sum() for members in microbatches) for microbatches in replicas])
    return float(totals.max() / totals.mean())


def _over_least(loads: Loads, replicas: Sequence[Groups]) -> float:
    totals = [sum(loads[list(members)].sum() for members in microbatches) for microbatches in replicas]
    least = max(float(loads.sum()) / len(replicas), float(loads.max()))
    return max(totals) / least if least else 1.0


def _timed(work: Callable[[], Result], repeats: int) -> tuple[Result, float]:
    taken = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        result = work()
        taken.append(1000 * (time.process_time() - start))
    return result, min(taken)


def measure_reordering(*, num_stages: int, num_chunks: int, num_microbatches: int, repeats: int) -> list[ReorderingRow]:
    """Measure every order on pipelines whose first quarter of virtual stages varies most."""
    generator = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float]]] = {}
    pipeline_steps(num_stages, num_chunks, num_microbatches)  # cached: a run makes it once
    for _ in range(5):
        num_virtual_stages = num_stages * num_chunks
        forward = np.repeat(generator.lognormal(0, 0.25, (1, num_microbatches)), num_virtual_stages, axis=0)
        forward[: max(1, num_virtual_stages // 4)] = generator.lognormal(0, 0.6, num_microbatches)
        pipeline = {"forward_seconds": forward, "backward_seconds": 2 * forward, "num_stages": num_stages}
        busiest = 3 * max(forward[stage::num_stages].sum() for stage in range(num_stages))
        orders = {
            "given": lambda: tuple(range(num_microbatches)),
            "DistTrain, Alg. 3 as published, Python": lambda forward=forward: published_inter_reordering(
                forward.tolist(), backward=(2 * forward).tolist()
            ),
            "Braid, no exchanges": lambda pipeline=pipeline: reorder_microbatches(**pipeline, num_swaps=0),
            "Braid": lambda pipeline=pipeline: reorder_microbatches(**pipeline),
        }
        for method, order_by in orders.items():
            if num_chunks > 1 and "published" in method:
                continue
            order, milliseconds = _timed(order_by, 1 if method.endswith("Python") else repeats)
            found.setdefault(method, []).append((pipeline_seconds(order, **pipeline) / busiest - 1, milliseconds))
    shape = num_stages, num_chunks, num_microbatches
    return [
        ReorderingRow(*shape, method, float(np.mean([bubble for bubble, _ in each])), min(took for _, took in each))
        for method, each in found.items()
    ]


def show(assignments: Sequence[AssignmentRow], reorderings: Sequence[ReorderingRow], console: Console) -> None:
    """Print both tables."""
    table = Table(
        "lengths",
        "of",
        "method",
        "replicas",
        "over least",
        "enc. std",
        "max",
        "LLM std",
        "max",
        "K",
        "ms",
        title="microbatch times",
    )
    for row in assignments:
        spread = row.replica_max, row.over_least, row.encoder_std, row.encoder_max, row.llm_std, row.llm_max
        table.add_row(
            row.lengths[:24],
            str(row.num_microbatches),
            row.method,
            *(f"{value:.3f}" for value in spread),
            f"{row.mean_num_microbatches:.1f}",
            f"{row.milliseconds:.2f}",
        )
    console.print(table)
    table = Table("stages", "chunks", "microbatches", "method", "bubble", "ms", title="order of microbatches")
    for order in reorderings:
        shape = order.num_stages, order.num_chunks, order.num_microbatches
        table.add_row(*map(str, shape), order.method, f"{order.bubble:.3f}", f"{order.milliseconds:.2f}")
    console.print(table)


def main() -> None:
    """Draw, measure and print; also print whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--lengths", type=Path, help="folder of lengths files; default: see above")
    parser.add_argument("--samples", type=int, default=512, help="per batch")
    parser.add_argument("--replicas", type=int, default=4, help="data-parallel replicas")
    parser.add_argument("--microbatches", type=int, nargs="+", default=(32, 8), help="per replica")
    parser.add_argument("--batches", type=int, default=3, help="per lengths file")
    parser.add_argument("--repeats", type=int, default=5, help="take the best of so many runs")
    arguments = parser.parse_args()
    folder = arguments.lengths or (DEFAULT_LENGTHS if DEFAULT_LENGTHS.is_dir() else None)
    pools = read_pools(folder) if folder else generate_pools(np.random.default_rng(0))
    assignments = [
        row
        for count in arguments.microbatches
        for name, pool in pools.items()
        for row in measure_assignment(
            name,
            pool,
            num_samples=arguments.samples,
            num_replicas=arguments.replicas,
            num_microbatches=count,
            num_batches=arguments.batches,
            repeats=arguments.repeats,
        )
    ]
    reorderings = [
        row
        for shape in PIPELINES
        for row in measure_reordering(
            num_stages=shape[0], num_chunks=shape[1], num_microbatches=shape[2], repeats=arguments.repeats
        )
    ]
    slowest = max(row.milliseconds for row in assignments if row.method == "Braid's Entrain")
    slowest_reordering = max(row.milliseconds for row in reorderings if row.method == "Braid")
    holds = slowest <= CLAIMED_ENTRAIN_MILLISECONDS and slowest_reordering <= CLAIMED_REORDERING_MILLISECONDS
    if arguments.json:
        tables = {"assignments": [asdict(row) for row in assignments], "reorderings": [asdict(row) for row in reorderings]}
        print(json.dumps({"lengths": folder.name if folder else "generated", **tables, "holds": holds}))
        return
    console = Console(width=130)
    show(assignments, reorderings, console)
    console.print(
        f"assignment in {slowest:.2f} ms, claimed {CLAIMED_ENTRAIN_MILLISECONDS}; reordering in {slowest_reordering:.2f} ms, "
        f"claimed {CLAIMED_REORDERING_MILLISECONDS}: {'holds' if holds else 'does not hold'}"
    )


if __name__ == "__main__":
    main()
