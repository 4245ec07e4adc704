"""Claim: encoder work inside the LLM's waits for tensor parallel ranks takes on real processes the time that simulation says.

Eight ranks run an LLM of four stages, each over two tensor parallel ranks, under 1F1B; every rank has an encoder replica as well.
Half of the encoders' forwards, and of their backwards, run in segments: right before some of the LLM's computations (`in line`),
or inside the waits of these, one segment in each wait (`inside`). Computations and waits are timed; processes, messages and
reductions are real. Printed are the simulated and the median measured seconds of both.

Run `python benchmarks/emulated_waits.py [--json] [--iterations N] [--scale SECONDS]`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.emulated_schedules import LayerCosts, build_graph
from megatron.runtime.emulation.emulated_run import EmulatedRun, emulate
from multimodal.cost.step_costs import ComputeCost
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, Place, SegmentRange
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.schedule import NO_WAIT, Lane, Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape

NUM_STAGES, TENSOR_PARALLEL_SIZE, NUM_WAITS = 4, 2, 4
NUM_RANKS = NUM_STAGES * TENSOR_PARALLEL_SIZE
NUM_MICROBATCHES = 2 * NUM_RANKS
"""Number of the LLM's microbatches: two for each encoder replica."""
WAITING = 0.3
"""Share of the LLM's computations in which it waits for its tensor parallel ranks."""
NUM_CARRIERS = 4
"""Number of the LLM's first forwards and of its last backwards on every rank whose waits an encoder's computation fills."""
NUM_SEGMENTS = NUM_CARRIERS * NUM_WAITS
"""Number of segments of an encoder with two layers: one for each wait."""


@dataclass(frozen=True)
class WaitingCosts(LayerCosts):
    """Costs in which the LLM waits in equal parts; a segment takes as long as one of them."""

    def compute(self, action: Action) -> ComputeCost:
        """Return the cost of two layers per stage; a backward takes as long as two forwards."""
        seconds = 2 * self.layer_seconds * (2 if action.kind is ActionKind.BACKWARD else 1)
        wait = WAITING * seconds / NUM_WAITS
        if action.unit == "llm":
            return ComputeCost(seconds, WAITING * seconds, (wait,) * NUM_WAITS)
        return ComputeCost(wait * (NUM_SEGMENTS if action.covers is None else 1))


def build_step() -> tuple[StepShape, Assignment]:
    """Return a step with one encoder replica per rank; microbatch m of the LLM has an image of replica m mod 8."""
    graph = build_graph({"vision": 2, "llm": 2 * NUM_STAGES})
    bounds = [0, *range(3, 2 * NUM_STAGES, 2), 2 * NUM_STAGES + 2]
    stages = enumerate(pairwise(bounds))
    llm = [Stage((2 * stage, 2 * stage + 1), (layers,)) for stage, layers in stages]
    plan = {
        "vision": UnitPlan(tuple(Replica((Stage((rank,), ((0, 4),)),)) for rank in range(NUM_RANKS))),
        "llm": UnitPlan((Replica(tuple(llm)),), TENSOR_PARALLEL_SIZE),
    }
    encoded = tuple(((Atom(rank, 0),), (Atom(NUM_RANKS + rank, 0),)) for rank in range(NUM_RANKS))
    microbatches = tuple((Atom(sample),) for sample in range(NUM_MICROBATCHES))
    assignment = Assignment({"vision": encoded, "llm": (microbatches,)})
    return assignment.shape(graph, Plan(plan)), assignment


def build_schedule(shape: StepShape, mode: SlotMode) -> Schedule:
    """Build 1F1B with the second forward and first backward of every encoder before, or inside, computations of the LLM."""
    schedule = Schedule.of_lanes(shape, (Lane((rank,), tuple(_lane(rank, mode))) for rank in range(NUM_RANKS)))
    lowered = insert_communication(schedule)
    validate_schedule(lowered)
    return lowered


