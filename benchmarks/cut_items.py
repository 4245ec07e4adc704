"""Claim: ranks that have whole items, and cut long ones only, make no step over 1 % longer than ranks that spread them all.

An item can take longer than all the work that a rank should do in a step; then no balancer helps, and only cutting the item does.
Each file of image lengths is balanced by `--balance orchmllm` for 8 GPUs of an encoder and 16 of the LLM (Qwen2.5-VL 7B on H100,
tp 2 x dp 8, 1F1B). The encoder's context parallel ranks have

    whole       1 rank: items are never cut
    blocks      2 or 4: blocks of every microbatch (`--context-parallel-distribution lpt`)
    by-item     2 or 4: whole items, and parts of items that are longer than a rank's share

The table has, for the encoder: its longest microbatch, the standard deviation of its microbatches over their mean, the busiest
replica over the mean, the share of tokens whose keys and values are gathered, and the seconds of all its GPUs; then the seconds
of a step. All of it is simulated, forward and backward, and the mean of `--num-batches` batches.

Run `python benchmarks/cut_items.py [--json] [--lengths DIR] [--batch-size N] [--micro-batch-size N] [--num-batches N]`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost import token_shares
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.data.length_table import read_length_table
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.shape import StepShape

ROOT = Path(__file__).parents[1]
DEFAULT_LENGTHS = ROOT.parent / "shared" / "data" / "lengths"
ENCODER_GPUS, LLM = 8, UnitSizes(2, 1, 1, 8)
WAYS = (("whole", 1), ("blocks", 2), ("by-item", 2), ("blocks", 4), ("by-item", 4))
"""(distribution, context parallel size) of the encoder."""
NOTHING_STAYS_WHOLE = -1.0
"""Tolerance at which blocks of all items are distributed, so that both ways are counted alike: as whole blocks."""
CLAIMED_RATIO = 1.01
COMPUTING = (ActionKind.FORWARD, ActionKind.BACKWARD)


@dataclass(frozen=True)
class Row:
    """One lengths file, balanced for one distribution and context parallel size of the encoder."""

    lengths: str
    distribution: str
    context_parallel_size: int
    longest_microbatch_seconds: float
    deviation: float
    """Standard deviation of the microbatches' seconds over their mean."""
    busiest: float
    """Seconds of the busiest replica over the mean."""
    gathered: float
    """Share of the tokens whose keys and values are gathered."""
    encoder_seconds: float
    """Seconds of all GPUs of the encoder together."""
    step_seconds: float


def measure(lengths: Sequence[SampleLengths], *, graph: ModelGraph, size: int, micro_batch_size: int) -> tuple[float, ...]:
    """Balance and simulate one batch; returns the numbers of a row."""
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    sizes = {"vision": UnitSizes(1, 1, size, ENCODER_GPUS // size), "llm": LLM}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=ENCODER_GPUS + LLM.num_ranks)
    vocab_size = graph.backbone.vocab_size or 0
    options = BalanceOptions(micro_batch_size=micro_batch_size, vocab_size=vocab_size)
    assignment = BALANCERS["orchmllm"](lengths, graph=graph, plan=plan, options=options)
    shape = assignment.shape(graph, plan)
    costs = ModelCosts(shape, assignment, lengths, cluster, vocab_size)
    seconds = [[_seconds(costs, place) for place in places] for places in _places(shape)]
    microbatches, replicas = np.concatenate(seconds), np.array([sum(each) for each in seconds])
    loads = costs.loads.computed("vision")
    gathered = sum(load.cut.num_gathered if load.cut else 0 for load in loads)
    return (
        float(microbatches.max()),
        float(microbatches.std() / microbatches.mean()),
        float(replicas.max() / replicas.mean()),
        gathered / sum(load.all.num_tokens for load in loads),
        float(replicas.sum() * size),
        simulate_schedule(build_schedule(BUILDERS["1f1b"], shape), costs).iteration_seconds,
    )


def _places(shape: StepShape) -> list[list[MicrobatchPlace]]:
    replicas = range(shape.plan.units["vision"].data_parallel_size)
    return [
        [MicrobatchPlace("vision", each, index) for index in range(shape.num_microbatches("vision", each))] for each in replicas
    ]


def _seconds(costs: ModelCosts, place: MicrobatchPlace) -> float:
    return sum(costs.compute(Action(kind, place.unit, place.replica, 0, place.microbatch)).seconds for kind in COMPUTING)


def rows_of(name: str, samples: Sequence[SampleLengths], *, graph: ModelGraph, flags: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way in which the encoder's ranks may share its work."""
    draw = np.random.default_rng(flags.seed)
    drawn = [draw.permutation(len(samples))[: flags.batch_size].tolist() for _ in range(flags.num_batches)]
    batches = [[replace(samples[index], sample_id=number) for number, index in enumerate(batch)] for batch in drawn]
    for distribution, size in WAYS:
        options = {"size": size, "micro_batch_size": flags.micro_batch_size}
        with patch.object(token_shares, "TOLERANCE", NOTHING_STAYS_WHOLE if distribution == "blocks" else token_shares.TOLERANCE):
            found = np.mean([measure(batch, graph=graph, **options) for batch in batches], axis=0)
        yield Row(name, distribution, size, *found.tolist())


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a table."""
    columns = ("lengths", "ranks have", "cp", "longest ms", "deviation", "busiest", "gathered", "GPU s", "step s")
    table = Table(*columns, title="an encoder's microbatches, and the step")
    for row in rows:
        numbers = f"{1000 * row.longest_microbatch_seconds:.0f}", f"{row.deviation:.2f}", f"{row.busiest:.3f}"
        seconds = f"{row.encoder_seconds:.2f}", f"{row.step_seconds:.3f}"
        table.add_row(row.lengths, row.distribution, str(row.context_parallel_size), *numbers, f"{row.gathered:.0%}", *seconds)
    console.print(table)


def main() -> None:
    """Balance, simulate and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--lengths", type=Path, default=DEFAULT_LENGTHS, help="folder of lengths files; default: shared/data/lengths"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="samples of a step")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples of a microbatch of the LLM")
    parser.add_argument("--num-batches", type=int, default=3, help="take the mean of so many")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    flags = parser.parse_args()
    graph = ModelGraph.from_file(ROOT / "examples" / "models" / "qwen2.5-vl-7b.yaml")
    rows: list[Row] = []
    for path in sorted(flags.lengths.glob("*.csv*")):
        samples = read_length_table(path, graph=graph)
        if any(sample.items for sample in samples):
            rows += rows_of(path.name.split(".")[0], samples, graph=graph, flags=flags)
    steps = {(row.lengths, row.distribution, row.context_parallel_size): row.step_seconds for row in rows}
    ratios = [seconds / steps[name, "blocks", size] for (name, way, size), seconds in steps.items() if way == "by-item"]
    holds = max(ratios) <= CLAIMED_RATIO
    if flags.json:
        print(
            json.dumps(
                {"rows": [asdict(row) for row in rows], "worst": max(ratios), "mean": float(np.mean(ratios)), "holds": holds}
            )
        )
        return
    console = Console(width=130)
    show(rows, console)
    console.print(
        f"by-item over blocks, a step: {np.mean(ratios):.3f} on average, {max(ratios):.3f} at worst (claimed {CLAIMED_RATIO}): "
        f"{'holds' if holds else 'does not hold'}"
    )


if __name__ == "__main__":
    main()
