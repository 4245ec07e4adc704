"""Claim: encoders in the LLM's bubbles and waits make a step as much shorter on real processes as simulation says.

8 and 16 ranks: an LLM of 4 or 8 stages over two tensor parallel ranks each, and an encoder of half as many layers. Compared are
the builder `optimus`, which fills bubbles between the LLM's computations and the waits inside them, `1f1b` and `dip`, all three
on the same plan (an encoder pipeline on each stage's ranks over both, or one on each rank, whichever is simulated to be shorter),
and `1f1b` on the best disaggregated plan: the encoder on 2, 4, ... ranks of its own, over one or two tensor parallel ranks.
Computations and the waits inside them are timed; processes, messages, reductions are real. They take turns, five steps each;
shown are medians, and how busy the machine was.

Run `python benchmarks/emulated_filling.py [--json] [--iterations N] [--ranks 8,16] [--seconds S]`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from megatron.runtime.emulation.emulated_run import EmulatedRun, emulate
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.schedule import Schedule, SlotMode

OPTIONS = RunOptions(transformer_impl="local", sequence_parallel=False)
LAYERS_PER_STAGE, ENCODER_LAYERS_PER_STAGE, MICROBATCHES_PER_STAGE = 2, 1, 3
NUM_PATCHES, NUM_TEXT_TOKENS = 1024, 256
WAITING = 0.2
"""Approximate share of the LLM's computations in which it waits; the speed of the link between its ranks is chosen for it."""


STEPS_AT_A_TIME = 5
"""Steps of a schedule in processes that are started for them; then the next schedule takes its turn."""


@dataclass(frozen=True)
class EmulatedCosts(ModelCosts):
    """Costs of a step whose gradients are reduced in no time, since emulated layers have one weight each."""

    def collective_seconds(self, action: Action) -> float:
        """Return 0: reductions take no time."""
        return 0.0


class Candidate(NamedTuple):
    """A schedule that is compared."""

    schedule: Schedule
    assignment: Assignment
    costs: ModelCosts
    simulated_seconds: float


