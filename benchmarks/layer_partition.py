"""Claim: pipeline stages cut by the seconds of layers (--layer-partition frozen-aware) are never slower than even ones.

Units on ranks of their own, 1F1B, 24 microbatches of two samples, every encoder in 2 stages, the LLM in 4 and in 6, tensor
parallelism over 4, simulated on H100: models as their files freeze them, and with everything trained. Plans are made as the flags
for sizes make them; layers are predicted for average samples of the simulated batch.

Run `python benchmarks/layer_partition.py --lengths FILE [--json]`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.registry import read_model
from multimodal.data.length_table import read_length_table
from multimodal.plan.planners.estimate.unit_layout import layer_times
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.plans_of_sizes import EVEN, LayerSeconds, UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("cornstarch-thesis-vlm-1b", "cornstarch-thesis-vlm-8b", "llava-onevision-7b", "qwen2.5-vl-7b", "internvl3-8b")
LLM_STAGES = (4, 6)
ENCODER_STAGES, TENSOR_SIZE, NUM_MICROBATCHES, SAMPLES = 2, 4, 24, 2


def trained(graph: ModelGraph) -> ModelGraph:
    """Return the model with nothing frozen."""
    return replace(graph, units=tuple(replace(unit, freeze_module=False, freeze_projector=False) for unit in graph.units))


def step_seconds(graph: ModelGraph, lengths: Sequence[SampleLengths], *, stages: int, is_even: bool) -> tuple[float, str]:
    """Simulate a step; returns its seconds and the number of the LLM's layers in each stage."""
    sizes = {unit.name: UnitSizes(TENSOR_SIZE, ENCODER_STAGES, data_parallel_size=1) for unit in graph.encoders}
    sizes[graph.backbone.name] = UnitSizes(TENSOR_SIZE, stages, data_parallel_size=1)
    world_size = TENSOR_SIZE * (stages + ENCODER_STAGES * len(graph.encoders))
    vocab_size = graph.backbone.vocab_size or 0
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    request = PlanningRequest(
        graph, cluster, world_size, len(lengths), tuple(lengths), micro_batch_size=SAMPLES, vocab_size=vocab_size
    )
    predicted: LayerSeconds = {name: layer_times(request, name, StageSize(TENSOR_SIZE)).total for name in graph.unit_names}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=world_size, layer_seconds=EVEN if is_even else predicted)
    schedules = ScheduleCache(graph, plan, BUILDERS["1f1b"])
    options = BalanceOptions(vocab_size=vocab_size, micro_batch_size=SAMPLES)
    assignment = BALANCERS["llm-only"](lengths, graph=graph, plan=plan, options=options)
    costs = StepPredictor(schedules, cluster, vocab_size).costs(assignment, lengths)
    step = simulate_schedule(schedules.find(schedules.shape(assignment), costs).schedule, costs)
    held = [len(stage.layers) for stage in plan.units[graph.backbone.name].replicas[0].virtual_stages]
    return step.iteration_seconds, " ".join(map(str, (held[0] - 1, *held[1:-1], held[-1] - 1)))


def measure(name: str, *, lengths_file: Path) -> dict[str, dict[str, float | str]]:
    """Return the trained units, and LLM stages -> seconds with even and with uneven stages."""
    found: dict[str, dict[str, float | str]] = {}
    as_it_is = read_model(ROOT / "examples" / "models" / f"{name}.yaml")
    for label, graph in (("as in its file", as_it_is), ("all trained", trained(as_it_is))):
        samples = read_length_table(lengths_file, graph=graph)
        (lengths,) = draw_length_batches(samples, batch_size=NUM_MICROBATCHES * SAMPLES, num_batches=1, seed=0)
        for stages in LLM_STAGES:
            even, _ = step_seconds(graph, lengths, stages=stages, is_even=True)
            unlike, layers = step_seconds(graph, lengths, stages=stages, is_even=False)
            found[f"{label}, {stages} stages"] = {"even": even, "frozen_aware": unlike, "layers": layers}
    return found


def main(argv: Sequence[str]) -> None:
    """Measure and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", type=Path, required=True, metavar="FILE", help="A table of lengths, as tools/lengths.py writes."
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    rows = {name: measure(name, lengths_file=given.lengths) for name in MODELS}
    holds = all(float(each["frozen_aware"]) <= 1.001 * float(each["even"]) for row in rows.values() for each in row.values())
    if given.json:
        print(json.dumps({"rows": rows, "holds": holds}))
        return
    table = Table("model", "", "even (s)", "frozen-aware (s)", "shorter", "layers of the LLM's stages", box=None)
    for name, row in rows.items():
        for label, each in row.items():
            even, unlike = float(each["even"]), float(each["frozen_aware"])
            table.add_row(name, label, f"{even:.3f}", f"{unlike:.3f}", f"{1 - unlike / even:.1%}", str(each["layers"]))
    console = Console(width=150, highlight=False)
    console.print(table)
    console.print(f"stages cut by seconds are never slower: {'holds' if holds else 'does not hold'}")


if __name__ == "__main__":
    main(sys.argv[1:])
