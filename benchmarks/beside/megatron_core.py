"""Claim: a pipeline under 1F1B takes Braid no longer than megatron-core's own loop, whatever the size of its layers.

An LLM of eight layers on two stages and eight microbatches of two sequences, all of one length, in float64: megatron-core's
GPTModel, its schedule and torch's AdamW; Braid with the same weights, plan and batches. Steps take turns in the same processes;
shown are medians, the ratio step by step, and the largest difference of a loss.

Run `python benchmarks/beside/megatron_core.py [--json] [--iterations N] [--hidden N ...]`.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))


from benchmarks.beside.turns import show, take_turns
from megatron.runtime.emulation.emulated_run import run_on_ranks
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.model_graph import ModelGraph
from tests.distributed.braid_training import MICRO_BATCH_SIZE, BraidTraining, ComparedCase, Weights, compared_run, initial_weights
from tests.distributed.drop_in_training import megatron_groups
from tests.distributed.megatron_training import MegatronTraining, megatron_without_cuda
from tests.distributed.random_source import SampleShape

NUM_STAGES, NUM_MICROBATCHES, NUM_TOKENS = 2, 8, 128


def build_case(hidden_size: int) -> ComparedCase:
    """Return an LLM and batches of texts of one length."""
    llm = {"role": "backbone", "num_layers": 8, "num_attention_heads": 4, "add_qkv_bias": True}
    sizes = {"hidden_size": hidden_size, "num_query_groups": 2, "ffn_hidden_size": 3 * hidden_size}
    shapes = (SampleShape((), NUM_TOKENS, NUM_TOKENS // 2),) * (MICRO_BATCH_SIZE * NUM_MICROBATCHES)
    return ComparedCase(ModelGraph.from_dict({"units": {"llm": {**llm, **sizes}}}), shapes)


def measure(hidden_size: int, weights: Weights, num_iterations: int, *, rank: int) -> dict[str, dict[str, float]]:
    """Return what `take_turns` finds."""
    case = build_case(hidden_size)
    sizes = {"llm": UnitSizes(pipeline_parallel_size=NUM_STAGES)}
    plan = plan_disaggregated(case.graph, sizes=sizes, world_size=NUM_STAGES)
    with megatron_groups(1, NUM_STAGES), megatron_without_cuda():
        runs = {
            "megatron-core": MegatronTraining(case, weights["llm"]),
            "Braid": BraidTraining(case, compared_run(plan, balance="none")),
        }
        return take_turns(runs, case.batch_of_step, num_iterations)


def _first_weights(hidden_size: int, *, rank: int) -> Weights:
    return initial_weights(build_case(hidden_size))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=15, help="steps of each")
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 128, 512], metavar="N", help="hidden sizes")
    given = parser.parse_args()
    found = {}
    for size in given.hidden:
        weights = run_on_ranks(_first_weights, size, num_ranks=1)
        found[size] = run_on_ranks(measure, size, weights, given.iterations, num_ranks=NUM_STAGES)
    show(found, of="hidden size", peer="megatron-core's own loop", as_json=given.json)


if __name__ == "__main__":
    main()
