"""Claim: microbatches in the order that `disttrain` chooses under the run's own schedule take no longer than as they come.

The model, cluster and lengths of `balanced_iteration.py`, with an LLM of four stages that hold one layer range each, two or four
(interleaved 1F1B), or split backwards (ZB-H1). `given` has DistTrain's microbatches in the order of their samples' ids, `Alg. 3`
in DistTrain's order for 1F1B, `chosen` in the one that is predicted to be shortest (`--balance disttrain` in a run). The table
has the simulated seconds of a step over those of `given`, and of `chosen` the seconds themselves.

Run `python benchmarks/microbatch_order.py [--lengths DIR] [--num-batches N] [--json]`.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
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
    VOCAB_SIZE,
    build_parser,
    read_lengths,
)
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Prediction
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

SCHEDULES = {"1f1b": ("1f1b", 1), "2 ranges": ("interleaved-1f1b", 2), "4 ranges": ("interleaved-1f1b", 4), "zb-h1": ("zb-h1", 1)}


class Remembering:
    """A predictor that records its predictions: Alg. 3 is the first of the orders, the given order the last."""

    def __init__(self, predictor: StepPredictor) -> None:
        """predictor: predicts the steps."""
        self._predictor, self.seconds = predictor, dict[str, list[float]]()

    def predict_each(self, assignments: Sequence[Assignment], lengths: Sequence[SampleLengths]) -> Sequence[Prediction]:
        """Predict, and record the seconds."""
        predictions = self._predictor.predict_each(assignments, lengths)
        found = [prediction.seconds for prediction in predictions]
        for name, seconds in (("Alg. 3", found[0]), ("given", found[-1]), ("chosen", min(found))):
            self.seconds.setdefault(name, []).append(seconds)
        return predictions


def measure(samples: Sequence[SampleLengths], *, num_batches: int) -> dict[str, dict[str, float]]:
    """Return schedule -> order -> mean seconds of a step."""
    graph = ModelGraph.from_dict({"units": MODEL})
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    rows = {}
    for name, (schedule, num_ranges) in SCHEDULES.items():
        encoder = UnitSizes(data_parallel_size=NUM_REPLICAS, pipeline_parallel_size=2)
        llm = replace(encoder, pipeline_parallel_size=4, virtual_pipeline_size=num_ranges)
        plan = plan_disaggregated(graph, sizes={"vision": encoder, "llm": llm}, world_size=6 * NUM_REPLICAS)
        predictor = Remembering(StepPredictor(ScheduleCache(graph, plan, BUILDERS[schedule]), cluster, VOCAB_SIZE))
        options = BalanceOptions(num_microbatches=NUM_MICROBATCHES, vocab_size=VOCAB_SIZE, predictor=predictor)
        for lengths in draw_length_batches(samples, batch_size=GLOBAL_BATCH_SIZE, num_batches=num_batches, seed=0):
            BALANCERS["disttrain"](lengths, graph=graph, plan=plan, options=options)
        rows[name] = {order: statistics.fmean(seconds) for order, seconds in predictor.seconds.items()}
    return rows


def main(argv: Sequence[str]) -> None:
    """Measure and print; also print whether the claim holds."""
    given = build_parser(__doc__, num_batches=2).parse_args(argv)
    rows = {name: measure(samples, num_batches=given.num_batches) for name, samples in read_lengths(given.lengths).items()}
    holds = all(row["chosen"] <= min(row.values()) for schedules in rows.values() for row in schedules.values())
    if given.json:
        print(json.dumps({"seconds": rows, "holds": holds}))
        return
    table = Table("lengths", *(f"{name}: Alg. 3, chosen" for name in SCHEDULES), title="over given", box=None)
    for name, schedules in rows.items():
        cells = (
            f"{row['Alg. 3'] / row['given']:.3f}, {row['chosen'] / row['given']:.3f} ({row['chosen']:.3f} s)"
            for row in schedules.values()
        )
        table.add_row(name, *cells)
    console = Console(width=150, highlight=False)
    console.print(table)
    console.print(f"the chosen order is no slower than the others: {'holds' if holds else 'does not hold'}")


if __name__ == "__main__":
    main(sys.argv[1:])
