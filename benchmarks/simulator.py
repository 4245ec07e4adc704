"""Claim: one step of 3,072 GPUs is simulated in under 2 s on one core, and time grows linearly with the schedule.

The step is that of Optimus' largest model: ViT-22B and GPT-175B on 48 replicas x 8 pipeline stages x 8 tensor parallel ranks, 12
virtual stages (6 of the encoder) per rank and 16 microbatches, parameters gathered and gradients reduced. Every microbatch of
every replica takes a time of its own. `simulate_schedule` is timed as a whole: from a lowered schedule and costs (asked once per
action, looked up in a table) to times, bubbles and peaks of memory. Not timed: building and lowering the schedule, which a run
reuses from step to step, and the `Timeline`, which is made when it is asked for. The event kernel is also timed by itself, in
C++ and in Python. Seconds are of the processor, the best of `--repeats`.

Run `python benchmarks/simulator.py [--json] [--repeats N] [--small]`; the whole of it takes some minutes, most of them to build.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from multimodal.values.shape import StepShape

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from multimodal.cost.cluster import TransferCost
from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.references.simulate_events import simulate_events as simulate_events_reference
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.compile_schedule import compile_schedule
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.passes.reduce_by_layer import gather_parameters
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.simulate_events import simulate_events
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan

NUM_STAGES, TENSOR_PARALLEL_SIZE = 8, 8
CLAIMED_SECONDS = 2.0


@dataclass(frozen=True)
class Size:
    """The sizes that a schedule's length depends on."""

    num_replicas: int
    num_microbatches: int = 16
    """Per replica."""
    num_chunks: int = 12
    """Virtual stages of the LLM per pipeline stage; the encoder has half as many."""

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.num_replicas * NUM_STAGES * TENSOR_PARALLEL_SIZE


LARGEST = Size(48)
GROWTH = {
    "GPUs": (Size(3), Size(6), Size(12), Size(24), LARGEST),
    "microbatches": (Size(2, 16), Size(2, 32), Size(2, 64), Size(2, 128)),
    "virtual stages": (Size(2, 16, 2), Size(2, 16, 4), Size(2, 16, 12), Size(2, 16, 24)),
}


class StragglerCosts(ActionCosts):
    """Costs from a table: a computation's time is its stage's times a factor of its microbatch and replica."""

    def __init__(self, size: Size) -> None:
        draw = Random(0).uniform
        base = {"vision": 0.002, "llm": 0.012 * 12 / size.num_chunks}
        self.computed = {
            (kind, unit, replica, microbatch): ComputeCost(seconds := base[unit] * times * draw(0.8, 1.25), 0.15 * seconds)
            for unit in base
            for replica in range(size.num_replicas)
            for microbatch in range(size.num_microbatches)
            for kind, times in ((ActionKind.FORWARD, 1.0), (ActionKind.BACKWARD, 2.0))
        }
        self.sent = [TransferCost(10e-6, 250e-6, link) for link in range(size.num_replicas * NUM_STAGES)]

    def compute(self, action: Action) -> ComputeCost:
        """Cost of a computation."""
        return self.computed[action[0], action[1], action[2], action[4]]

    def transfer(self, send: Action) -> TransferCost:
        """Cost of a message, over the network card that its lane's node has for all lanes on it."""
        return self.sent[send[2] * NUM_STAGES + send[3] % NUM_STAGES]

    def collective_seconds(self, action: Action) -> float:
        """Seconds of a collective."""
        return 0.004

    def activation_bytes(self, place: Place) -> int:
        """Bytes that a place keeps."""
        return 1 << 28

    def static_bytes(self, lane: int) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return 1 << 34


@dataclass(frozen=True)
class Measurement:
    """Seconds of one size."""

    num_gpus: int
    num_microbatches: int
    num_chunks: int
    num_lanes: int
    num_actions: int
    build_seconds: float
    compile_seconds: float
    kernel_seconds: float
    reference_seconds: float
    simulate_seconds: float

    @property
    def rates(self) -> dict[str, float]:
        """Actions per second of the kernel in C++ and in Python, and of the whole simulation."""
        return {
            "cpp_actions_per_second": self.num_actions / self.kernel_seconds,
            "python_actions_per_second": self.num_actions / self.reference_seconds,
            "simulated_actions_per_second": self.num_actions / self.simulate_seconds,
        }


