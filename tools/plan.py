"""Finds a plan for a model, a machine and a data set, and prints its predicted step time and memory; see docs/planning.md.

python tools/plan.py --model M.yaml --cluster C.yaml --num-gpus N --global-batch-size B --lengths L.csv.gz --output plan.yaml
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baselines import COMPARED
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.layer import Implementation
from multimodal.cost.layers.registry import read_model
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.plan.planners import TEMPLATE_PLANNERS, plan_or_advise
from multimodal.plan.planners.planned_run import PlannedRun, Sharding
from multimodal.plan.planners.planning_request import SEED, FixedSizes, PlanningRequest
from multimodal.values.errors import BraidError, ConfigError
from tools.command_line import Parser, count, format_seconds, padded_vocab_size, program, read_lengths

if TYPE_CHECKING:
    from multimodal.plan.planners.search.goodput import Failures
    from multimodal.plan.planners.search.plan_to_fit import PredictedRun
    from multimodal.plan.planners.templates.template_set import TemplateSet

DEFAULT_FAULT_TOLERANCE = 1
SIZE_NAMES = {
    "ep": "expert_parallel_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "v": "virtual_pipeline_size",
}


def add_request_flags(parser: Parser) -> None:
    """Add the flags that `build_request` reads."""
    add = parser.add_argument_group("the model and the machine").add_argument
    add("--model", type=Path, required=True, metavar="M.yaml", help="Units and shapes; see examples/models.")
    add("--freeze", nargs="+", default=[], metavar="UNIT", help="Units whose module is not trained.")
    add("--freeze-projector", nargs="+", default=[], metavar="UNIT", help="Units whose projector is not trained.")
    add("--lora-rank", type="count", metavar="N", help="Train adapters of this rank, as pretrain_mllm.py does.")
    add("--lora-targets", nargs="+", default=[], metavar="PATTERN", help="Linear layers with adapters (the LLM's).")
    add("--cluster", type=Path, required=True, metavar="C.yaml", help="GPUs and links; see examples/clusters.")
    add("--layer-costs", type=Path, metavar="COSTS.yaml", help="Measured layers, from tools/profile_layers.py.")
    add("--num-gpus", type="count", required=True, metavar="N", help="The most GPUs that the plan may use.")
    add("--vocab-size", type="count", metavar="N", help="Padded vocabulary of the LLM (the model file's, or 50304).")
    add = parser.add_argument_group("the data").add_argument
    add("--global-batch-size", type="count", required=True, metavar="B", help="Samples per step.")
    add("--micro-batch-size", type="count", metavar="N", help="Samples per LLM microbatch (the best for each planner).")
    add("--lengths", type=Path, metavar="L.csv.gz", help="Lengths of real samples, drawn at random.")
    add("--uniform-lengths", type="counts_by_unit", metavar="UNIT=TOKENS,...", help="One length for all samples.")
    add("--num-iterations", type="count", default=2, metavar="N", help="Global batches that predictions average (2).")
    add = parser.add_argument_group("sizes and memory").add_argument
    add("--fix", type=_fixed, nargs="+", default=[], metavar="UNIT:tp=2,pp=4", help="A unit's sizes: tp, cp, pp, dp, v, ep.")
    add("--recompute-granularity", choices=("selective", "full"), help="Recompute this (only where nothing fits).")
    add("--transformer-impl", choices=get_args(Implementation), help="Whose layers run (the fused ones where they can).")
    add("--data-parallel-sharding-strategy", choices=get_args(Sharding), help="What replicas share (optim; braid searches).")
    add("--num-distributed-optimizer-instances", type="count", metavar="N", help="Copies of what replicas share (1).")
    add("--memory-headroom", type=float, default=0.1, metavar="SHARE", help="Of a GPU's memory, kept free (0.1).")
    add("--time-budget", type=float, default=30.0, metavar="SECONDS", help="Nominal, for planners that simulate (30).")


def _fixed(text: str) -> tuple[str, FixedSizes]:
    unit, separator, sizes = text.partition(":")
    pairs = [entry.partition("=") for entry in sizes.split(",")]
    if not unit or not separator or any(name not in SIZE_NAMES for name, _, _ in pairs):
        raise argparse.ArgumentTypeError(f"expected UNIT:tp=N,cp=N,pp=N,dp=N,v=N,ep=N with some of the six, found '{text}'")
    return unit, FixedSizes(**{SIZE_NAMES[name]: count(number) for name, _, number in pairs})


def build_request(flags: argparse.Namespace) -> PlanningRequest:
    """Read the files that the flags name, and build the request; raises BraidError."""
    from megatron.runtime.flags.arguments import choose_trained
    from megatron.runtime.flags.configuration import ModelConfig

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
        num_state_copies=None if flags.num_distributed_optimizer_instances == 1 else flags.num_distributed_optimizer_instances,
        profile=LayerProfile.from_file(flags.layer_costs) if flags.layer_costs else None,
        memory_headroom=flags.memory_headroom,
        time_budget_seconds=flags.time_budget,
        on_progress=partial(print, file=sys.stderr, flush=True) if sys.stderr.isatty() else None,
        num_batches=flags.num_iterations,
    )


def build_parser() -> Parser:
    """Return the parser of all flags."""
    parser = Parser(prog="plan.py", description=__doc__)
    add_request_flags(parser)
    add = parser.add_argument_group("the planner").add_argument
    add("--planner", choices=(*COMPARED, *TEMPLATE_PLANNERS), default="braid", help="Finds the plan (braid).")
    add("--compare", type=_names, default=(), metavar="P1,P2,...", help="Show these planners' plans beside it.")
    add("--fault-tolerance", type="at_least_zero", metavar="F", help="Nodes that may be lost at once, for templates (1).")
    add(
        "--replicas-per-copy",
        type="count",
        metavar="G",
        help="Replicas that share one of the F + 1 copies of the optimizer state (1).",
    )
    add("--prefer", choices=("time", "per-gpu"), default="time", help="Shortest step, or most tokens/s per GPU.")
    add("--mtbf-hours", type="positive", metavar="H", help="Plan for what the run delivers if nodes fail this often.")
    add("--repair-hours", type="positive", metavar="H", help="--mtbf-hours: until a failed node is back (24).")
    add("--restart-minutes", type="positive", metavar="M", help="--mtbf-hours: from a failure until steps run again (10).")
    add("--checkpoint-minutes", type="positive", metavar="M", help="--mtbf-hours: between two checkpoints (30).")
    add("--simulate-all", action="store_true", help="Predict from whole steps of all replicas, however long that takes.")
    add("--plan", type=_given_plan, metavar="plan.yaml", help="Refused: tools/simulate.py evaluates a given plan.")
    add = parser.add_argument_group("output").add_argument
    add("--output", type=Path, metavar="plan.yaml", help="Write the plan, for pretrain_mllm.py --plan.")
    add("--output-plan", type=Path, metavar="plan.yaml", help="Write the plan of the templates' replicas at the start.")
    add("--json", action="store_true", help="Print one JSON object instead of tables.")
    add("--picture", type=Path, metavar="OUT.png", help="Draw the compared plans' step times.")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    known = (*COMPARED, *TEMPLATE_PLANNERS)
    if unknown := [name for name in names if name not in known and name != "all"]:
        raise argparse.ArgumentTypeError(f"there is no planner '{unknown[0]}'; choose from {', '.join(known)}, or all")
    return known if "all" in names else names


def _given_plan(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        f"this tool finds plans; python tools/simulate.py --plan {text} --json, with the flags that stand in the plan file, "
        "evaluates a given one"
    )


def plan(name: str, request: PlanningRequest, flags: argparse.Namespace) -> "PredictedRun":
    """Plan with one planner; raises PlanError."""
    from multimodal.plan.planners.search.goodput import plan_for_goodput  # behind the flags, like all that they do not list
    from multimodal.plan.planners.search.plan_to_fit import plan_per_gpu

    row, failures = COMPARED[name], failures_of(flags)
    planner = partial(plan_per_gpu, row.plan_best) if flags.prefer == "per-gpu" else row.plan_best
    if failures is not None:
        planner = partial(plan_for_goodput, row.plan_best, failures=failures)
    return plan_or_advise(row, request, plan=planner)


def failures_of(flags: argparse.Namespace) -> "Failures | None":
    """Return the failures that the plan is made for, if any; raises ConfigError."""
    from multimodal.plan.planners.search.goodput import Failures

    given = {name: getattr(flags, name) for name in Failures.__dataclass_fields__ if getattr(flags, name) is not None}
    if given and "mtbf_hours" not in given:
        name = next(iter(given)).replace("_", "-")
        raise ConfigError(f"--{name} would be ignored: no failures are planned for; add --mtbf-hours or leave it out")
    if given and flags.prefer != "time":
        raise ConfigError("--mtbf-hours plans for what a run delivers, --prefer per-gpu for tokens per GPU; leave one out")
    return Failures(**given) if given else None


def compare(flags: argparse.Namespace, request: PlanningRequest, main_plan: "PredictedRun") -> "dict[str, PredictedRun | str]":
    """Plan with all compared planners; returns the error text of those that fail."""
    compared: dict[str, PredictedRun | str] = {}
    for name in dict.fromkeys((*flags.compare, flags.planner)):
        try:
            if name in TEMPLATE_PLANNERS:
                templates, seconds = plan_replicas(name, request, 0)  # like the others: without spare nodes
                compared[name] = predict_first(templates, request, planner=name, planning_seconds=seconds)
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
    """Return the flags of tools/simulate.py that reproduce the prediction; empty if units are frozen or adapted."""
    if flags.freeze or flags.freeze_projector or flags.lora_rank is not None:
        return ""
    if flags.lengths:
        data = f"--lengths {flags.lengths} --seed {SEED} --num-iterations {flags.num_iterations}"
    else:
        data = f"--uniform-lengths {_uniform(flags)}"
    return (
        f"--model {flags.model} --cluster {flags.cluster} {data} --global-batch-size {flags.global_batch_size} "
        f"--vocab-size {request.vocab_size} {run.simulation_flags}"
    )


def write_plan(path: Path, planned: "PredictedRun", request: PlanningRequest, flags: argparse.Namespace) -> None:
    """Write a commented YAML file that `Plan.from_file` reads."""
    from multimodal.plan.planners.plan_file import plan_text

    again = simulate_flags(flags, request, planned.run)
    path.write_text(plan_text(path.name, *planned, made_for=made_for(flags), cluster=flags.cluster, simulate_flags=again))


@program("plan.py")
def main(argv: Sequence[str]) -> None:
    """Plan, compare, write and print according to the flags; raises BraidError."""
    flags = build_parser().parse_args(argv)
    request = build_request(flags).changed(simulates_whole_steps=flags.simulate_all)
    if flags.planner in TEMPLATE_PLANNERS:
        run_templates(flags, request)
        return
    for flag in ("fault_tolerance", "replicas_per_copy", "output_plan"):
        if getattr(flags, flag) is not None:
            advice = "use --output" if flag == "output_plan" else "leave it out, or choose that"
            raise ConfigError(f"--{flag.replace('_', '-')} is for --planner {', '.join(TEMPLATE_PLANNERS)}; {advice}")
    from multimodal.plan.planners.search.goodput import goodput_of
    from tools.filling_report import report_filling, with_filling
    from tools.show_plans import draw_plans, print_comparison, print_plan, report

    planned, filling = with_filling(plan(flags.planner, request, flags), request)
    compared = compare(flags, request, planned) if flags.compare else {flags.planner: planned}
    if flags.output is not None:
        write_plan(flags.output, planned, request, flags)
    if flags.picture is not None:
        draw_plans({name: other.prediction for name, other in compared.items() if not isinstance(other, str)}, flags.picture)
    if flags.json:
        answer = report(planned, request, filling=filling)
        if failures := failures_of(flags):
            answer["goodput"] = goodput_of(planned, request, failures)._asdict()
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


def plan_replicas(
    name: str, request: PlanningRequest, fault_tolerance: int, replicas_per_copy: int = 1
) -> "tuple[TemplateSet, float]":
    """Plan templates; return them and the seconds that it took. Raises PlanError."""
    started = time.perf_counter()
    templates = TEMPLATE_PLANNERS[name](request, fault_tolerance=fault_tolerance, replicas_per_copy=replicas_per_copy)
    return templates, time.perf_counter() - started


def predict_first(templates: "TemplateSet", request: PlanningRequest, *, planner: str, planning_seconds: float) -> "PredictedRun":
    """Return the run of the templates' first replicas; raises PlanError."""
    from multimodal.plan.planners.search.plan_to_fit import PredictedRun
    from multimodal.plan.planners.search.prediction import judge_run
    from multimodal.plan.planners.templates.template_plan import run_of_templates

    found = replace(run_of_templates(templates, request, planner=planner), planning_seconds=planning_seconds)
    return PredictedRun(found, judge_run(found, request))


