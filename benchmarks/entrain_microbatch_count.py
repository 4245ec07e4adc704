"""Claim: Entrain's assignment is no slower with all the requested microbatches than with fewer, even ones (its K_eff).

Batches of 512 samples from each lengths file (see `microbatch_assignment.py`) go to 4 replicas of 32 microbatches; the encoder
has 2 pipeline stages and the LLM 6, all with the same work on average, and a backward takes twice its forward. Entrain lowers
32 to K_eff where one sample would dominate a microbatch; `at least 8` and `at least 16` stop it there. Schedules are built and
simulated as in a run: 1F1B, or eager 1F1B with split backwards. The table has the slowest replica's time over the ideal one
(all stages busy all the time), averaged over batches.

Run `python benchmarks/entrain_microbatch_count.py [--json] [--lengths DIR] [--batches N]`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.microbatch_assignment import DEFAULT_LENGTHS, Groups, Loads, Pool, generate_pools, group_samples, read_pools
from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers

NUM_SAMPLES, NUM_REPLICAS, NUM_MICROBATCHES = 512, 4, 32
NUM_STAGES = {"vision": 2, "llm": 6}
LEAST_COUNTS: Mapping[str, int | None] = {"K kept": None, "at least 16": 16, "at least 8": 8, "K_eff": 1}


def build_model() -> tuple[ModelGraph, Plan]:
    """An encoder and an LLM on a rank per stage, one replica of each."""
    shape = Transformer(8, 8, 2, 16)
    graph = ModelGraph((Unit("vision", Role.ENCODER, shape), Unit("llm", Role.BACKBONE, shape)), (("vision", "llm"),))
    units, rank = {}, 0
    for name, num_stages in NUM_STAGES.items():
        ranges = split_layers(graph.unit(name).layers, num_stages=num_stages)
        units[name] = UnitPlan((Replica(tuple(Stage((rank + index,), (each,)) for index, each in enumerate(ranges))),))
        rank += num_stages
    return graph, Plan(units)


def simulate_replica(
    encoder: Loads, llm: Loads, *, encoder_microbatches: Groups, llm_microbatches: Groups, builder: str, splits: bool
) -> float:
    """Return the seconds that one replica takes for its microbatches."""
    encoded = [[Atom(sample, 0) for sample in members if encoder[sample] > 0] for members in encoder_microbatches]
    assignment = Assignment(
        {
            "vision": (tuple(tuple(atoms) for atoms in encoded if atoms),),
            "llm": (tuple(tuple(Atom(sample) for sample in members) for members in llm_microbatches),),
        }
    )

    graph, plan = build_model()

    def seconds(action: Action) -> float:
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            return 0.0
        place = action.microbatch_place
        atoms = assignment.atoms(place) if action.subset < 0 else assignment.subsets(graph, place)[action.subset]
        loads = llm if action.unit == "llm" else encoder
        return sum(loads[atom.sample_id] for atom in atoms) * (1 if action.kind is ActionKind.FORWARD else 2)

    schedule = BUILDERS[builder](assignment.shape(graph, plan))
    if splits:
        schedule = split_backward(schedule)
    return execute_lanes(schedule, seconds=np.array(list(map(seconds, schedule.work.computed)))).duration_seconds


def measure(pool: Pool, *, num_batches: int) -> dict[str, float]:
    """Return column -> time over the ideal time."""
    generator = np.random.default_rng(0)
    num_samples = min(NUM_SAMPLES, len(pool.llm))
    found: dict[str, list[float]] = {}
    for _ in range(num_batches):
        batch = generator.choice(len(pool.llm), num_samples, replace=False)
        encoder, llm = (loads[batch] * num_samples / loads[batch].sum() for loads in (pool.encoder, pool.llm))
        ideal = 3 * num_samples / NUM_REPLICAS

        def slowest(replicas: Sequence[tuple[Groups, Groups]], builder: str, encoder: Loads = encoder, llm: Loads = llm) -> float:
            splits = builder == "eager-1f1b"
            return max(
                simulate_replica(
                    encoder, llm, encoder_microbatches=each[0], llm_microbatches=each[1], builder=builder, splits=splits
                )
                for each in replicas
            )

        in_order = [np.array_split(part, NUM_MICROBATCHES) for part in np.array_split(np.arange(num_samples), NUM_REPLICAS)]
        groups = [[members.tolist() for members in replica] for replica in in_order]
        found.setdefault("in order, 1f1b", []).append(slowest([(each, each) for each in groups], "1f1b") / ideal)
        for name, least in LEAST_COUNTS.items():
            placed = assign_entrain(
                llm,
                encoder_loads=encoder,
                num_replicas=NUM_REPLICAS,
                num_microbatches=NUM_MICROBATCHES,
                min_num_microbatches=least,
            )
            replicas = group_samples(placed)
            for builder in ("1f1b", "eager-1f1b"):
                found.setdefault(f"{name}, {builder}", []).append(slowest(replicas, builder) / ideal)
    return {name: float(np.mean(each)) for name, each in found.items()}


def main() -> None:
    """Simulate and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--lengths", type=Path, help="folder of lengths files; default: see above")
    parser.add_argument("--batches", type=int, default=2, help="per lengths file")
    arguments = parser.parse_args()
    folder = arguments.lengths or (DEFAULT_LENGTHS if DEFAULT_LENGTHS.is_dir() else None)
    pools = (read_pools(folder) if folder else {}) | generate_pools(np.random.default_rng(0))
    rows = {name: measure(pool, num_batches=arguments.batches) for name, pool in pools.items() if pool.encoder.any()}
    holds = all(
        row[f"K kept, {builder}"] <= row[f"K_eff, {builder}"] for row in rows.values() for builder in ("1f1b", "eager-1f1b")
    )
    if arguments.json:
        print(json.dumps({"time_over_ideal": rows, "holds": holds}))
        return
    columns = list(next(iter(rows.values())))
    table = Table("lengths", *columns, title="time over ideal time")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in columns))
    console = Console(width=150)
    console.print(table)
    console.print(f"K kept is no slower than K_eff: {'holds' if holds else 'does not hold'}")


if __name__ == "__main__":
    main()
