"""Claim: node-wise rearrangement takes bytes from the network between nodes, under every balancer that places items.

A vision-language model (`balanced_iteration.py`) on 8 nodes of 8 GPUs, all units on all of them: 64 replicas of the encoder, 16
of the LLM (tp 4), 512 samples a step. The table has the megabytes that a step sends between nodes, of encoder outputs and
gradients, and with `decode` of raw images as well, without and with --rearrange-nodes; and the simulated seconds of the step
(`dip`).

Run `python benchmarks/node_traffic.py [--lengths DIR] [--num-batches N] [--json]`.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.balanced_iteration import MODEL, ROOT, VOCAB_SIZE, build_parser, read_lengths
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.rearrange_nodes import NodeArrangement
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

NUM_RANKS, RANKS_PER_NODE, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 64, 8, 512, 4
BALANCERS_SHOWN = ("none", "orchmllm")
IMAGE = {"patch_size": 14, "in_channels": 3, "merge_size": 2}


def measure(samples: Sequence[SampleLengths], *, num_batches: int) -> dict[str, dict[str, float]]:
    """Return (balancer and source of lengths) -> means over batches."""
    units = {name: {**unit, **({"image": IMAGE} if name == "vision" else {})} for name, unit in MODEL.items()}
    graph = ModelGraph.from_dict({"units": units})
    sizes = {"vision": UnitSizes(), "llm": UnitSizes(tensor_parallel_size=4)}
    plan = plan_colocated(graph, sizes=sizes, world_size=NUM_RANKS)
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    predictor = StepPredictor(ScheduleCache(graph, plan, BUILDERS["dip"]), cluster, VOCAB_SIZE)
    options = BalanceOptions(micro_batch_size=MICRO_BATCH_SIZE, vocab_size=VOCAB_SIZE, ranks_per_node=RANKS_PER_NODE)
    found: dict[str, list[tuple[float, ...]]] = {}
    for lengths in draw_length_batches(samples, batch_size=GLOBAL_BATCH_SIZE, num_batches=num_batches, seed=0):
        work, ids = BatchWork(graph, lengths, options), [sample.sample_id for sample in lengths]
        for name in BALANCERS_SHOWN:
            assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
            for source, num_decoding in (("index", 0), ("decode", NUM_RANKS)):
                arrangement = NodeArrangement(RANKS_PER_NODE, num_decoding_ranks=num_decoding)
                arranged, sent = arrangement.arrange(assignment, work, plan=plan, sample_ids=ids)
                seconds = [each.seconds for each in predictor.predict_each((assignment, arranged), lengths)]
                row = sent.before / 1e6, sent.after / 1e6, *seconds
                found.setdefault(f"{name}, {source}", []).append(row)
    columns = ("mb_before", "mb_after", "seconds_before", "seconds_after")
    return {name: dict(zip(columns, map(statistics.fmean, zip(*rows, strict=True)), strict=True)) for name, rows in found.items()}


def main(argv: Sequence[str]) -> None:
    """Measure and print; also print whether the claim holds."""
    given = build_parser(__doc__, num_batches=1).parse_args(argv)
    rows = {
        name: measure(samples, num_batches=given.num_batches)
        for name, samples in read_lengths(given.lengths).items()
        if any(sample.items for sample in samples)
    }
    holds = all(
        row[f"orchmllm, {source}"]["mb_after"] < row[f"orchmllm, {source}"]["mb_before"]
        for row in rows.values()
        for source in ("index", "decode")
    )
    if given.json:
        print(json.dumps({"rows": rows, "holds": holds}))
        return
    columns = list(next(iter(rows.values())))
    table = Table("lengths", *columns, title="MB between nodes without > with (seconds of a step)", box=None)
    for name, row in rows.items():
        shown = (row[column].values() for column in columns)
        table.add_row(name, *(f"{mb:.0f} > {after:.0f} ({first:.3f} > {then:.3f} s)" for mb, after, first, then in shown))
    console = Console(width=170, highlight=False)
    console.print(table)
    console.print(f"rearrangement takes bytes from the network under orchmllm: {'holds' if holds else 'does not hold'}")


if __name__ == "__main__":
    main(sys.argv[1:])