def run_templates(flags: argparse.Namespace, request: PlanningRequest) -> None:
    """Plan, write and print templates according to the flags; raises BraidError."""
    is_searched = flags.compare or flags.picture or flags.prefer != "time" or flags.simulate_all or failures_of(flags)
    if is_searched or request.num_state_copies:
        raise ConfigError(
            f"--planner {flags.planner} plans templates, not one plan; leave --compare, --picture, --prefer, --simulate-all, "
            "--mtbf-hours and --num-distributed-optimizer-instances out; benchmarks/elastic.py simulates failures"
        )
    fault_tolerance = DEFAULT_FAULT_TOLERANCE if flags.fault_tolerance is None else flags.fault_tolerance
    templates, seconds = plan_replicas(flags.planner, request, fault_tolerance, flags.replicas_per_copy or 1)
    if flags.output_plan is not None:
        planned = predict_first(templates, request, planner=flags.planner, planning_seconds=seconds)
        write_plan(flags.output_plan, planned, request, flags)
    if flags.output is not None:
        templates.to_file(flags.output)
    from rich.console import Console

    from tools.show_plans import describe_templates, report_templates

    if flags.json:
        print(json.dumps({"planner": flags.planner, **report_templates(templates), "planning_seconds": seconds}))
        return
    console = Console(width=120, highlight=False)
    console.print(f"{flags.planner}: planned in {format_seconds(seconds)}")
    for line in describe_templates(templates):
        console.print(line, markup=False)


if __name__ == "__main__":
    sys.exit(main())
