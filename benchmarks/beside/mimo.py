"""Claim: what Megatron's own MIMO trains, Braid trains with the same losses, and in less time where samples differ.

Both train one vision-language model in float64 on the same global batches: megatron-core's MimoModel under its 1F1B, with the
encoder on ranks before the LLM's, and Braid under the same plan with the same microbatches; then Braid with what MIMO does not
have: microbatches as `auto` predicts to be fastest, units that share all ranks, and the plans that the search of `--plan auto`
makes for the same ranks from layers that it has timed, with MIMO's sizes kept and without. --data chooses the samples:

    sizes   one image each, of 4 to 144 tokens; all samples have one number of tokens, so MIMO pads nothing
    counts  1 to 16 images each, of 16 tokens, and as much text; MIMO pads the samples of a microbatch to its longest
    alike   4 images each, of 16 tokens

Steps take turns in the same processes; shown are medians, the ratio to MIMO's, and the largest difference of a loss from MIMO's
(a balanced batch holds the same samples, so its losses are the same). Needs megatron-core 0.19 (Python 3.12). Layouts are the
encoder's replicas, the LLM's stages and its replicas; more processes than cores wait for cores, not for each other. With --waits,
the transformer layers of both wait instead of computing, as long as their products would take at 10 GFLOP/s, so that ranks wait
for each other alone: for the tokens that MIMO has with its padding (`padded`), or that it would have if it packed (`packed`).
Everything else is as it was, planning from timed layers, too.

Run `python benchmarks/beside/mimo.py [--json] [--iterations N] [--data NAME ...] [--layouts V,P,D ...] [--waits padded|packed]`.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from benchmarks.beside.turns import Waited, show, take_turns
from megatron.runtime import platform, profiler
from megatron.runtime.emulation.emulated_run import run_on_ranks
from megatron.runtime.orchestrator import profile_layers
from megatron.runtime.orchestrator.machine import describe_device
from megatron.runtime.orchestrator.profile_layers import profile_model
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.planners import PLANNERS, plan_or_advise
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.values.model_graph import ModelGraph
from tests.distributed import mimo_training
from tests.distributed.braid_training import VOCAB_SIZE, BraidTraining, ComparedCase, Weights, compared_run, initial_weights
from tests.distributed.mimo_training import MimoLayout, MimoTraining, mimo_without_cuda
from tests.distributed.random_source import SampleShape

WAITED_GFLOPS = 10.0
DATA = ("sizes", "counts", "alike")
NUM_SAMPLES, NUM_TOKENS, MOST_MERGED_ROWS = 16, 192, 12
MOST_IMAGES, IMAGES_ALIKE, IMAGE = 16, 4, ("vision", 4, 4)
VISION = {
    "role": "encoder",
    "num_layers": 6,
    "hidden_size": 192,
    "num_attention_heads": 4,
    "ffn_hidden_size": 768,
    "image": {"patch_size": 4, "merge_size": 2, "in_channels": 3, "min_pixels": 64, "max_pixels": 65536},
}
LLM = {
    "role": "backbone",
    "num_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 768,
    "add_qkv_bias": True,
}
"""The encoder takes about as long as the LLM."""


def build_case(data: str) -> ComparedCase:
    """Return the model with the samples of one kind of data."""
    drawn = np.random.default_rng(0)
    shapes = []
    for _ in range(NUM_SAMPLES):
        if data == "sizes":
            rows, columns = (int(side) for side in np.clip(np.exp(drawn.normal(1.6, 0.7, size=2)), 2, MOST_MERGED_ROWS))
            images, num_text_tokens = (("vision", rows, columns),), NUM_TOKENS - rows * columns
        else:
            count = int(np.clip(np.exp(drawn.normal(1.2, 0.9)), 1, MOST_IMAGES)) if data == "counts" else IMAGES_ALIKE
            images, num_text_tokens = (IMAGE,) * count, IMAGE[1] * IMAGE[2] * count
        shapes.append(SampleShape(images, num_text_tokens, num_text_tokens // 2))
    return ComparedCase(ModelGraph.from_dict({"units": {"vision": VISION, "llm": LLM}}), tuple(shapes))


@contextmanager
def waiting_layers(*, is_packed: bool) -> Iterator[None]:
    """Let transformer layers wait instead of computing; is_packed: MIMO's LLM waits for the tokens that are no padding."""
    without_padding: list[int] = []
    forward_step: Callable[..., Any] = mimo_training.forward_step

    def count_tokens(batches: Iterator[Any], model: Any) -> Any:
        batch = next(batches)
        without_padding[:] = [batch.num_tokens] if is_packed else []
        try:
            return forward_step(iter([batch]), model)
        finally:
            without_padding.clear()

    def forward(self: TransformerLayer, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        num_tokens, num_samples, _width = hidden_states.shape
        if num_samples > 1:  # MIMO's LLM: all others pack
            num_tokens = without_padding[0] if without_padding else num_tokens * num_samples
        weights = tuple(self.parameters())
        products = sum(2 * each.numel() for each in weights if each.dim() > 1)
        hidden: Tensor = Waited.apply(hidden_states, num_tokens * products / (1e9 * WAITED_GFLOPS), *weights)  # type: ignore[no-untyped-call]
        return hidden, None

    with (
        patch.object(TransformerLayer, "forward", forward),
        patch.object(mimo_training, "forward_step", count_tokens),
        patch.object(profile_layers, "find_value", lambda *_: None),
        patch.object(profile_layers, "keep_value", lambda *_: None),
        patch.object(profiler, "_clock", time.perf_counter),
    ):
        yield


class Planned(NamedTuple):
    """The plans that `--plan auto` finds, and for what."""

    free: PlannedRun
    apart: PlannedRun
    """With the sizes that MIMO has."""
    request: PlanningRequest
    """With the machine and the times of layers that balancers and schedules go by, too."""


def plan_auto(case: ComparedCase, layout: MimoLayout, *, waits: bool) -> Planned:
    """Return what the search of `--plan auto` chooses, after timing the model's layers."""
    num_ranks = layout.num_ranks
    build, source = BuildOptions(torch.float64), case.batch_of_step(0)
    device = describe_device(dtype="float64", ranks_per_node=num_ranks)
    request = PlanningRequest(
        case.graph,
        replace(device, cores_per_node=None) if waits else device,
        num_ranks,
        len(case.shapes),
        tuple(source.lengths(index) for index in range(len(source))),
        vocab_size=VOCAB_SIZE,
        transformer_impl="local",
        sharding="optim",
    )
    request = replace(request, profile=profile_model(request, build)[0])
    fixed = {"vision": FixedSizes(1, 1, layout.vision_dp), "llm": FixedSizes(1, layout.llm_pp, layout.llm_dp)}
    free, apart = (plan_or_advise(PLANNERS["braid"], replace(request, fixed_sizes=sizes)).run for sizes in ({}, fixed))
    return Planned(free, apart, request)


def build_runs(
    case: ComparedCase, layout: MimoLayout, weights: Weights, planned: Planned
) -> dict[str, BraidTraining | MimoTraining]:
    """Return everything that is compared, on this rank."""
    sizes = {
        "vision": UnitSizes(data_parallel_size=layout.vision_dp),
        "llm": UnitSizes(pipeline_parallel_size=layout.llm_pp, data_parallel_size=layout.llm_dp),
    }
    every = {name: UnitSizes(data_parallel_size=layout.num_ranks) for name in case.graph.unit_names}
    apart = plan_disaggregated(case.graph, sizes=sizes, world_size=layout.num_ranks)
    shared = plan_colocated(case.graph, sizes=every, world_size=layout.num_ranks)
    runs = {
        "as MIMO": compared_run(apart, balance="none"),
        "balanced": compared_run(apart, balance="auto"),
        "ranks shared": compared_run(shared, balance="auto"),
        "--plan auto, MIMO's sizes": planned.apart,
        "--plan auto": planned.free,
    }
    mimo = MimoTraining(case, weights, layout)
    return {"MIMO": mimo, **{name: BraidTraining(case, run, planned.request) for name, run in runs.items()}}


def measure(
    data: str, layout: MimoLayout, weights: Weights, planned: Planned, num_iterations: int, *, rank: int
) -> dict[str, dict[str, float]]:
    """Return for each run the median seconds of a step and the largest difference of its losses from MIMO's."""
    case = build_case(data)
    with mimo_without_cuda():
        return take_turns(build_runs(case, layout, weights, planned), case.batch_of_step, num_iterations)


def _first_weights(*, rank: int) -> Weights:
    return initial_weights(build_case("alike"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=10, help="steps of each")
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA, help="kinds of samples")
    parser.add_argument("--layouts", nargs="+", default=["1,1,1"], metavar="V,P,D", help="vision dp, LLM pp, LLM dp")
    parser.add_argument("--waits", choices=("padded", "packed"), help="layers wait instead of computing, for MIMO's tokens so")
    given = parser.parse_args()
    platform.install()
    weights = run_on_ranks(_first_weights, num_ranks=1)
    found = {}
    with waiting_layers(is_packed=given.waits == "packed") if given.waits else nullcontext():
        for text, data in product(given.layouts, given.data):
            layout = MimoLayout(*map(int, text.split(",")))
            planned = plan_auto(build_case(data), layout, waits=given.waits is not None)
            for name, run in (("", planned.free), (", MIMO's sizes", planned.apart)):
                units = run.plan.units.items()
                sizes = "; ".join(f"{unit} {each.describe_sizes()} on ranks {each.ranks}" for unit, each in units)
                print(f"{data}, --plan auto{name}: {sizes}; {' '.join((run.flags, *run.encoder_flags))}", file=sys.stderr)
            found[f"{data}; {text}"] = run_on_ranks(
                measure, data, layout, weights, planned, given.iterations, num_ranks=layout.num_ranks
            )
    show(found, of="samples; vision dp, LLM pp, LLM dp", peer="megatron-core's MIMO", as_json=given.json)


if __name__ == "__main__":
    main()
