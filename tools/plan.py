"""Finds a plan for a model, a machine and a data set, and prints its predicted step time and memory; see docs/planning.md.

python tools/plan.py --model M.yaml --cluster C.yaml --num-gpus N --global-batch-size B --lengths L.csv.gz --output plan.yaml
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.runtime.flags.arguments import freeze_units
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.layer import Implementation
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import default_zero_stage
from multimodal.data.length_table import read_length_table, uniform_lengths
from multimodal.plan.checkpoint_size import CheckpointSize, checkpoint_size
from multimodal.plan.communicators import max_communicators_per_rank
from multimodal.plan.planners import PLANNERS, TEMPLATE_PLANNERS
from multimodal.plan.planners.plan_file import write_plan_file
from multimodal.plan.planners.plan_or_advise import plan_or_advise
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, Sharding
from multimodal.plan.planners.search.filling_report import FillingReport, report_filling, with_filling
from multimodal.plan.planners.search.plan_to_fit import PredictedRun, plan_per_gpu
from multimodal.plan.planners.search.prediction import SEED, Prediction, predict_run
from multimodal.plan.planners.templates.describe import describe_templates, report_templates
from multimodal.plan.planners.templates.template_plan import run_of_templates
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import BraidError, ConfigError
from multimodal.values.plan import UnitPlan
from tools.command_line import Parser, at_least_zero, count, counts_by_unit, format_seconds, run_tool

DEFAULT_VOCAB_SIZE = 50304
SIZE_NAMES = {
    "ep": "expert_parallel_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "v": "virtual_stages",
}
DEFAULT_FAULT_TOLERANCE = 1
COLORS = ("#4878a8", "#b0b0b0", "#8c8c8c", "#e8a33d", "#d96b4c", "#c9c15a", "#8f6fae")
"""The color of computing, then those of the kinds of idle time."""


def build_parser() -> Parser:
    """Return the parser of all flags."""
    parser = Parser(prog="plan.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_request_flags(parser)
    how = parser.add_argument_group("the planner")
    how.add_argument("--planner", choices=(*PLANNERS, *TEMPLATE_PLANNERS), default="braid", help="Finds the plan (braid).")
    how.add_argument("--compare", type=_names, default=(), metavar="P1,P2,...", help="Show these planners' plans beside it.")
    how.add_argument(
        "--fault-tolerance", type=at_least_zero, metavar="F", help="Nodes that may be lost at once, for templates (1)."
    )
    how.add_argument(
        "--replicas-per-copy",
        type=count,
        metavar="G",
        help="Replicas that share each of F + 1 copies of the optimizer state, for templates; 1: each has all of it (1).",
    )
    how.add_argument("--prefer", choices=("time", "per-gpu"), default="time", help="Shortest step, or most tokens/s per GPU.")
    how.add_argument(
        "--simulate-all", action="store_true", help="Predict from whole steps of all replicas, however long that takes."
    )
    how.add_argument("--plan", type=_given_plan, metavar="plan.yaml", help="Refused: tools/simulate.py evaluates a given plan.")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="plan.yaml", help="Write the plan, for pretrain_mllm.py --plan.")
    output.add_argument(
        "--output-plan", type=Path, metavar="plan.yaml", help="Write the plan of the templates' replicas at the start."
    )
    output.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    output.add_argument("--picture", type=Path, metavar="OUT.png", help="Draw the compared plans' step times.")
    return parser


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


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    known = (*PLANNERS, *TEMPLATE_PLANNERS)
    if unknown := [name for name in names if name not in known and name != "all"]:
        raise argparse.ArgumentTypeError(f"there is no planner '{unknown[0]}'; choose from {', '.join(known)}, or all")
    return known if "all" in names else names


def _given_plan(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        f"this tool finds plans; python tools/simulate.py --plan {text} --json, with the flags that stand in the plan file, "
        "evaluates a given one"
    )


def _fixed(text: str) -> tuple[str, FixedSizes]:
    unit, separator, sizes = text.partition(":")
    pairs = [entry.partition("=") for entry in sizes.split(",")]
    if not unit or not separator or any(name not in SIZE_NAMES for name, _, _ in pairs):
        raise argparse.ArgumentTypeError(f"expected UNIT:tp=N,cp=N,pp=N,dp=N,v=N,ep=N with some of the six, found '{text}'")
    return unit, FixedSizes(**{SIZE_NAMES[name]: count(number) for name, _, number in pairs})


def build_request(flags: argparse.Namespace) -> PlanningRequest:
    """Read the files; raises BraidError."""
    if (flags.lengths is None) == (flags.uniform_lengths is None):
        raise ConfigError("give exactly one of --lengths and --uniform-lengths")
    graph = freeze_units(read_model(flags.model), modules=flags.freeze, projectors=flags.freeze_projector)
    if flags.lora_rank is not None:
        graph = adapt_units(graph, linear_layers(graph), rank=flags.lora_rank, alpha=None, targets=flags.lora_targets)
    elif flags.lora_targets:
        raise ConfigError("--lora-targets would be ignored: there are no adapters; add --lora-rank N or leave it out")
    if flags.lengths is not None:
        lengths = read_length_table(flags.lengths, graph=graph)
    else:
        lengths = uniform_lengths(graph, tokens=flags.uniform_lengths, num_samples=1)
    return PlanningRequest(
        graph,
        Cluster.from_file(flags.cluster),
        flags.num_gpus,
        flags.global_batch_size,
        lengths,
        micro_batch_size=flags.micro_batch_size,
        vocab_size=flags.vocab_size or graph.backbone.vocab_size or DEFAULT_VOCAB_SIZE,
        fixed_sizes=dict(flags.fix),
        recompute=flags.recompute_granularity,
        transformer_impl=flags.transformer_impl,
        sharding=flags.data_parallel_sharding_strategy,
        profile=LayerProfile.from_file(flags.layer_costs) if flags.layer_costs else None,
        memory_headroom=flags.memory_headroom,
        time_budget_seconds=flags.time_budget,
        on_progress=_say if sys.stderr.isatty() else None,
        num_batches=flags.num_iterations,
    )


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def plan(name: str, request: PlanningRequest, flags: argparse.Namespace) -> PredictedRun:
    """Let one planner plan; raises PlanError."""
    max_actions = None if flags.simulate_all else request.max_actions
    plan_best = partial(PLANNERS[name].plan_best, max_actions=max_actions)
    planner = partial(plan_per_gpu, plan_best) if flags.prefer == "per-gpu" else plan_best
    return plan_or_advise(PLANNERS[name], request, max_actions=max_actions, plan=planner)


def size_of_checkpoint(run: PlannedRun, request: PlanningRequest) -> CheckpointSize:
    """Return the size of a checkpoint under a plan."""
    bytes_per_element = request.cluster.bytes_per_element
    zero_stage = default_zero_stage(bytes_per_element) if run.sharding == "optim" else 3
    layers = StageLayers(request.graph, run.plan, request.vocab_size)
    return checkpoint_size(layers, bytes_per_element=bytes_per_element, zero_stage=zero_stage)


def report(planned: PredictedRun, request: PlanningRequest, *, filling: FillingReport | None = None) -> dict[str, Any]:
    """Return the JSON object of one plan; filling: of one whose schedule fills bubbles."""
    run, prediction = planned
    graph = request.graph
    return {
        "planner": run.planner,
        "iteration_seconds": prediction.iteration_seconds,
        "ideal_seconds": prediction.ideal_seconds,
        "mfu": prediction.mfu,
        "num_gpus_used": run.num_gpus,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "units": {name: unit_sizes(unit) for name, unit in run.plan.units.items()},
        "planning_seconds": run.planning_seconds,
        "bubble": dict(prediction.bubble),
        "floor_seconds": prediction.floor_seconds,
        "busiest_seconds": prediction.busiest_seconds,
        "above_floor": dict(prediction.above_floor),
        "schedule": run.schedule,
        "schedule_passes": list(run.passes),
        "balance": run.balance,
        "micro_batch_size": run.micro_batch_size,
        "recompute_granularity": run.recompute,
        "transformer_impl": run.transformer_impl,
        "tp_comm_overlap": run.tp_comm_overlap,
        "data_parallel_sharding_strategy": run.sharding,
        "objective_seconds": run.objective_seconds,
        "max_communicators_per_rank": max_communicators_per_rank(graph, run.plan),
        "checkpoint": size_of_checkpoint(run, request)._asdict(),
        "replica_share": prediction.replica_share,
        "notes": list(run.notes),
        **(asdict(filling) if filling else {}),
    }


def unit_sizes(unit: UnitPlan) -> dict[str, int | list[int]]:
    """Name the sizes of one unit; where replicas differ, of each its stages, and the tensor parallel sizes that there are."""
    counts = [len(replica.stages) for replica in unit.replicas]
    return {
        "dp": unit.data_parallel_size,
        "tp": list(unit.tensor_sizes) if unit.is_unlike else unit.tensor_sizes[0],
        "cp": unit.context_parallel_size,
        "pp": counts if unit.is_unlike else counts[0],
        "ep": unit.expert_parallel_size,
        "virtual_stages": max(len(stage.layer_ranges) for stage in unit.replicas[0].stages),
        "gpus": len(set(unit.ranks)),
    }


def _shown(size: int | list[int]) -> str:
    return str(size) if isinstance(size, int) else "/".join(map(str, size))


def print_plan(planned: PredictedRun, request: PlanningRequest, *, cluster: Path) -> None:
    """Print one plan for a person."""
    console = Console(width=120, highlight=False)
    run, prediction = planned
    console.print(
        f"{run.planner}: {run.num_gpus} of {request.num_gpus} GPUs, planned in {format_seconds(run.planning_seconds)}\n"
        f"iteration {format_seconds(prediction.iteration_seconds)} (ideal {format_seconds(prediction.ideal_seconds)}, "
        f"floor {format_seconds(prediction.floor_seconds)}, busiest ranks {format_seconds(prediction.busiest_seconds)}), "
        f"MFU {prediction.mfu:.1%}, {prediction.tokens_per_second_per_gpu:.5g} tokens/s per GPU\n"
        f"peak memory {prediction.peak_memory_bytes / 1e9:.2f} GB of {request.cluster.memory_gb:g} GB"
        f"\n{size_of_checkpoint(run, request).describe()}"
    )
    if BUILDERS[run.schedule].can_train:
        console.print(run.training_flags(cluster))
    columns = ("tp", "cp", "pp", "virtual_stages", "dp", *(["ep"] if run.plan.units_with_shared_experts else []), "gpus")
    titles = ("virtual" if each == "virtual_stages" else "GPUs" if each == "gpus" else each for each in columns)
    units = Table("unit", *titles, "transformer layers per stage", box=None)
    for name, unit in run.plan.units.items():
        sizes = unit_sizes(unit)
        replicas = unit.replicas if unit.is_unlike else unit.replicas[:1]
        counts = [[sum(end - first for first, end in stage.layer_ranges) for stage in replica.stages] for replica in replicas]
        layers = " | ".join(", ".join(map(str, of_replica)) for of_replica in counts)
        units.add_row(name, *(_shown(sizes[key]) for key in columns), layers)
    console.print(units)
    above = Table("above the floor", "share of the step", box=None)
    for kind, share in prediction.above_floor.items():
        above.add_row(kind, f"{share:.2%}")
    console.print(above)
    for note in run.notes:
        console.print(note)


def print_comparison(compared: Mapping[str, PredictedRun | str]) -> None:
    """Print all planners' plans in one table, and below it the errors of those that found none."""
    console = Console(width=140, highlight=False)
    best = min((run.prediction.iteration_seconds for run in compared.values() if isinstance(run, PredictedRun)), default=0.0)
    shares = ("of best", "ideal/step", "floor/step", "MFU")
    table = Table("planner", "step", *shares, "GPUs", "GB", "planned in", "units: tp x cp x pp x dp")
    for name, other in compared.items():
        if isinstance(other, str):
            table.add_row(name, *("-",) * 8, "no plan")
            continue
        run, prediction = other
        units = ", ".join(
            f"{unit} " + "x".join(_shown(unit_sizes(plan)[key]) for key in ("tp", "cp", "pp", "dp"))
            for unit, plan in run.plan.units.items()
        )
        table.add_row(
            name,
            format_seconds(prediction.iteration_seconds),
            f"{prediction.iteration_seconds / best:.3f}",
            f"{prediction.ideal_seconds / prediction.iteration_seconds:.3f}",
            f"{prediction.floor_seconds / prediction.iteration_seconds:.3f}",
            f"{prediction.mfu:.1%}",
            str(run.num_gpus),
            f"{prediction.peak_memory_bytes / 1e9:.1f}",
            format_seconds(run.planning_seconds),
            units,
        )
    console.print(table)
    for name, other in compared.items():
        if isinstance(other, str):
            console.print(f"{name}: {other}")


