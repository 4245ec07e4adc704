"""Claim: segments of an encoder that run inside the LLM's waits for tensor parallel collectives take the waits' time, not more.

Four processes train an LLM (tp 2, pp 2) and an encoder (a replica on each rank): real layers, real collectives and messages of
gloo, real gradients. `1f1b` runs the encoder between the LLM's computations, `optimus` also inside them, where its durations say.
Steps of both take turns; shown are medians. `--figure` draws a step of each, as measured.

Where collectives are as quick as gloo itself, four processes that share two cores have no idle time to fill: one process computes
while another waits. So collectives are also held back until some milliseconds after their start, as a slower link would do;
waiting needs no core, as on an accelerator.

python benchmarks/filled_waits.py [--json] [--iterations N] [--held MILLISECONDS,...] [--figure PATH]
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron.runtime.emulation.emulated_run import TIMEOUT, run_on_ranks
from megatron.runtime.execution.step_clock import gather_timeline
from megatron.runtime.feed.step_planner import StepOptions, plan_step
from megatron.runtime.session import Session, SessionOptions
from megatron.runtime.step.step import Step
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.cost.run_options import RunOptions
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.model import collectives
from multimodal.model.collectives import Arriving, RankLink
from multimodal.model.transformer_config import BuildOptions
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.draw import draw_timelines
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.schedule import SlotMode
from multimodal.values.timeline import Timeline

NUM_SAMPLES, PATCHES_PER_SIDE, NUM_TEXT_TOKENS, VOCAB_SIZE = 8, 16, 32, 512
HELD_MILLISECONDS = (0, 10, 20)
TFLOPS = 0.003
"""Speed of a core in such small layers, for the predicted durations that `optimus` uses."""
LEAST_MILLISECONDS = 0.5
"""Milliseconds of a collective of gloo that is not held back."""


class HeldWork(NamedTuple):
    """A collective in progress over a slow link."""

    work: dist.Work
    ready_at: float

    def wait(self) -> None:
        """Wait for the collective, and until the slow link would have finished it."""
        self.work.wait()
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))


def hold_back(seconds: float) -> None:
    """Make tensor parallel collectives take at least `seconds`."""
    for name in ("start_gathering", "start_summing"):
        start = getattr(RankLink, name)

        def started(link: RankLink, tensor: Tensor, *, start: Any = start) -> Arriving:
            arriving = start(link, tensor)
            works = tuple(HeldWork(work, time.perf_counter() + seconds) for work in arriving.works)
            return Arriving(arriving.tensor, works)  # type: ignore[arg-type]

        setattr(collectives.RankLink, name, started)


class Pictures:
    """Follows the SampleSource protocol: every sample is a picture of noise before a text of noise."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def lengths(self, index: int) -> SampleLengths:
        """Return the lengths of a sample; all samples have the same."""
        num_patches = PATCHES_PER_SIDE**2
        items = (ItemLengths("vision", num_patches, num_patches // 4),)
        return SampleLengths(index, items, NUM_TEXT_TOKENS, NUM_TEXT_TOKENS, (0,))

    def text(self, index: int) -> SampleText:
        """Return a text of noise; every token is a target."""
        num_outputs = self.lengths(index).items[0].num_output_tokens
        tokens = np.random.default_rng(index).integers(0, VOCAB_SIZE, size=(2, num_outputs + NUM_TEXT_TOKENS))
        return SampleText(tokens[0], tokens[1], np.arange(len(tokens[0])) >= num_outputs, ((0, 0, num_outputs),))

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Return a picture of noise."""
        drawn = np.random.default_rng((1, index)).standard_normal((PATCHES_PER_SIDE**2, 48))
        return ItemPixels(drawn.astype(np.float32), self.item_grid(index, item_index))

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """Return the grid of a square picture."""
        return PATCHES_PER_SIDE, PATCHES_PER_SIDE


def build_graph() -> ModelGraph:
    """Return a model whose units have four layers each."""
    shape = {"num_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "ffn_hidden_size": 256}
    image = {"patch_size": 4, "in_channels": 3, "merge_size": 2}
    units = {"vision": {"role": "encoder", "image": image, **shape}, "llm": {"role": "backbone", **shape}}
    return ModelGraph.from_dict({"units": units})


def build_plan() -> Plan:
    """Return a plan with the LLM on all four ranks, and an encoder on each rank."""
    stages = Stage((0, 1), ((0, 3),)), Stage((2, 3), ((3, 6),))
    encoders = tuple(Replica((Stage((rank,), ((0, 6),)),)) for rank in range(4))
    return Plan({"vision": UnitPlan(encoders), "llm": UnitPlan((Replica(stages),), 2)})


def plan(builder: str, held_seconds: float, *, rank: int) -> Step:
    """Return a rank's part of the step in the order that a builder makes."""
    graph, placed = build_graph(), build_plan()
    samples = range(NUM_SAMPLES)
    encoded = [[[(sample, 0)] for sample in samples if sample % 4 == replica] for replica in range(4)]
    assignment = Assignment({"vision": encoded, "llm": [[[(sample, -1)] for sample in samples]]})
    schedules = ScheduleCache(graph, placed, BUILDERS[builder], (), False)
    latency_us = 1e3 * max(LEAST_MILLISECONDS, 1e3 * held_seconds) / 2  # for each half of an all-reduce
    cluster = Cluster(2, TFLOPS, 8.0, NodeLink(10.0, latency_us), Network(10.0, 300.0, 1), dtype="float32", efficiency=1.0)
    predictor = StepPredictor(schedules, cluster, VOCAB_SIZE, RunOptions(transformer_impl="local", sequence_parallel=False))
    source = Pictures()
    return plan_step(
        source,
        lengths=[source.lengths(sample) for sample in samples],
        assignment=assignment,
        options=StepOptions(schedules, rank, costs_of=predictor.costs),
    )


def measure(held_seconds: float, num_iterations: int, *, rank: int) -> tuple[dict[str, Any], dict[str, Timeline]]:
    """Return the median seconds of a step, unfilled and filled, the share that runs inside waits, and the last timelines."""
    if held_seconds:
        hold_back(held_seconds)
    options = SessionOptions(build_graph(), BuildOptions(torch.float32), VOCAB_SIZE, timeout=TIMEOUT)
    session = Session(options, plan=build_plan())
    steps = {name: plan(builder, held_seconds, rank=rank) for name, builder in (("unfilled", "1f1b"), ("filled", "optimus"))}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    timelines: dict[str, Timeline] = {}
    for iteration in range(num_iterations + 1):
        for name, step in steps.items():
            session.zero_gradients()
            dist.barrier()
            start = time.perf_counter()
            result = session.executor.execute(step)
            session.finish_gradients()
            dist.barrier()
            if iteration:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
            origin_seconds = session.executor.clock.origin_seconds
            timeline = gather_timeline(result.events, origin_seconds=origin_seconds, plan=session.plan, rank=rank)
            timelines |= {} if timeline is None else {name: timeline}
    modes = steps["filled"].schedule.modes
    inside_share = float((modes == SlotMode.INSIDE).sum() / len(modes))
    return {"inside_share": inside_share, **{name: statistics.median(found) for name, found in seconds.items()}}, timelines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=10, help="steps of each schedule")
    parser.add_argument("--held", default=",".join(map(str, HELD_MILLISECONDS)), help="milliseconds of each collective")
    parser.add_argument("--figure", type=Path, help="where to draw a step with collectives that are held back for longest")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for held in map(float, given.held.split(",")):
        found, timelines = run_on_ranks(measure, held / 1000, given.iterations, num_ranks=4)
        rows.append({"held_ms": held, "load": os.getloadavg()[0], **found})
    if given.figure is not None:
        titles = {"unfilled": "1f1b", "filled": "optimus"}
        draw_timelines({f"{titles[name]}, as measured": timeline for name, timeline in timelines.items()}, given.figure)
    if given.json:
        print(json.dumps(rows))
        return
    table = Table("collectives held back (ms)", "slots inside", "unfilled (s)", "filled (s)", "filled / unfilled", "load")
    for row in rows:
        cells = f"{row['held_ms']:g}", f"{row['inside_share']:.0%}", f"{row['unfilled']:.3f}", f"{row['filled']:.3f}"
        table.add_row(*cells, f"{row['filled'] / row['unfilled']:.3f}", f"{row['load']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
