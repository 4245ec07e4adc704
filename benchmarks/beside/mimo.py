"""Claim: what Megatron's own MIMO trains, Braid trains with the same losses, and in less time where samples differ.

Both train one vision-language model in float64 on the same global batches: megatron-core's MimoModel under its 1F1B, with the
encoder on ranks before the LLM's, and Braid under the same plan with the same microbatches; then Braid with what MIMO does not
have: microbatches balanced for both units, or as `auto` predicts to be fastest, and units that share all ranks. Images differ in
size from sample to sample; all samples have one number of tokens, as MIMO's batches do, so nothing is padded.

Steps take turns in the same processes; shown are medians, the ratio to MIMO's, and the largest difference of a loss from MIMO's
(a balanced batch holds the same samples, so its losses are the same). Needs megatron-core 0.19 (Python 3.12). Layouts are the
encoder's replicas, the LLM's stages and its replicas; more processes than cores wait for cores, not for each other.

Run `python benchmarks/beside/mimo.py [--json] [--iterations N] [--layouts V,P,D ...]`.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.beside.turns import show, take_turns
from megatron.runtime.emulation.emulated_run import run_on_ranks
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from tests.distributed.braid_training import BraidTraining, ComparedCase, Weights, initial_weights
from tests.distributed.mimo_training import MimoLayout, MimoTraining, mimo_without_cuda
from tests.distributed.random_source import SampleShape

NUM_SAMPLES, NUM_TOKENS, MOST_MERGED_ROWS = 16, 192, 12


def build_case() -> ComparedCase:
    """Return a model whose encoder takes about as long as its LLM, with images of 4 to 144 tokens."""
    vision = {
        "role": "encoder",
        "num_layers": 6,
        "hidden_size": 192,
        "num_attention_heads": 4,
        "ffn_hidden_size": 768,
        "image": {"patch_size": 4, "merge_size": 2, "in_channels": 3, "min_pixels": 64, "max_pixels": 65536},
    }
    llm = {
        "role": "backbone",
        "num_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 768,
        "add_qkv_bias": True,
    }
    drawn = np.random.default_rng(0)
    shapes = []
    for _ in range(NUM_SAMPLES):
        rows, columns = (int(side) for side in np.clip(np.exp(drawn.normal(1.6, 0.7, size=2)), 2, MOST_MERGED_ROWS))
        num_text_tokens = NUM_TOKENS - rows * columns
        shapes.append(SampleShape((("vision", rows, columns),), num_text_tokens, num_text_tokens // 2))
    return ComparedCase(ModelGraph.from_dict({"units": {"vision": vision, "llm": llm}}), tuple(shapes))


def build_runs(case: ComparedCase, layout: MimoLayout, weights: Weights) -> dict[str, BraidTraining | MimoTraining]:
    """Return everything that is compared, on this rank."""
    sizes = {
        "vision": UnitSizes(data_parallel_size=layout.vision_dp),
        "llm": UnitSizes(pipeline_parallel_size=layout.llm_pp, data_parallel_size=layout.llm_dp),
    }
    apart = plan_disaggregated(case.graph, sizes=sizes, world_size=layout.num_ranks)
    shared = _shared(case, layout.num_ranks)
    return {
        "MIMO": MimoTraining(case, weights, layout),
        "Braid, as MIMO": BraidTraining(case, apart, balancer="none"),
        "Braid, balanced": BraidTraining(case, apart, balancer="orchmllm"),
        "Braid, auto": BraidTraining(case, apart, balancer="auto"),
        "Braid, ranks shared": BraidTraining(case, shared, balancer="none"),
        "Braid, ranks shared, orchmllm": BraidTraining(case, shared, balancer="orchmllm"),
        "Braid, ranks shared, auto": BraidTraining(case, shared, balancer="auto"),
    }


def measure(layout: MimoLayout, weights: Weights, num_iterations: int, *, rank: int) -> dict[str, dict[str, float]]:
    """Return for each run the median seconds of a step and the largest difference of its losses from MIMO's."""
    case = build_case()
    with mimo_without_cuda():
        return take_turns(build_runs(case, layout, weights), case.batch_of_step, num_iterations)


def _first_weights(*, rank: int) -> Weights:
    return initial_weights(build_case())


def _shared(case: ComparedCase, num_ranks: int) -> Plan:
    sizes = {name: UnitSizes(data_parallel_size=num_ranks) for name in case.graph.unit_names}
    return plan_colocated(case.graph, sizes=sizes, world_size=num_ranks)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=10, help="steps of each")
    parser.add_argument("--layouts", nargs="+", default=["1,1,1"], metavar="V,P,D", help="vision dp, LLM pp, LLM dp")
    given = parser.parse_args()
    weights = run_on_ranks(_first_weights, num_ranks=1)
    found = {}
    for text in given.layouts:
        layout = MimoLayout(*map(int, text.split(",")))
        found[text] = run_on_ranks(measure, layout, weights, given.iterations, num_ranks=layout.num_ranks)
    show(found, of="encoder dp, LLM pp, LLM dp", peer="MIMO's", as_json=given.json)


if __name__ == "__main__":
    main()
