"""Claim: microbatches of a number of tokens have a smaller peak of memory than those of a number of samples, at most 5 % slower.

The model, plan and lengths of `balanced_iteration.py`, 1F1B. With --micro-batch-size, 16 microbatches per replica have 4 samples
each; with --tokens-per-microbatch, as many tokens as these have on average. The table has the tokens of the largest microbatch
over this mean, simulated seconds of a step, and GB of the fullest rank, with samples in the data's order and balanced
by `llm-only`.

Run `python benchmarks/token_budget.py [--lengths DIR] [--num-batches N] [--json]`.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.balanced_iteration import (
    GLOBAL_BATCH_SIZE,
    MODEL,
    NUM_MICROBATCHES,
    NUM_REPLICAS,
    ROOT,
    SIZES,
    VOCAB_SIZE,
    build_parser,
    read_lengths,
)
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.plan.plans_of_sizes import plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

BALANCERS_SHOWN = ("none", "llm-only")
SAMPLES = GLOBAL_BATCH_SIZE // (NUM_REPLICAS * NUM_MICROBATCHES)


def measure(samples: Sequence[SampleLengths], *, num_batches: int) -> dict[str, dict[str, float]]:
    """Return column -> largest microbatch over the mean, seconds and GB."""
    graph = ModelGraph.from_dict({"units": MODEL})
    plan = plan_disaggregated(graph, sizes=SIZES, world_size=8 * NUM_REPLICAS)
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    schedules = ScheduleCache(graph, plan, BUILDERS["1f1b"])
    predictor = StepPredictor(schedules, cluster, VOCAB_SIZE)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for lengths in draw_length_batches(samples, batch_size=GLOBAL_BATCH_SIZE, num_batches=num_batches, seed=0):
        tokens = {sample.sample_id: sample.num_tokens for sample in lengths}
        mean = SAMPLES * statistics.fmean(tokens.values())
        sizes: dict[str, dict[str, Any]] = {
            "samples": {"micro_batch_size": SAMPLES},
            "tokens": {"tokens_per_microbatch": int(mean)},
        }
        for name in BALANCERS_SHOWN:
            for kind, size in sizes.items():
                options = BalanceOptions(vocab_size=VOCAB_SIZE, **size)
                assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
                microbatches = [microbatch for replica in assignment.units["llm"] for microbatch in replica]
                largest = max(sum(tokens[atom.sample_id] for atom in microbatch) for microbatch in microbatches)
                costs = predictor.costs(assignment, lengths)
                step = simulate_schedule(schedules.find(schedules.shape(assignment), costs).schedule, costs)
                row = largest / mean, step.iteration_seconds, step.peak_memory_bytes / 1e9
                found.setdefault(f"{name}, {kind}", []).append(row)
    return {
        column: dict(zip(("largest_over_mean", "seconds", "gb"), map(statistics.fmean, zip(*rows, strict=True)), strict=True))
        for column, rows in found.items()
    }


def main(argv: Sequence[str]) -> None:
    """Measure, print, and say whether the claim holds."""
    given = build_parser(__doc__, num_batches=1).parse_args(argv)
    rows = {name: measure(samples, num_batches=given.num_batches) for name, samples in read_lengths(given.lengths).items()}
    holds = all(
        row[f"{name}, tokens"]["gb"] <= row[f"{name}, samples"]["gb"]
        and row[f"{name}, tokens"]["seconds"] <= 1.05 * row[f"{name}, samples"]["seconds"]
        for row in rows.values()
        for name in BALANCERS_SHOWN
    )
    if given.json:
        print(json.dumps({"rows": rows, "holds": holds}))
        return
    columns = list(next(iter(rows.values())))
    table = Table(
        "lengths", *columns, title="largest microbatch over the mean; seconds of a step; GB of the fullest rank", box=None
    )
    for name, row in rows.items():
        table.add_row(
            name,
            *(f"{row[each]['largest_over_mean']:.2f}; {row[each]['seconds']:.3f}; {row[each]['gb']:.0f}" for each in columns),
        )
    console = Console(width=150, highlight=False)
    console.print(table)
    console.print(f"tokens take no more memory and at most 5 % longer than samples: {'holds' if holds else 'does not hold'}")


if __name__ == "__main__":
    main(sys.argv[1:])
