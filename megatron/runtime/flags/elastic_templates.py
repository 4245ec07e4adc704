"""Reads the templates of an elastic run, and checks them against its other flags."""

from dataclasses import replace
from pathlib import Path

from megatron.runtime.flags.configuration import RunConfig
from multimodal.plan.planners.templates.template_plan import plan_nodes
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.values.errors import ConfigError, PlanError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


def read_templates(config: RunConfig, graph: ModelGraph) -> TemplateSet:
    """Read the templates of --plan; raises PlanError if there are none, ConfigError if they are for another run."""
    path = config.parallelism.plan
    assert path is not None
    if "templates" not in read_mapping(path, error=PlanError):
        raise PlanError(
            f"--plan {path}: holds one plan, which fits one number of nodes, but --elastic needs templates; write them with "
            "tools/plan.py --planner oobleck --fault-tolerance F --output FILE"
        )
    templates = TemplateSet.from_file(path)
    planned = [(unit.name, unit.num_layers) for unit in templates.chain]
    wanted = [(unit.name, len(unit.layers)) for unit in graph.units]
    if planned != wanted:
        raise PlanError(
            f"--plan {path}: its templates are for layers {planned}, the model has {wanted}; plan templates for this model"
        )
    _check_batch(path, templates, config)
    tolerance = config.parallelism.fault_tolerance
    if tolerance is None:
        return templates
    if tolerance > templates.fault_tolerance:
        raise ConfigError(
            f"--fault-tolerance {tolerance} needs {tolerance + 1} replicas at all times, but the templates of --plan {path} keep "
            f"{templates.fault_tolerance + 1}; plan them with --fault-tolerance {tolerance}, or ask for at most "
            f"{templates.fault_tolerance}"
        )
    return replace(templates, fault_tolerance=tolerance)


def _check_batch(path: Path, templates: TemplateSet, config: RunConfig) -> None:
    training = config.training
    if training.micro_batch_size != templates.micro_batch_size:
        raise ConfigError(
            f"--micro-batch-size {training.micro_batch_size}, but the templates of --plan {path} are planned for "
            f"{templates.micro_batch_size}; give --micro-batch-size {templates.micro_batch_size}, or plan them anew"
        )
    planned = templates.num_microbatches * templates.micro_batch_size
    if training.global_batch_size != planned:
        raise ConfigError(
            f"--global-batch-size {training.global_batch_size}, but the templates of --plan {path} share out {planned} samples; "
            f"give --global-batch-size {planned}, or plan them anew"
        )
    if templates.recompute_granularity != training.recompute_granularity:
        wanted = templates.recompute_granularity
        fix = f"give --recompute-granularity {wanted}" if wanted else "leave --recompute-granularity out"
        raise ConfigError(
            f"the templates of --plan {path} count on recomputing {wanted or 'nothing'}, the run recomputes "
            f"{training.recompute_granularity or 'nothing'}; {fix}, or plan them anew"
        )


def plan_of_start(config: RunConfig, graph: ModelGraph, world_size: int) -> Plan:
    """Return the plan that an elastic run begins with; raises ConfigError if it was started with other nodes."""
    templates = read_templates(config, graph)
    planned = templates.num_nodes * templates.gpus_per_node
    if world_size != planned:
        raise ConfigError(
            f"the templates of --plan {config.parallelism.plan} start on {templates.num_nodes} nodes of "
            f"{templates.gpus_per_node} GPUs, but {world_size} processes were started; start scripts/elastic.sh with --nodes "
            f"{templates.num_nodes} --nproc-per-node {templates.gpus_per_node}, or plan templates for the nodes that there are"
        )
    return plan_nodes(templates, range(templates.num_nodes), graph=graph).plan
