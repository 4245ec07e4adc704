"""Prints the predicted duration and memory of a training step, and where its time goes; see docs/simulate.md.

python tools/simulate.py --model M.yaml --cluster C.yaml --plan P.yaml --lengths L.csv.gz --schedule 1f1b
python tools/simulate.py --costs COSTS.yaml --schedule 1f1b
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.layer import Implementation
from multimodal.cost.layers.registry import read_model
from multimodal.cost.run_options import OVERLAPPED_PARTS, RunOptions
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.step_costs import StepCosts
from multimodal.cost.step_memory import ZERO_STAGES, checkpoint_size, default_zero_stage
from multimodal.cost.token_shares import DEFAULT_BLOCK_SIZE
from multimodal.plan.communicators import max_communicators_per_rank
from multimodal.schedule.builders import BUILDERS, schedule_name
from multimodal.schedule.passes import PASSES, Pass, passes_named
from multimodal.schedule.simulate import report_simulations, simulate_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ConfigError
from multimodal.values.sample_lengths import draw_length_batches
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.validate import read_plan, validate_assignment
from tools.command_line import Parser, format_ranks, format_seconds, padded_vocab_size, program, read_lengths

DEFAULT_MICROBATCHES = 8
"""Microbatches per replica of the LLM if no global batch size is given."""
MODEL_FLAGS = ("--model", "--cluster", "--plan")
FLAGS_BESIDE_COSTS = {"--costs", "--schedule", "--schedule-passes", "--json", "--trace", "--picture"}
"""All flags that --costs does not make useless."""


class CostedStep(NamedTuple):
    """A step to simulate, and its costs."""

    shape: StepShape
    assignment: Assignment
    costs: StepCosts


def build_parser() -> Parser:
    """Return the parser of all flags; those that --costs would ignore default to None."""
    parser = Parser(prog="simulate.py", description=__doc__)
    add = parser.add_argument_group("the model").add_argument
    add("--model", type=Path, metavar="M.yaml", help="Units and their architecture, as for pretrain_mllm.py.")
    add("--cluster", type=Path, metavar="C.yaml", help="Accelerators and links; examples in examples/clusters.")
    add("--plan", type=Path, metavar="P.yaml", help="Which rank holds which layers.")
    add("--layer-costs", type=Path, metavar="L.yaml", help="What tools/profile_layers.py measured of the layers.")
    add("--costs", type=Path, metavar="COSTS.yaml", help="Seconds per stage instead of model, cluster and plan.")
    add = parser.add_argument_group("the data").add_argument
    add("--lengths", type=Path, metavar="L.csv.gz", help="Lengths of real samples.")
    add("--uniform-lengths", type="counts_by_unit", metavar="UNIT=TOKENS,...", help="One length for all samples.")
    add("--seed", type="at_least_zero", metavar="S", help="Shuffle the samples (they come in the file's order).")
    add("--num-iterations", type="count", metavar="N", help="Consecutive global batches to simulate (1).")
    add("--global-batch-size", type="count", metavar="N", help="Samples per step (8 microbatches per LLM replica).")
    add("--micro-batch-size", type="count", metavar="N", help="Samples per LLM microbatch (1).")
    add("--encoder-micro-batch-sizes", type="counts_by_unit", metavar="UNIT=ITEMS,...", help="Items per encoder microbatch.")
    add("--balance", choices=BALANCERS, help="Places samples and items (none).")
    add("--vocab-size", type="count", metavar="N", help="Padded vocabulary of the LLM (the model file's, else 50304).")
    add("--recompute-granularity", choices=("selective", "full"), help="What backwards compute again (nothing).")
    add("--zero-stage", type=int, choices=ZERO_STAGES, help="What replicas share: optimizer state 1, all 3 (1; 0 in float64).")
    add("--num-distributed-optimizer-instances", type="count", metavar="N", help="Copies of what replicas share (1).")
    add("--transformer-impl", choices=get_args(Implementation), help="Whose layers (transformer_engine; local if overlapped).")
    add("--tp-comm-overlap", action="store_true", default=None, help="Collectives run in parts beside products (local layers).")
    add("--tp-comm-overlap-parts", type="count", metavar="N", help=f"How many ({OVERLAPPED_PARTS}).")
    add("--no-sequence-parallel", action="store_true", default=None, help="Tensor parallel ranks all have every row.")
    add("--context-parallel-distribution", choices=tuple(TokenDistribution), help="What ranks share (by-item).")
    add("--context-parallel-block-size", type="count", metavar="N", help=f"Tokens of a block ({DEFAULT_BLOCK_SIZE}).")
    add = parser.add_argument_group("the schedule").add_argument
    add("--schedule", required=True, type=schedule_name, metavar="NAME", help=f"Of {', '.join(BUILDERS.listed())}.")
    add("--schedule-passes", default="", metavar="A,B", help=f"Rewrite it, in this order: {', '.join(PASSES)}.")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="Print one JSON object instead of tables.")
    add("--trace", type=Path, metavar="OUT.json", help="First step for ui.perfetto.dev and tools/trace.py.")
    add("--picture", type=Path, metavar="OUT.png|OUT.html", help="First step as a picture, or a page to zoom in.")
    return parser


def check_flags(flags: argparse.Namespace) -> None:
    """Check combinations; raises ConfigError."""
    given = [f"--{name.replace('_', '-')}" for name, value in vars(flags).items() if value is not None]
    if flags.costs is not None and (ignored := [flag for flag in given if flag not in FLAGS_BESIDE_COSTS]):
        raise ConfigError(f"{ignored[0]} would be ignored beside --costs, which says all of it; leave one of the two out")
    if flags.costs is None and (missing := [flag for flag in MODEL_FLAGS if flag not in given]):
        raise ConfigError(f"{missing[0]} is missing; give --model, --cluster and --plan, or --costs alone")
    if flags.tp_comm_overlap_parts is not None and not flags.tp_comm_overlap:
        raise ConfigError("--tp-comm-overlap-parts would be ignored without --tp-comm-overlap; add that, or leave it out")
    if flags.tp_comm_overlap_parts == 1:
        raise ConfigError("--tp-comm-overlap-parts must be at least 2, found 1; or leave --tp-comm-overlap out")
    if flags.tp_comm_overlap and flags.transformer_impl == "transformer_engine":
        raise ConfigError("--tp-comm-overlap cuts the collectives of local layers; use --transformer-impl local, or leave it out")


def build_steps(flags: argparse.Namespace) -> Iterator[CostedStep]:
    """Yield the steps to simulate."""
    from multimodal.balance.placement import as_computed  # behind the flags, like all that they do not list
    from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
    from multimodal.cost.model_costs import ModelCosts

    if flags.costs is not None:
        table = CostTable.from_file(flags.costs)
        yield CostedStep(*build_table_step(table), TableCosts(table))
        return
    graph, cluster = read_model(flags.model), Cluster.from_file(flags.cluster)
    plan = read_plan(flags.plan, graph=graph)
    if flags.tp_comm_overlap and all(unit.tensor_parallel_size == 1 for unit in plan.units.values()):
        raise ConfigError(f"--tp-comm-overlap would be ignored: {flags.plan} has tensor parallel size 1 everywhere; leave it out")
    vocab_size = padded_vocab_size(flags, graph)
    profile = LayerProfile.from_file(flags.layer_costs) if flags.layer_costs else None
    options = BalanceOptions(
        micro_batch_size=flags.micro_batch_size or 1,
        encoder_micro_batch_sizes=flags.encoder_micro_batch_sizes or {},
        ranks_per_node=cluster.gpus_per_node,
        vocab_size=vocab_size,
    )
    num_replicas = plan.units[graph.backbone.name].data_parallel_size
    size = flags.global_batch_size or DEFAULT_MICROBATCHES * num_replicas * options.micro_batch_size
    drawn = {"batch_size": size, "num_batches": flags.num_iterations or 1, "seed": flags.seed}
    for lengths in draw_length_batches(read_lengths(flags, graph), **drawn):
        assignment = BALANCERS[flags.balance or "none"](lengths, graph=graph, plan=plan, options=options)
        validate_assignment(assignment, lengths, graph=graph, plan=plan)
        assignment = as_computed(assignment, lengths, graph=graph, plan=plan)
        step = assignment.shape(graph, plan), assignment
        yield CostedStep(*step, ModelCosts(*step, lengths, cluster, vocab_size, run_options(flags, cluster), profile))


def run_options(flags: argparse.Namespace, cluster: Cluster) -> RunOptions:
    """Return the options of the run: recomputation, sharding, implementation of layers."""
    zero_stage = default_zero_stage(cluster.bytes_per_element) if flags.zero_stage is None else flags.zero_stage
    distribution = flags.context_parallel_distribution or TokenDistribution.BY_ITEM
    block_size = flags.context_parallel_block_size or DEFAULT_BLOCK_SIZE
    instances = flags.num_distributed_optimizer_instances or 1
    return RunOptions(
        flags.recompute_granularity,
        zero_stage,
        sequence_parallel=not flags.no_sequence_parallel,
        transformer_impl=flags.transformer_impl or ("local" if flags.tp_comm_overlap else "transformer_engine"),
        num_overlapped_parts=(flags.tp_comm_overlap_parts or OVERLAPPED_PARTS) if flags.tp_comm_overlap else 1,
        item_block_size=block_size if distribution == TokenDistribution.BY_ITEM else None,
        num_state_copies=None if instances == 1 else instances,
    )


def build_step_schedule(step: CostedStep, *, builder: str, passes: Sequence[Pass]) -> Schedule:
    """Build the schedule of a step, rewrite, lower and validate it; raises ConfigError or ScheduleError."""
    from multimodal.schedule.build_schedule import build_schedule

    row = BUILDERS[builder]
    if row.layout is not None and not row.layout.is_met(step.shape.graph, step.shape.plan):
        raise ConfigError(
            f"--schedule {builder} needs virtual stages: {row.layout.wanted}; give one several 'layers' per stage in the plan "
            f"(ranks that appear twice in a --costs table), or choose --schedule {row.otherwise}"
        )
    return build_schedule(row.with_costs(step.costs), step.shape, passes=passes, costs=step.costs)


def print_tables(report: dict[str, Any], *, memory_bytes: float | None) -> None:
    """Print a report as tables; memory_bytes: None if nothing is known about memory (--costs)."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120, highlight=False)
    mfu = f", MFU {report['mfu']:.1%}" if report["mfu"] else ""
    steps = f", mean of {len(report['iterations'])} steps" if len(report["iterations"]) > 1 else ""
    console.print(
        f"{report['schedule']}: {report['num_microbatches']} microbatches on {report['num_lanes']} lanes\n"
        f"iteration {format_seconds(report['iteration_seconds'])}{steps} (ideal {format_seconds(report['ideal_seconds'])}){mfu}"
    )
    if memory_bytes is not None:
        fits = "" if report["peak_memory_bytes"] <= memory_bytes else ": does not fit"
        console.print(f"peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB of {memory_bytes / 1e9:g} GB{fits}")
    shares = Table("time of all ranks", "share", box=None)
    for kind, share in {"busy": report["busy_fraction"], **report["bubble"]}.items():
        shares.add_row(kind, f"{share:.2%}")
    console.print(shares)
    lanes = Table("lane", "ranks", "stages", "busy", "activations GB", "memory GB", box=None)
    for index, lane in enumerate(report["lanes"]):
        peaks = (lane[key] for key in ("peak_activation_bytes", "peak_memory_bytes"))
        memory = ("unknown" if memory_bytes is None else f"{peak / 1e9:.3f}" for peak in peaks)
        busy = format_seconds(lane["busy_seconds"])
        lanes.add_row(str(index), format_ranks(lane["ranks"]), ", ".join(lane["stages"]), busy, *memory)
    console.print(lanes)


