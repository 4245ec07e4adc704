"""Flags of a planning request, and the request that they make: for plan.py and elastic.py."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import get_args

from megatron.runtime.flags.arguments import choose_trained
from megatron.runtime.flags.configuration import ModelConfig
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.layer import Implementation
from multimodal.cost.layers.registry import read_model
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.plan.planners.planned_run import Sharding
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.values.errors import ConfigError
from tools.command_line import Parser, count, counts_by_unit, padded_vocab_size, read_lengths

SIZE_NAMES = {
    "ep": "expert_parallel_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "v": "virtual_stages",
}


def add_request_flags(parser: Parser) -> None:
    """Add the flags that `build_request` reads."""
    what = parser.add_argument_group("the model and the machine")
    what.add_argument("--model", type=Path, required=True, metavar="M.yaml", help="Units and shapes; see examples/models.")
    what.add_argument("--freeze", nargs="+", default=[], metavar="UNIT", help="Units whose module is not trained.")
    what.add_argument("--freeze-projector", nargs="+", default=[], metavar="UNIT", help="Units whose projector is not trained.")
    what.add_argument("--lora-rank", type=count, metavar="N", help="Train adapters of this rank, as pretrain_mllm.py does.")
    what.add_argument("--lora-targets", nargs="+", default=[], metavar="PATTERN", help="Linear layers with adapters (the LLM's).")
    what.add_argument("--cluster", type=Path, required=True, metavar="C.yaml", help="GPUs and links; see examples/clusters.")
    what.add_argument("--layer-costs", type=Path, metavar="COSTS.yaml", help="Measured layers, from tools/profile_layers.py.")
    what.add_argument("--num-gpus", type=count, required=True, metavar="N", help="The most GPUs that the plan may use.")
    what.add_argument("--vocab-size", type=count, metavar="N", help="Padded vocabulary of the LLM (the model file's, or 50304).")
    data = parser.add_argument_group("the data")
    data.add_argument("--global-batch-size", type=count, required=True, metavar="B", help="Samples per step.")
    data.add_argument(
        "--micro-batch-size", type=count, metavar="N", help="Samples per LLM microbatch (the best for each planner)."
    )
    data.add_argument("--lengths", type=Path, metavar="L.csv.gz", help="Lengths of real samples, drawn at random.")
    data.add_argument("--uniform-lengths", type=counts_by_unit, metavar="UNIT=TOKENS,...", help="One length for all samples.")
    data.add_argument("--num-iterations", type=count, default=2, metavar="N", help="Global batches that predictions average (2).")
    sizes = parser.add_argument_group("sizes and memory")
    sizes.add_argument(
        "--fix",
        type=_fixed,
        nargs="+",
        default=[],
        metavar="UNIT:tp=2,pp=4",
        help="Sizes that a unit must have: tp, cp, pp, dp, v, ep.",
    )
    sizes.add_argument("--recompute-granularity", choices=("selective", "full"), help="Recompute this (only where nothing fits).")
    sizes.add_argument(
        "--transformer-impl", choices=get_args(Implementation), help="Whose layers run (the fused ones where they can)."
    )
    sizes.add_argument(
        "--data-parallel-sharding-strategy", choices=get_args(Sharding), help="What replicas share (optim; braid searches)."
    )
    sizes.add_argument("--memory-headroom", type=float, default=0.1, metavar="SHARE", help="Of a GPU's memory, kept free (0.1).")
    sizes.add_argument(
        "--time-budget", type=float, default=30.0, metavar="SECONDS", help="Nominal, for planners that simulate (30)."
    )


def _fixed(text: str) -> tuple[str, FixedSizes]:
    unit, separator, sizes = text.partition(":")
    pairs = [entry.partition("=") for entry in sizes.split(",")]
    if not unit or not separator or any(name not in SIZE_NAMES for name, _, _ in pairs):
        raise argparse.ArgumentTypeError(f"expected UNIT:tp=N,cp=N,pp=N,dp=N,v=N,ep=N with some of the six, found '{text}'")
    return unit, FixedSizes(**{SIZE_NAMES[name]: count(number) for name, _, number in pairs})


def build_request(flags: argparse.Namespace) -> PlanningRequest:
    """Read the files that the flags name, and build the request; raises BraidError."""
    trained = {name: getattr(flags, name) for name in ("model", "freeze", "freeze_projector", "lora_rank", "lora_targets")}
    graph = choose_trained(read_model(flags.model), ModelConfig(**trained))
    if flags.lora_rank is None and flags.lora_targets:
        raise ConfigError("--lora-targets would be ignored: there are no adapters; add --lora-rank N or leave it out")
    return PlanningRequest(
        graph,
        Cluster.from_file(flags.cluster),
        flags.num_gpus,
        flags.global_batch_size,
        read_lengths(flags, graph),
        micro_batch_size=flags.micro_batch_size,
        vocab_size=padded_vocab_size(flags, graph),
        fixed_sizes=dict(flags.fix),
        recompute=flags.recompute_granularity,
        transformer_impl=flags.transformer_impl,
        sharding=flags.data_parallel_sharding_strategy,
        profile=LayerProfile.from_file(flags.layer_costs) if flags.layer_costs else None,
        memory_headroom=flags.memory_headroom,
        time_budget_seconds=flags.time_budget,
        on_progress=partial(print, file=sys.stderr, flush=True) if sys.stderr.isatty() else None,
        num_batches=flags.num_iterations,
    )
