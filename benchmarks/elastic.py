"""Simulates a run with pipeline templates while nodes come and go, beside restarts from checkpoints; see docs/elasticity.md.

python benchmarks/elastic.py --model M.yaml --cluster C.yaml --num-gpus N --global-batch-size B --lengths L.csv.gz --trace T.csv
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulate_trace import (
    Pauses,
    Simulated,
    Span,
    read_trace,
    simulate_restarts,
    simulate_templates,
)
from multimodal.cost.memoize import memoized
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.templates.plan_templates import plan_templates
from multimodal.plan.planners.templates.reconfigure import Reconfigurer, share_batch
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.values.errors import ConfigError, PlanError
from tools.command_line import Parser, at_least_zero, format_seconds, program
from tools.plan import DEFAULT_FAULT_TOLERANCE, add_request_flags, build_request
from tools.show_plans import describe_templates

COLORS = {"ideal": "#b0b0b0", "fresh plan": "#e8a33d", "templates": "#4878a8", "restarts": "#d96b4c"}


def build_parser() -> Parser:
    """Return the parser of all flags."""
    parser = Parser(prog="elastic.py", description=__doc__)
    add_request_flags(parser)
    run = parser.add_argument_group("the run")
    run.add_argument("--trace", type=Path, required=True, metavar="T.csv", help="Lines `seconds,nodes`, such as 3600,-2.")
    run.add_argument("--until", type=float, metavar="SECONDS", help="End of the run (the last change and a tenth more).")
    run.add_argument(
        "--fault-tolerance",
        type=at_least_zero,
        default=DEFAULT_FAULT_TOLERANCE,
        metavar="F",
        help=f"Nodes that may be lost at once ({DEFAULT_FAULT_TOLERANCE}).",
    )
    run.add_argument("--recovery-seconds", type=float, default=Pauses().recovery, help="Of noticing, agreeing, regrouping (3).")
    run.add_argument("--restart-seconds", type=float, default=Pauses().restart, help="Of a restart from a checkpoint (120).")
    run.add_argument(
        "--checkpoint-seconds", type=float, default=Pauses().checkpoint_interval, help="Between two checkpoints (600)."
    )
    run.add_argument("--seed", type=at_least_zero, default=0, help="Of the draw of the nodes that are lost (0).")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    output.add_argument("--picture", type=Path, metavar="OUT.png", help="Draw throughput over time.")
    return parser


@dataclass(frozen=True)
class FreshPlans:
    """The best plans for other numbers of nodes, each made when it is first requested."""

    request: PlanningRequest
    templates: TemplateSet

    def step_seconds(self, num_nodes: int, *, fault_tolerance: int = 0) -> float | None:
        """Return the step seconds of the best plan; None if no plan fits."""
        planned = self._plan(num_nodes, fault_tolerance)
        return planned.step_seconds if planned else None

    def alike_seconds(self, num_nodes: int) -> float | None:
        """Return the step seconds of the best plan whose replicas are all alike, on as many of the nodes as they need."""
        planned = self._plan(num_nodes, 0)
        if planned is None:
            return None
        times = planned.times
        alike = (
            share_batch(times, [size] * (num_nodes // size), num_microbatches=planned.num_microbatches).step_seconds
            for size in times
            if num_nodes // size <= planned.num_microbatches
        )
        return min(alike, default=None)

    @memoized
    def _plan(self, num_nodes: int, fault_tolerance: int) -> TemplateSet | None:
        gpus, size = num_nodes * self.templates.gpus_per_node, self.templates.micro_batch_size
        try:
            return plan_templates(self.request.changed(num_gpus=gpus, micro_batch_size=size), fault_tolerance=fault_tolerance)
        except PlanError:
            return None


@dataclass(frozen=True)
class Comparison:
    """Two simulated runs on one trace, and the best plans to compare them with."""

    templates: TemplateSet
    runs: Mapping[str, Simulated]
    fresh: FreshPlans
    until: float

    def samples_per_second(self, run: Simulated) -> float:
        """Return the mean throughput of a run."""
        return run.num_steps * self.samples_per_step / self.until

    @property
    def samples_per_step(self) -> int:
        """Return the global batch size."""
        return self.fresh.request.global_batch_size

    def throughput(self, span: Span, name: str) -> float:
        """Return samples per second in a span of a run: the run's own, or those of a best plan ("ideal", "fresh plan")."""
        seconds = span.step_seconds
        if name == "ideal":
            best = self.fresh.step_seconds(self.templates.num_nodes)
            return self.samples_per_step * span.num_nodes / self.templates.num_nodes / best if best else 0.0
        if name == "fresh plan":
            seconds = self.fresh.step_seconds(span.num_nodes, fault_tolerance=self.templates.tolerance.fault_tolerance)
        return self.samples_per_step / seconds if seconds else 0.0

    def least_share(self, *, fault_tolerance: int) -> float | None:
        """Return the least ratio, at any moment, of throughput to that of the best plan made anew with this fault tolerance."""
        spans = [span for span in self.runs["templates"].spans if span.step_seconds]
        fresh = ((self.fresh.step_seconds(span.num_nodes, fault_tolerance=fault_tolerance), span.step_seconds) for span in spans)
        return min((best / own for best, own in fresh if best and own), default=None)

    def mean(self, name: str) -> float:
        """Return the mean of `throughput` over all spans of the run with templates, weighted by time."""
        spans = self.runs["templates"].spans
        total = sum(self.throughput(span, name) * (span.end - span.start) for span in spans)
        return total / (spans[-1].end - spans[0].start)