@program("simulate.py")
def main(argv: Sequence[str]) -> None:
    """Simulate, write and print according to the flags; raises BraidError."""
    flags = build_parser().parse_args(argv)
    check_flags(flags)
    from multimodal.cost.model_costs import ModelCosts
    from multimodal.schedule.chrome_trace import write_chrome_trace, write_picture

    passes = passes_named(flags.schedule_passes)
    names = [name for name in flags.schedule_passes.split(",") if name]
    steps = list(build_steps(flags))
    schedules = [build_step_schedule(step, builder=flags.schedule, passes=passes) for step in steps]
    simulations = [simulate_schedule(schedule, step.costs) for schedule, step in zip(schedules, steps, strict=True)]
    costs = steps[0].costs
    after, saved = 0.0, None
    if isinstance(costs, ModelCosts):
        after, size = costs.update_seconds, costs.cluster.bytes_per_element
        saved = checkpoint_size(costs.stages, bytes_per_element=size, zero_stage=costs.options.zero_stage)
    report = {"schedule": " + ".join([flags.schedule, *names]), **report_simulations(simulations, update_seconds=after)}
    if flags.trace is not None:
        write_chrome_trace(simulations[0].timeline, flags.trace)
    if flags.picture is not None:
        write_picture({f"Simulated: {report['schedule']}": simulations[0].timeline}, flags.picture)
    if flags.json:
        shape = steps[0].shape
        report["max_communicators_per_rank"] = max_communicators_per_rank(shape.graph, shape.plan)
        print(json.dumps(report if saved is None else {**report, "checkpoint": saved._asdict()}))
        return
    print_tables(report, memory_bytes=Cluster.from_file(flags.cluster).memory_gb * 1e9 if flags.cluster else None)
    if saved is not None:
        print(saved.describe())


if __name__ == "__main__":
    sys.exit(main())