def _lane(rank: int, mode: SlotMode) -> Iterator[Slot]:
    stage = rank // TENSOR_PARALLEL_SIZE
    first, second = (Place("vision", rank, 0, microbatch) for microbatch in (0, 1))
    carried = {
        **dict(zip(range(NUM_CARRIERS), _segments(ActionKind.FORWARD, second, mode), strict=True)),
        **dict(zip(range(-NUM_CARRIERS, 0), _segments(ActionKind.BACKWARD, first, mode), strict=True)),
    }
    yield Slot(Action(ActionKind.FORWARD, *first))
    for action in _one_f_one_b(stage):
        is_forward = action.kind is ActionKind.FORWARD
        yield from carried.get(action.microbatch - (0 if is_forward else NUM_MICROBATCHES), ())
        yield Slot(action)
    yield Slot(Action(ActionKind.BACKWARD, *second))
    yield Slot(Action(ActionKind.REDUCE_GRADIENTS, "llm", 0, stage))
    yield Slot(Action(ActionKind.REDUCE_GRADIENTS, "vision", rank, 0))


def _one_f_one_b(stage: int) -> list[Action]:
    kinds = ActionKind.FORWARD, ActionKind.BACKWARD
    forwards, backwards = ([Action(kind, "llm", 0, stage, m) for m in range(NUM_MICROBATCHES)] for kind in kinds)
    num_ahead = NUM_STAGES - stage - 1
    in_turn = chain.from_iterable(zip(forwards[num_ahead:], backwards, strict=False))
    return [*forwards[:num_ahead], *in_turn, *backwards[NUM_MICROBATCHES - num_ahead :]]


def _segments(kind: ActionKind, place: Place, mode: SlotMode) -> list[list[Slot]]:
    """Return the segments that run before each carrier, one for each of its waits."""
    ranges = [SegmentRange(first, first + 1) for first in range(NUM_SEGMENTS)]
    in_order = ranges if kind is ActionKind.FORWARD else ranges[::-1]
    slots = [
        Slot(Action(kind, *place, covers=covers), mode, index % NUM_WAITS if mode is SlotMode.INSIDE else NO_WAIT)
        for index, covers in enumerate(in_order)
    ]
    return [slots[first : first + NUM_WAITS] for first in range(0, NUM_SEGMENTS, NUM_WAITS)]


def measure(*, layer_seconds: float, num_iterations: int) -> dict[str, dict[str, float]]:
    """Return the simulated and the median measured seconds in line and inside."""
    (shape, assignment), rows = build_step(), {}
    costs = WaitingCosts(shape.plan, layer_seconds)
    for name, mode in (("in line", SlotMode.IN_LINE), ("inside", SlotMode.INSIDE)):
        schedule = build_schedule(shape, mode)
        simulated = simulate_schedule(schedule, costs)
        run = EmulatedRun(schedule, assignment, costs, num_iterations)
        measured = statistics.median(each.duration_seconds for each in emulate(run))
        rows[name] = {
            "simulated": simulated.iteration_seconds,
            "measured": measured,
            "ratio": measured / simulated.iteration_seconds,
            "tp_bubble": simulated.bubble["tp"],
        }
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--iterations", type=int, default=3, help="measured steps")
    parser.add_argument("--scale", type=float, default=0.08, help="seconds of a layer's forward")
    given = parser.parse_args()
    rows: dict[str, Any] = measure(layer_seconds=given.scale, num_iterations=given.iterations)
    if given.json:
        print(json.dumps(rows))
        return
    print(f"{'encoder work':<14}{'simulated s':>13}{'measured s':>13}{'ratio':>9}{'tp bubble':>12}")
    for name, row in rows.items():
        print(f"{name:<14}{row['simulated']:>13.4f}{row['measured']:>13.4f}{row['ratio']:>9.3f}{row['tp_bubble']:>12.3f}")
    gains = [1 - rows["inside"][key] / rows["in line"][key] for key in ("simulated", "measured")]
    print(f"inside the waits, the step is {100 * gains[0]:.1f} % shorter in simulation, {100 * gains[1]:.1f} % measured")


if __name__ == "__main__":
    main()