def simulate(flags: argparse.Namespace) -> Comparison:
    """Plan and simulate according to the flags; raises BraidError."""
    pauses = Pauses(flags.recovery_seconds, flags.restart_seconds, flags.checkpoint_seconds)
    if min(pauses.recovery, pauses.restart) < 0 or pauses.checkpoint_interval <= 0:
        raise ConfigError("--recovery-seconds and --restart-seconds must be at least 0, and --checkpoint-seconds above 0")
    request = build_request(flags)
    templates = plan_templates(request, fault_tolerance=flags.fault_tolerance)
    changes = read_trace(flags.trace, num_nodes=templates.num_nodes)
    until = flags.until or max(1.1 * changes[-1].seconds if changes else 0.0, 3600.0)
    if until <= 0:
        raise ConfigError(f"--until must be above 0, found {until:g}")
    network = request.cluster.inter_node
    reconfigurer = Reconfigurer(
        templates,
        network.bandwidth_gbytes_per_second * 1e9 * network.nics_per_node,
        horizon_seconds=until / (1 + len(changes)),  # the mean between two changes
    )
    fresh = FreshPlans(request, templates)
    runs = {
        "templates": simulate_templates(reconfigurer, changes, until=until, pauses=pauses, seed=flags.seed),
        "restarts": simulate_restarts(fresh.alike_seconds, changes, num_nodes=templates.num_nodes, until=until, pauses=pauses),
    }
    return Comparison(templates, runs, fresh, until)


def report(compared: Comparison) -> dict[str, Any]:
    """Return the JSON object of a comparison."""
    kept = compared.templates.tolerance.fault_tolerance
    return {
        "num_nodes": compared.templates.num_nodes,
        "least_nodes": compared.templates.fewest_nodes,
        "seconds": compared.until,
        "samples_per_second": {name: compared.samples_per_second(run) for name, run in compared.runs.items()}
        | {name: compared.mean(name) for name in ("fresh plan", "ideal")},
        "least_share_of_fresh_plan": compared.least_share(fault_tolerance=kept),
        "least_share_of_fresh_plan_without_fault_tolerance": compared.least_share(fault_tolerance=0),
        "changes": [
            {"how": each.how, "nodes": [len(one.nodes) for one in each.pipelines], "copies": len(each.copies)}
            | {"copy_seconds": each.copy_seconds, "step_seconds": each.step_seconds, "missing_layers": list(each.missing_layers)}
            for each in compared.runs["templates"].changes
        ],
        "spans": {name: [span._asdict() for span in run.spans] for name, run in compared.runs.items()},
    }


def print_comparison(compared: Comparison) -> None:
    """Print throughput over time and its means as a table."""
    console = Console(width=120, highlight=False)
    for line in list(describe_templates(compared.templates))[:2]:
        console.print(line, markup=False)
    table = Table("from", "to", "nodes", "state", "step", "samples/s", "of fresh plan", "of ideal", box=None)
    for span in compared.runs["templates"].spans:
        own, fresh, ideal = (compared.throughput(span, name) for name in ("templates", "fresh plan", "ideal"))
        of_best = (f"{own / best:.3f}" if best else "-" for best in (fresh, ideal))
        step = format_seconds(span.step_seconds) if span.step_seconds else "-"
        table.add_row(f"{span.start:.1f}", f"{span.end:.1f}", str(span.num_nodes), span.state, step, f"{own:.4g}", *of_best)
    console.print(table)
    means = Table("samples per second, mean", "", "of ideal", box=None)
    ideal = compared.mean("ideal")
    found = {name: compared.samples_per_second(run) for name, run in compared.runs.items()}
    for name, each in {"ideal": ideal, "fresh plan": compared.mean("fresh plan"), **found}.items():
        means.add_row(name, f"{each:.4g}", f"{each / ideal:.3f}" if ideal else "-")
    console.print(means)
    kept = compared.templates.tolerance.fault_tolerance
    for name, tolerance in ((f"fault tolerance {kept}", kept), ("no fault tolerance", 0)):
        if (least := compared.least_share(fault_tolerance=tolerance)) is not None:
            console.print(f"while steps are run, at least {least:.4f} of the throughput of the best fresh plan with {name}")


def draw(compared: Comparison, path: str | Path) -> None:
    """Write a PNG of throughput over time, a panel a run, dotted without lost steps; needs matplotlib (the extra `plots`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), dpi=110, layout="constrained")
    panels = figure.subplots(len(compared.runs), sharex=True, sharey=True)
    for axes, (name, run) in zip(panels, compared.runs.items(), strict=True):
        edges = [*(span.start / 3600 for span in run.spans), run.spans[-1].end / 3600]
        for line in ("ideal", "fresh plan", name):
            heights = [compared.throughput(span, line) for span in run.spans]
            width, color = (1.6, COLORS[name]) if line == name else (1.0, COLORS[line])
            axes.stairs(heights, edges, fill=line == name, alpha=0.35 if line == name else 1.0, color=color, linewidth=width)
            axes.plot([], [], color=color, label=line)
        axes.axhline(compared.samples_per_second(run), color=COLORS[name], linestyle=":")
        axes.set_ylabel("samples per second")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, ncols=3, loc="lower right")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[-1].set_xlabel("hours")
    figure.savefig(path)


@program("elastic.py")
def main(argv: Sequence[str]) -> None:
    """Simulate, draw and print according to the flags; raises BraidError."""
    flags = build_parser().parse_args(argv)
    compared = simulate(flags)
    if flags.picture is not None:
        draw(compared, flags.picture)
    if flags.json:
        print(json.dumps(report(compared)))
        return
    print_comparison(compared)


if __name__ == "__main__":
    sys.exit(main())
