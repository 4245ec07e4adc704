"""Shows plans: as a JSON object, as tables for a person, as a picture."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import CheckpointSize, checkpoint_size, default_zero_stage
from multimodal.plan.communicators import max_communicators_per_rank
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import Prediction
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.values.plan import UnitPlan
from tools.command_line import format_seconds
from tools.filling_report import FillingReport

COLORS = ("#4878a8", "#b0b0b0", "#8c8c8c", "#e8a33d", "#d96b4c", "#c9c15a", "#8f6fae")
"""Color of computations, followed by those of the kinds of idle time."""
_OF_RUN = (
    *("planner", "planning_seconds", "objective_seconds", "schedule", "balance", "micro_batch_size", "transformer_impl"),
    *("tp_comm_overlap", "notes"),
)
_OF_PREDICTION = (
    *("iteration_seconds", "ideal_seconds", "floor_seconds", "busiest_seconds", "mfu", "tokens_per_second_per_gpu"),
    *("peak_memory_bytes", "bubble", "above_floor", "replica_share"),
)
"""Fields of a run and of its prediction that its JSON object has under their names."""


def size_of_checkpoint(run: PlannedRun, request: PlanningRequest) -> CheckpointSize:
    """Return the size of a checkpoint under a plan."""
    bytes_per_element = request.cluster.bytes_per_element
    zero_stage = default_zero_stage(bytes_per_element) if run.sharding == "optim" else 3
    layers = StageLayers(request.graph, run.plan, request.vocab_size)
    return checkpoint_size(layers, bytes_per_element=bytes_per_element, zero_stage=zero_stage)


def report(planned: PredictedRun, request: PlanningRequest, *, filling: FillingReport | None = None) -> dict[str, Any]:
    """Return the JSON object of one plan; filling: of a plan whose schedule fills bubbles."""
    run, prediction = planned
    return {
        **{name: getattr(run, name) for name in _OF_RUN},
        **{name: getattr(prediction, name) for name in _OF_PREDICTION},
        "num_gpus_used": run.num_gpus,
        "units": {name: unit_sizes(unit) for name, unit in run.plan.units.items()},
        "schedule_passes": run.passes,
        "encoder_micro_batch_sizes": dict(run.encoder_micro_batch_sizes),
        "recompute_granularity": run.recompute,
        "data_parallel_sharding_strategy": run.sharding,
        "max_communicators_per_rank": max_communicators_per_rank(request.graph, run.plan),
        "checkpoint": size_of_checkpoint(run, request)._asdict(),
        **(asdict(filling) if filling else {}),
    }


def unit_sizes(unit: UnitPlan) -> dict[str, int | list[int]]:
    """Return the sizes of one unit by name; if replicas differ: the stages of each, and all tensor parallel sizes."""
    counts = [len(replica.stages) for replica in unit.replicas]
    return {
        "dp": unit.data_parallel_size,
        "tp": list(unit.tensor_sizes) if unit.is_unlike else unit.tensor_sizes[0],
        "cp": unit.context_parallel_size,
        "pp": counts if unit.is_unlike else counts[0],
        "ep": unit.expert_parallel_size,
        "virtual_stages": max(len(stage.layer_ranges) for replica in unit.replicas for stage in replica.stages),
        "gpus": len(set(unit.ranks)),
    }


def _shown(size: int | list[int]) -> str:
    return str(size) if isinstance(size, int) else "/".join(map(str, size))


def print_plan(planned: PredictedRun, request: PlanningRequest, *, cluster: Path) -> None:
    """Print one plan."""
    from rich.console import Console
    from rich.table import Table

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
    if run.can_run:
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
    from rich.console import Console
    from rich.table import Table

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
    from matplotlib.figure import Figure

    ordered = sorted(predictions.items(), key=lambda entry: entry[1].iteration_seconds, reverse=True)
    figure = Figure(figsize=(9.0, 1.4 + 0.4 * len(ordered)), dpi=110, layout="constrained")
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


def report_templates(templates: TemplateSet) -> dict[str, Any]:
    """Return the JSON object of a set."""
    times = templates.times
    names = ["fewest_nodes", "micro_batch_size", "num_microbatches", "recompute_granularity"]
    return {
        "num_nodes": templates.num_nodes,
        "gpus_per_node": templates.gpus_per_node,
        **asdict(templates.tolerance),
        **{name: getattr(templates, name) for name in names},
        "units": {unit.name: unit.num_layers for unit in templates.chain},
        "iteration_seconds": templates.step_seconds,
        "templates": [
            {
                "nodes": template.nodes,
                "stages": [[stage.first_layer, stage.last_layer, stage.gpus] for stage in template.stages],
                "iteration_seconds": template.iteration_seconds,
                "num_microbatches": template.num_microbatches,
            }
            for template in templates.templates
        ],
        "instances": [
            asdict(each) | {"seconds": times[each.nodes].seconds(each.num_microbatches)} for each in templates.instances
        ],
    }


def describe_templates(templates: TemplateSet) -> Iterator[str]:
    """Yield the lines that describe a set."""
    used = Counter((each.nodes, each.num_microbatches) for each in templates.instances)
    first = ", ".join(f"{count} of {nodes} nodes with {share} microbatches each" for (nodes, share), count in used.items())
    recomputing = f", recomputing {templates.recompute_granularity}" if templates.recompute_granularity else ""
    yield (
        f"templates of {templates.least_nodes} to {templates.most_nodes} nodes of {templates.gpus_per_node} GPUs; "
        f"{templates.tolerance}: runs on {templates.fewest_nodes} nodes and more"
    )
    yield (
        f"{templates.num_nodes} nodes at first: {first} of {templates.micro_batch_size} samples{recomputing}; "
        f"a step takes {templates.step_seconds:.4g} s"
    )
    for template in templates.templates:
        shapes = groupby(f"{len(stage.layers)}x{stage.gpus}" for stage in template.stages)
        runs = ((shape, len(list(run))) for shape, run in shapes)
        yield (
            f"{template.nodes} nodes: {template.iteration_seconds:.4g} s for {template.num_microbatches} microbatches; stages "
            f"(layers x GPUs) {' '.join(shape if count == 1 else f'{shape} ({count} times)' for shape, count in runs)}"
        )
