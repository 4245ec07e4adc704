"""Describes a set of templates for the user, and for other programs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from multimodal.plan.planners.templates.template_set import TemplateSet


def report_templates(templates: TemplateSet) -> dict[str, Any]:
    """Return the JSON object of a set."""
    times = templates.times
    names = ["num_nodes", "gpus_per_node", "fault_tolerance", "replicas_per_copy", "fewest_nodes"]
    names += ["micro_batch_size", "num_microbatches", "recompute_granularity"]
    return {
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
            {**asdict(each), "seconds": times[each.nodes].seconds(each.num_microbatches)} for each in templates.instances
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
