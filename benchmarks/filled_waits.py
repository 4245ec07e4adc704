"""Claim: segments of an encoder that run inside the LLM's waits for tensor parallel collectives take the waits' time, not more.

Four processes train an LLM (tp 2, pp 2) and an encoder (a replica of tp 2 on each stage's ranks): real layers, real collectives
and messages of gloo, real gradients. Both schedules are 1F1B; in the filled one, ranges of the encoder's segments stand in waits
of LLM computations around them, drawn at random. Steps of both take turns; shown are medians.

Where collectives come as quickly as gloo brings them, four processes that share two cores have no idle time to fill: an unfilled
wait of one is computing time of another. So collectives are also held back, as a slower link would, until some milliseconds after
their start; what only waits costs no core, as on an accelerator.

python benchmarks/filled_waits.py [--json] [--iterations N]
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron.runtime.emulation.emulated_run import run_on_ranks
from multimodal.cost.run_options import RunOptions
from multimodal.model import collectives
from multimodal.model.collectives import Arriving, RankLink
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.schedule import SlotMode
from tests.distributed.gradient_case import GradientCase, build_session, plan_case
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.schedule_rewrites import RunInsideWaits

NUM_SAMPLES, PATCHES_PER_SIDE, NUM_TEXT_TOKENS = 8, 8, 16
HELD_MILLISECONDS = (0, 10, 20)


class HeldWork(NamedTuple):
    """A collective under way over a slow link."""

    work: dist.Work
    ready_at: float

    def wait(self) -> None:
        """Wait for it, and until the link has brought it."""
        self.work.wait()
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))


def hold_back(seconds: float) -> None:
    """Let tensor parallel collectives last at least so long."""
    for name in ("start_gathering", "start_summing"):
        start = getattr(RankLink, name)

        def started(link: RankLink, tensor: Tensor, *, start: Any = start) -> Arriving:
            arriving = start(link, tensor)
            works = tuple(HeldWork(work, time.perf_counter() + seconds) for work in arriving.works)
            return Arriving(arriving.tensor, works)  # type: ignore[arg-type]

        setattr(collectives.RankLink, name, started)


def build_case() -> GradientCase:
    """One image before each text."""
    shape = {"num_layers": 4, "num_attention_heads": 4}
    image = {"patch_size": 4, "in_channels": 3, "merge_size": 2}
    units = {
        "vision": {"role": "encoder", "image": image, "hidden_size": 64, "ffn_hidden_size": 128, **shape},
        "llm": {"role": "backbone", "hidden_size": 64, "ffn_hidden_size": 128, **shape},
    }
    graph = ModelGraph.from_dict({"units": units})
    pairs = ((0, 1), (2, 3))
    plan = Plan(
        {
            "vision": UnitPlan(tuple(Replica((Stage(pair, ((0, 6),)),)) for pair in pairs), 2),
            "llm": UnitPlan((Replica((Stage(pairs[0], ((0, 3),)), Stage(pairs[1], ((3, 6),)))),), 2),
        }
    )
    side = PATCHES_PER_SIDE // 2
    shapes = tuple(SampleShape((("vision", side, side),), NUM_TEXT_TOKENS, NUM_TEXT_TOKENS // 2) for _ in range(NUM_SAMPLES))
    encoded = [[[(sample, 0)] for sample in range(replica, NUM_SAMPLES, 2)] for replica in range(2)]
    assignment = Assignment.from_dict({"vision": encoded, "llm": [[[(sample, -1)] for sample in range(NUM_SAMPLES)]]})
    return GradientCase(graph, plan, assignment, RandomSource(graph, shapes, 512))


def measure(held_seconds: float, num_iterations: int, *, rank: int) -> dict[str, float]:
    """Return the median seconds of a step, unfilled and filled, and how much runs inside."""
    if held_seconds:
        hold_back(held_seconds)
    case = build_case()
    inside = RunInsideWaits(1, RunOptions(transformer_impl="local", sequence_parallel=False))
    session = build_session(case)
    steps = {"unfilled": plan_case(case), "filled": plan_case(replace(case, passes=(inside,)))}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for iteration in range(num_iterations + 1):
        for name, step in steps.items():
            session.zero_gradients()
            dist.barrier()
            start = time.perf_counter()
            session.executor.execute(step, is_training=True)
            session.finish_gradients()
            dist.barrier()
            if iteration:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    modes = steps["filled"].schedule.modes
    inside_share = float((modes == SlotMode.INSIDE).sum() / len(modes))
    return {"inside_share": inside_share, **{name: statistics.median(found) for name, found in seconds.items()}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=10, help="steps of each schedule")
    arguments = parser.parse_args()
    rows = [
        {"held_ms": held, **run_on_ranks(measure, held / 1000, arguments.iterations, num_ranks=4)} for held in HELD_MILLISECONDS
    ]
    if arguments.json:
        print(json.dumps(rows))
        return
    table = Table("collectives held back (ms)", "unfilled (s)", "filled (s)", "filled / unfilled")
    for row in rows:
        ratio = row["filled"] / row["unfilled"]
        table.add_row(str(row["held_ms"]), f"{row['unfilled']:.3f}", f"{row['filled']:.3f}", f"{ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
