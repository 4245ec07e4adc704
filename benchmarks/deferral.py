"""Claim: with forwards as far ahead as memory allows, a step of Entrain's deferral takes no longer than without, and fits.

The model, plan and lengths of `balanced_iteration.py`. `entrain` distributes every batch; steps are simulated with backwards cut
by sample (`split-backward`) under 1F1B, eager 1F1B with twice 1F1B's microbatches in flight, and with as many as the memory model
has room for (`eager-1f1b-memory`); under ZB-H1 and `zb-memory`. Columns `K_eff` and `predicted` have the last with
--balance-num-microbatches effective and predicted. The second number is the peak memory of the fullest rank, in GB.

Run `python benchmarks/deferral.py [--lengths DIR] [--num-batches N] [--json]`.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from multimodal.balance.balance_options import BalanceOptions, MicrobatchCount
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.plan.plans_of_sizes import plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import passes_named
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

PLANNED_GB = 72.0
"""GB of the 80 that the memory model may use."""
COLUMNS: Mapping[str, tuple[str, MicrobatchCount]] = {
    "1f1b": ("1f1b", MicrobatchCount.GIVEN),
    "eager-1f1b": ("eager-1f1b", MicrobatchCount.GIVEN),
    "eager-1f1b-memory": ("eager-1f1b-memory", MicrobatchCount.GIVEN),
    "K_eff": ("eager-1f1b-memory", MicrobatchCount.EFFECTIVE),
    "predicted": ("eager-1f1b-memory", MicrobatchCount.PREDICTED),
    "zb-h1": ("zb-h1", MicrobatchCount.GIVEN),
    "zb-memory": ("zb-memory", MicrobatchCount.GIVEN),
}


def measure(samples: Sequence[SampleLengths], *, num_batches: int) -> dict[str, tuple[float, float]]:
    """Return column -> mean seconds of a step, and the largest peak of a rank in GB."""
    graph = ModelGraph.from_dict({"units": MODEL})
    plan = plan_disaggregated(graph, sizes=SIZES, world_size=8 * NUM_REPLICAS)
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    batches = list(draw_length_batches(samples, batch_size=GLOBAL_BATCH_SIZE, num_batches=num_batches, seed=0))
    found = {}
    for column, (schedule, count) in COLUMNS.items():
        schedules = ScheduleCache(graph, plan, BUILDERS[schedule], passes_named("split-backward"))
        predictor = StepPredictor(schedules, cluster, VOCAB_SIZE)
        options = BalanceOptions(
            num_microbatches=NUM_MICROBATCHES, vocab_size=VOCAB_SIZE, predictor=predictor, microbatch_count=count
        )
        steps = []
        for lengths in batches:
            assignment = BALANCERS["entrain"](lengths, graph=graph, plan=plan, options=options)
            costs = predictor.costs(assignment, lengths)
            steps.append(simulate_schedule(schedules.find(schedules.shape(assignment), costs).schedule, costs))
        seconds = statistics.fmean(step.iteration_seconds for step in steps)
        found[column] = seconds, max(step.peak_memory_bytes for step in steps) / 1e9
    return found


def main(argv: Sequence[str]) -> None:
    """Measure and print; also print whether the claim holds."""
    given = build_parser(__doc__, num_batches=1).parse_args(argv)
    rows = {name: measure(samples, num_batches=given.num_batches) for name, samples in read_lengths(given.lengths).items()}
    pairs = ("eager-1f1b-memory", "1f1b"), ("zb-memory", "zb-h1"), ("predicted", "eager-1f1b-memory")
    holds = all(
        row[far][0] <= row[plain][0] * (1 + 1e-9) and row[far][1] <= max(PLANNED_GB, row[plain][1])
        for row in rows.values()
        for far, plain in pairs
    )
    if given.json:
        print(json.dumps({"seconds_and_gb": rows, "holds": holds}))
        return
    table = Table("lengths", *COLUMNS, title="seconds of a step (peak in GB)", box=None)
    for name, row in rows.items():
        table.add_row(name, *(f"{seconds:.3f} ({peak:.0f})" for seconds, peak in row.values()))
    console = Console(width=150, highlight=False)
    console.print(table)
    verdict = "holds" if holds else "does not hold"
    console.print(f"running ahead within memory is no slower, within {PLANNED_GB:.0f} GB or what it takes without: {verdict}")


if __name__ == "__main__":
    main(sys.argv[1:])