def draw_plans(predictions: Mapping[str, Prediction], path: str | Path) -> None:
    """Write a PNG with horizontal bars, shortest step first; needs matplotlib (the extra `plots`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(predictions.items(), key=lambda entry: entry[1].iteration_seconds, reverse=True)
    figure = Figure(figsize=(9.0, 1.4 + 0.4 * len(ordered)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kinds = tuple(ordered[0][1].bubble)
    left = [0.0] * len(ordered)
    for kind, color in zip(("computing", *kinds), COLORS, strict=True):
        widths = [
            each.iteration_seconds * (each.bubble[kind] if kind in each.bubble else max(0.0, 1 - sum(each.bubble.values())))
            for _, each in ordered
        ]
        axes.barh([name for name, _ in ordered], widths, left=left, color=color, label=kind, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, (_, each) in enumerate(ordered):
        label = f" {each.iteration_seconds:.3g} s, MFU {each.mfu:.1%}"
        axes.text(each.iteration_seconds, row, label, va="center", fontsize=8)
    axes.set_xlim(0, 1.25 * max(each.iteration_seconds for _, each in ordered))
    axes.set_xlabel("seconds per step, over all GPUs")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def compare(flags: argparse.Namespace, request: PlanningRequest, main_plan: PredictedRun) -> dict[str, PredictedRun | str]:
    """Let all compared planners plan; those that cannot give their error's text."""
    compared: dict[str, PredictedRun | str] = {}
    for name in dict.fromkeys((*flags.compare, flags.planner)):
        try:
            if name in TEMPLATE_PLANNERS:
                compared[name] = plan_first_instances(name, request, 0)[1]  # as the others: with no node to spare
            else:
                compared[name] = main_plan if name == flags.planner else plan(name, request, flags)
        except BraidError as problem:
            compared[name] = str(problem)
    return compared