def build_case(size: Size) -> StepShape:
    """ViT-22B and GPT-175B, colocated: one layer per virtual stage where there are 12."""
    chunks = {"vision": max(1, size.num_chunks // 2), "llm": size.num_chunks}
    shapes = {
        "vision": Transformer(chunks["vision"] * NUM_STAGES, 6144, 48, 24576),
        "llm": Transformer(chunks["llm"] * NUM_STAGES, 12288, 96, 49152),
    }
    roles = {"vision": Role.ENCODER, "llm": Role.BACKBONE}
    graph = ModelGraph(tuple(Unit(name, roles[name], shape) for name, shape in shapes.items()), (("vision", "llm"),))
    plan = Plan({name: _unit_plan(size.num_replicas, num_chunks) for name, num_chunks in chunks.items()})
    samples = [
        [replica * size.num_microbatches + index for index in range(size.num_microbatches)]
        for replica in range(size.num_replicas)
    ]
    placed = {
        name: tuple(tuple((Atom(sample, item),) for sample in row) for row in samples)
        for name, item in (("vision", 0), ("llm", -1))
    }
    return Assignment(placed).shape(graph, plan)


def _unit_plan(num_replicas: int, num_chunks: int) -> UnitPlan:
    """Chunks are dealt to the stages in turn; the first and the last one also hold the embedding and the head."""
    num_layers = num_chunks * NUM_STAGES
    ranges = [(layer + (layer > 0), layer + 2 + (layer == num_layers - 1)) for layer in range(num_layers)]
    return UnitPlan(
        tuple(
            Replica(
                tuple(
                    Stage(_ranks(stage * num_replicas + replica), tuple(ranges[stage::NUM_STAGES])) for stage in range(NUM_STAGES)
                )
            )
            for replica in range(num_replicas)
        ),
        TENSOR_PARALLEL_SIZE,
    )


def _ranks(lane: int) -> tuple[int, ...]:
    return tuple(range(lane * TENSOR_PARALLEL_SIZE, (lane + 1) * TENSOR_PARALLEL_SIZE))


def measure(size: Size, *, repeats: int) -> Measurement:
    """Build one schedule and time its simulation."""
    start = time.perf_counter()
    schedule = gather_parameters(BUILDERS["interleaved-1f1b"](build_case(size)))
    schedule = insert_communication(schedule)
    build_seconds = time.perf_counter() - start
    costs = StragglerCosts(size)
    arrays = compile_schedule(schedule).with_costs(costs).arrays
    return Measurement(
        size.num_gpus,
        size.num_microbatches,
        size.num_chunks,
        schedule.num_lanes,
        len(schedule.pieces),
        build_seconds,
        _best(lambda: compile_schedule(schedule).with_costs(costs), repeats),
        _best(lambda: simulate_events(arrays), repeats),
        _best(lambda: simulate_events_reference(**vars(arrays)), 1),
        _best(lambda: simulate_schedule(schedule, costs), repeats),
    )


def _best(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def show(title: str, measured: list[Measurement], console: Console) -> None:
    """Print one growth table."""
    columns = (
        "GPUs",
        "microb.",
        "V",
        "actions",
        "build s",
        "compile s",
        "C++ s",
        "whole s",
        "C++ M/s",
        "Python M/s",
        "whole M/s",
    )
    table = Table(*columns, title=f"growth with {title}")
    for each in measured:
        seconds = (each.build_seconds, each.compile_seconds, each.kernel_seconds, each.simulate_seconds)
        counts = (each.num_gpus, each.num_microbatches, each.num_chunks, each.num_actions)
        table.add_row(
            *map(str, counts), *(f"{value:.3f}" for value in seconds), *(f"{rate / 1e6:.2f}" for rate in each.rates.values())
        )
    console.print(table)


def main() -> None:
    """Measure, print, and say whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--repeats", type=int, default=3, help="take the best of so many runs")
    parser.add_argument("--small", action="store_true", help="leave sizes above 512 GPUs out, and the claim with them")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"claimed_seconds": CLAIMED_SECONDS}
    console = Console(width=130)
    for title, sizes in GROWTH.items():
        kept = [size for size in sizes if size.num_gpus <= 512 or not arguments.small]
        measured = [measure(size, repeats=arguments.repeats) for size in kept]
        result[title] = [asdict(each) | each.rates for each in measured]
        if not arguments.json:
            show(title, measured, console)
    if not arguments.small:
        result["seconds"] = result["GPUs"][-1]["simulate_seconds"]
        result["holds"] = result["seconds"] < CLAIMED_SECONDS
        if not arguments.json:
            verdict = "holds" if result["holds"] else "does not hold"
            console.print(f"{LARGEST.num_gpus} GPUs: {result['seconds']:.2f} s, claimed < {CLAIMED_SECONDS} s: {verdict}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