@dataclass(frozen=True)
class Case:
    """The model, its samples, and a machine of `num_ranks` ranks."""

    num_ranks: int
    tflops: float

    @property
    def num_stages(self) -> int:
        """Return the number of the LLM's stages if encoders share its ranks."""
        return self.num_ranks // 2

    @property
    def num_samples(self) -> int:
        """Return the number of samples: one per microbatch."""
        return MICROBATCHES_PER_STAGE * self.num_stages

    @property
    def graph(self) -> ModelGraph:
        """Return a model of an encoder and an LLM."""
        shape = {"hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 4096, "activation": "gelu"}
        image = {"patch_size": 2, "in_channels": 3, "merge_size": 2}
        units = {
            "vision": {"role": "encoder", "image": image, "num_layers": ENCODER_LAYERS_PER_STAGE * self.num_stages, **shape},
            "llm": {"role": "backbone", "num_layers": LAYERS_PER_STAGE * self.num_stages, **shape},
        }
        return ModelGraph.from_dict({"units": units})

    @property
    def cluster(self) -> Cluster:
        """Return nodes of two ranks with fast links between nodes; links inside are slow enough for the LLM to wait."""
        work = 2.0 * 12 * 1024**2 / 2  # FLOPs of a layer per token on each of two ranks
        per_token = WAITING / (1 - WAITING) * work / (self.tflops * 1e12) / 2
        return Cluster(2, self.tflops, 80.0, NodeLink(2 * 1024 / per_token / 1e9, 0.0), Network(1e3, 1.0, 1), efficiency=1.0)

    def candidate(self, plan: Plan, builder: str) -> Candidate:
        """Build a schedule and simulate it."""
        samples = range(self.num_samples)
        count = plan.units["vision"].data_parallel_size
        encoded = [[[(sample, 0)] for sample in samples if sample % count == replica] for replica in range(count)]
        assignment = Assignment({"vision": encoded, "llm": [[[(sample, -1)] for sample in samples]]})
        shape = assignment.shape(self.graph, plan)
        items = (ItemLengths("vision", NUM_PATCHES, NUM_PATCHES // 4),)
        lengths = [SampleLengths(sample, items, NUM_TEXT_TOKENS, NUM_TEXT_TOKENS) for sample in samples]
        costs = EmulatedCosts(shape, assignment, lengths, self.cluster, 128, OPTIONS)
        schedule = build_schedule(BUILDERS[builder].with_costs(costs), shape, costs=costs)
        return Candidate(schedule, assignment, costs, simulate_schedule(schedule, costs).iteration_seconds)

    def candidates(self) -> dict[str, Candidate]:
        """Return the best candidate of every kind."""
        colocated, disaggregated = list(self._colocated()), list(self._disaggregated())
        optimus = {size: self.candidate(plan, "optimus") for size, plan in enumerate(colocated)}
        best = min(optimus, key=lambda size: optimus[size].simulated_seconds)
        apart = min((self.candidate(plan, "1f1b") for plan in disaggregated), key=lambda found: found.simulated_seconds)
        same = {name: self.candidate(colocated[best], name) for name in ("1f1b", "dip")}
        return {"optimus": optimus[best], **same, "disaggregated": apart}

    def _colocated(self) -> Iterator[Plan]:
        for size in (1, 2):
            groups = [tuple(range(first, first + size)) for first in range(0, self.num_ranks, size)]
            encoder = tuple(Replica((Stage(group, ((0, self._num_layers("vision")),)),)) for group in groups)
            yield Plan({"vision": UnitPlan(encoder, size), "llm": self._llm(0)})

    def _disaggregated(self) -> Iterator[Plan]:
        for count in range(2, self.num_ranks - 1, 2):
            for size in (1, 2):
                groups = [tuple(range(first, first + size)) for first in range(0, count, size)]
                encoder = tuple(Replica((Stage(group, ((0, self._num_layers("vision")),)),)) for group in groups)
                yield Plan({"vision": UnitPlan(encoder, size), "llm": self._llm(count)})

    def _llm(self, first_rank: int) -> UnitPlan:
        num_layers, num_stages = self._num_layers("llm"), (self.num_ranks - first_rank) // 2
        bounds = [0, *(1 + round(index * (num_layers - 2) / num_stages) for index in range(1, num_stages)), num_layers]
        ranks = [(first, first + 1) for first in range(first_rank, self.num_ranks, 2)]
        stages = tuple(Stage(pair, (bound,)) for pair, bound in zip(ranks, pairwise(bounds), strict=True))
        return UnitPlan((Replica(stages),), 2)

    def _num_layers(self, unit: str) -> int:
        return len(self.graph.unit(unit).layers)


def scaled_case(num_ranks: int, seconds: float) -> Case:
    """Return a case whose machine is so slow that 1F1B takes about `seconds`."""
    one = Case(num_ranks, 1.0).candidates()["1f1b"].simulated_seconds
    return Case(num_ranks, one / seconds)


def busy_share(before: tuple[int, int]) -> float:
    """Return the share of all cores' time that was used since `before`."""
    busy, total = (now - then for now, then in zip(cpu_time(), before, strict=True))
    return busy / max(1, total)


def cpu_time() -> tuple[int, int]:
    """Return used and passed ticks of all cores."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def measure(num_ranks: int, *, seconds: float, num_iterations: int) -> dict[str, Any]:
    """Return the simulated and the median measured seconds of all kinds, which run in turns."""
    found = scaled_case(num_ranks, seconds).candidates()
    measured: dict[str, list[float]] = {name: [] for name in found}
    before = cpu_time()
    for _ in range(0, num_iterations, STEPS_AT_A_TIME):
        for name, each in found.items():
            timelines = emulate(EmulatedRun(each.schedule, each.assignment, each.costs, num_iterations=STEPS_AT_A_TIME))
            measured[name] += [timeline.duration_seconds for timeline in timelines]
    rows = {name: _row(each, measured[name], found["optimus"], measured["optimus"]) for name, each in found.items()}
    return {"num_ranks": num_ranks, "cores_busy": busy_share(before), "load": os.getloadavg()[1], "rows": rows}


def _row(each: Candidate, seconds: list[float], best: Candidate, best_seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "encoder": f"tp {each.schedule.shape.plan.units['vision'].tensor_parallel_size} x dp "
        f"{each.schedule.shape.plan.units['vision'].data_parallel_size}",
        "inside": int((each.schedule.modes == SlotMode.INSIDE).sum()),
        "simulated": each.simulated_seconds,
        "measured": median,
        "measured_over_simulated": median / each.simulated_seconds,
        "optimus_over_it": statistics.median(best_seconds) / median,
        "optimus_over_it_simulated": best.simulated_seconds / each.simulated_seconds,
    }


def print_table(results: list[Mapping[str, Any]]) -> None:
    """Print a table of all results."""
    table = Table("ranks", "schedule", "encoder", "inside", "simulated", "measured", "of simulated", "optimus of it", "simulated")
    for found in results:
        for name, row in found["rows"].items():
            table.add_row(
                str(found["num_ranks"]),
                name,
                row["encoder"],
                str(row["inside"]),
                f"{row['simulated']:.3f} s",
                f"{row['measured']:.3f} s",
                f"{row['measured_over_simulated']:.3f}",
                f"{row['optimus_over_it']:.3f}",
                f"{row['optimus_over_it_simulated']:.3f}",
            )
        table.add_section()
    console = Console(width=140, highlight=False)
    console.print(table)
    for found in results:
        console.print(f"{found['num_ranks']} ranks: cores {found['cores_busy']:.0%} busy, load {found['load']:.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=10, help="steps of each schedule")
    parser.add_argument("--ranks", default="8,16", help="numbers of ranks")
    parser.add_argument("--seconds", type=float, default=12.0, help="simulated seconds of a step under 1f1b")
    parser.add_argument("--simulate-only", action="store_true", help="print simulated seconds alone")
    given = parser.parse_args()
    counts = [int(count) for count in given.ranks.split(",")]
    if given.simulate_only:
        for count in counts:
            cases = scaled_case(count, given.seconds).candidates()
            print(count, {name: round(each.simulated_seconds, 3) for name, each in cases.items()})
        return
    run = partial(measure, seconds=given.seconds, num_iterations=given.iterations)
    results = [run(count) for count in counts]
    if given.json:
        print(json.dumps(results))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