def made_for(flags: argparse.Namespace) -> dict[str, str]:
    """Return name -> value of the inputs that the plan was made from, for the plan file."""
    inputs = {"model": str(flags.model), "cluster": str(flags.cluster), "lengths": str(flags.lengths or _uniform(flags))}
    inputs |= {"global batch size": str(flags.global_batch_size)}
    frozen = [*flags.freeze, *(f"{unit} (projector)" for unit in flags.freeze_projector)]
    inputs |= {"frozen": ", ".join(frozen)} if frozen else {}
    adapters = f"rank {flags.lora_rank}: {', '.join(flags.lora_targets) or 'the LLM'}"
    return {**inputs, "adapters": adapters} if flags.lora_rank is not None else inputs


def _uniform(flags: argparse.Namespace) -> str:
    return ",".join(f"{unit}={count}" for unit, count in flags.uniform_lengths.items())


def simulate_flags(flags: argparse.Namespace, request: PlanningRequest, run: PlannedRun) -> str:
    """Return the flags of tools/simulate.py that reproduce the prediction; empty where units are frozen or adapted."""
    if flags.freeze or flags.freeze_projector or flags.lora_rank is not None:
        return ""
    data = (
        f"--lengths {flags.lengths} --seed {SEED} --num-iterations {flags.num_iterations}"
        if flags.lengths
        else f"--uniform-lengths {_uniform(flags)}"
    )
    return (
        f"--model {flags.model} --cluster {flags.cluster} {data} --global-batch-size {flags.global_batch_size} "
        f"--vocab-size {request.vocab_size} {run.simulation_flags}"
    )


def run(argv: Sequence[str]) -> None:
    """Plan, compare, write and print as the flags ask; raises BraidError."""
    flags = build_parser().parse_args(argv)
    request = build_request(flags)
    if flags.planner in TEMPLATE_PLANNERS:
        run_templates(flags, request)
        return
    if flags.fault_tolerance is not None:
        raise ConfigError(f"--fault-tolerance is for --planner {', '.join(TEMPLATE_PLANNERS)}; leave it out, or choose that")
    if flags.replicas_per_copy is not None:
        raise ConfigError(f"--replicas-per-copy is for --planner {', '.join(TEMPLATE_PLANNERS)}; leave it out, or choose that")
    if flags.output_plan is not None:
        raise ConfigError(f"--output-plan is for --planner {', '.join(TEMPLATE_PLANNERS)}; use --output")
    planned, filling = with_filling(plan(flags.planner, request, flags), request)
    compared = compare(flags, request, planned) if flags.compare else {flags.planner: planned}
    if flags.output is not None:
        write_plan_file(
            flags.output,
            planned.run,
            planned.prediction,
            made_for=made_for(flags),
            cluster=flags.cluster,
            simulate_flags=simulate_flags(flags, request, planned.run),
        )
    if flags.picture is not None:
        draw_plans({name: other.prediction for name, other in compared.items() if isinstance(other, PredictedRun)}, flags.picture)
    if flags.json:
        answer = report(planned, request, filling=filling)
        if flags.compare:
            answer["compare"] = {
                name: {"error": other}
                if isinstance(other, str)
                else report(other, request, filling=report_filling(other.run, request))
                for name, other in compared.items()
            }
        print(json.dumps(answer))
        return
    print_plan(planned, request, cluster=flags.cluster)
    if flags.compare:
        print_comparison(compared)


def plan_first_instances(
    name: str, request: PlanningRequest, fault_tolerance: int, replicas_per_copy: int = 1
) -> tuple[TemplateSet, PredictedRun]:
    """Plan templates; return them and the run of the replicas that they are used for at first. Raises PlanError."""
    started = time.perf_counter()
    templates = TEMPLATE_PLANNERS[name](request, fault_tolerance=fault_tolerance, replicas_per_copy=replicas_per_copy)
    found = run_of_templates(templates, request, planner=name)
    found = replace(found, planning_seconds=time.perf_counter() - started)
    predicted = predict_run(found, request, max_actions=request.max_actions, num_batches=request.num_batches)
    return templates, PredictedRun(found, predicted)


def run_templates(flags: argparse.Namespace, request: PlanningRequest) -> None:
    """Plan templates, write and print them as the flags ask; raises BraidError."""
    if flags.compare or flags.picture or flags.prefer != "time" or flags.simulate_all:
        raise ConfigError(
            f"--planner {flags.planner} plans templates, not one plan; leave --compare, --picture, --prefer, --simulate-all out"
        )
    started = time.perf_counter()
    fault_tolerance = DEFAULT_FAULT_TOLERANCE if flags.fault_tolerance is None else flags.fault_tolerance
    if flags.output_plan is None:
        planner = TEMPLATE_PLANNERS[flags.planner]
        templates = planner(request, fault_tolerance=fault_tolerance, replicas_per_copy=flags.replicas_per_copy or 1)
        seconds = time.perf_counter() - started
    else:
        templates, planned = plan_first_instances(flags.planner, request, fault_tolerance, flags.replicas_per_copy or 1)
        seconds = planned.run.planning_seconds
        write_plan_file(
            flags.output_plan,
            *planned,
            made_for=made_for(flags),
            cluster=flags.cluster,
            simulate_flags=simulate_flags(flags, request, planned.run),
        )
    if flags.output is not None:
        templates.to_file(flags.output)
    if flags.json:
        print(json.dumps({"planner": flags.planner, **report_templates(templates), "planning_seconds": seconds}))
        return
    console = Console(width=120, highlight=False)
    console.print(f"{flags.planner}: planned in {format_seconds(seconds)}")
    for line in describe_templates(templates):
        console.print(line, markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 2, with one line on stderr, for wrong input."""
    return run_tool("plan.py", run, argv)


if __name__ == "__main__":
    sys.exit(main())
