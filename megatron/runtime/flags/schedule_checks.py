"""Checks flags against the plan: schedule, passes, templates of elastic runs; and the defaults that the device allows."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import flag_of
from megatron.runtime.flags.flag_rules import RULES
from megatron.runtime.flags.unit_flags import LLM
from multimodal.plan.plans_of_sizes import V_SHAPE_RANGES
from multimodal.schedule.builders import BUILDERS, ScheduleRow, VirtualStages, fed_encoders
from multimodal.schedule.passes import PASSES, Need
from multimodal.values.errors import ConfigError, PlanError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

if TYPE_CHECKING:  # only elastic runs need templates, whose planning takes a sixth of what --help imports
    from multimodal.plan.planners.templates.template_set import TemplateSet


def problems_of_schedule(config: RunConfig, graph: ModelGraph, plan: Plan) -> Iterator[str]:
    """Yield what is wrong between the schedule, its passes, the units' virtual stages and the plan."""
    name, schedule, plan_file = config.training.schedule, BUILDERS[config.training.schedule], config.parallelism.plan
    for unit_name, unit in plan.units.items() if plan_file is None else ():  # a plan file may cut layers in any way
        count, flag = len(unit.replicas[0].stages[0].layer_ranges), f"{flag_of(unit_name)}-virtual-pipeline-model-parallel-size"
        if count > 1 and schedule.virtual_stages is VirtualStages.NO_USE:
            fitting = [other for other, row in BUILDERS.items() if row.virtual_stages is not VirtualStages.NO_USE]
            yield (
                f"{flag} {count}: --schedule {name} has no use for virtual stages; choose --schedule "
                f"{' or '.join(fitting)}, or leave {flag} out"
            )
        if count > V_SHAPE_RANGES and schedule.is_folded:
            expecting = ((other, row) for other, row in BUILDERS.items() if row.virtual_stages is VirtualStages.EXPECTED)
            dealt = [other for other, row in expecting if not row.is_folded]
            yield (
                f"{flag} {count}: --schedule {name} folds {V_SHAPE_RANGES} virtual stages per pipeline rank into a V; "
                f"use {V_SHAPE_RANGES}, or --schedule {' or '.join(dealt)}"
            )
    if schedule.layout is not None and not schedule.layout.is_met(graph, plan):
        found = ", ".join(f"{unit_name} {unit.describe_ranges()}" for unit_name, unit in plan.units.items())
        flags = f"--{LLM}-virtual-pipeline-model-parallel-size 2 beside --{LLM}-pipeline-model-parallel-size 2 or more"
        fix = f"give a unit such 'layers' in {plan_file}" if plan_file else f"add {flags}"
        yield (
            f"--schedule {name} needs virtual stages: {schedule.layout.wanted}; found the layers {found}, stage by stage; {fix}, "
            f"or choose --schedule {schedule.otherwise}"
        )
    if schedule.runs_segments and config.model.transformer_impl != "local":
        for adapted in (each for each in graph.units if each is not graph.backbone and each.lora is not None):
            if plan.units[adapted.name].tensor_parallel_size > 1:
                yield (
                    f"--schedule {name} runs pieces of unit '{adapted.name}', whose adapters beside layers of Transformer Engine "
                    "several tensor parallel ranks share; use --transformer-impl local, or another schedule"
                )
    yield from _useless_schedule(name, schedule, graph, plan)
    for each in (each for each in config.training.schedule_passes.split(",") if each):
        if reason := _why_useless(each, graph, plan):
            yield f"--schedule-passes {each} would be ignored: {reason}, or leave it out"


def _useless_schedule(name: str, schedule: ScheduleRow, graph: ModelGraph, plan: Plan) -> Iterator[str]:
    """Refuse schedules that equal a simpler one for this model and plan."""
    ignored, leave_out = f"--schedule {name} would be ignored:", f"leave it out, which is --schedule {schedule.otherwise}"
    if len(graph.encoders) < schedule.fewest_encoders:
        use = "runs several encoders as one" if schedule.fewest_encoders > 1 else "arranges encoders"
        yield f"{ignored} it {use}, and the model has {len(graph.encoders) or 'none'}; {leave_out}"
    if (fed := fed_encoders(graph)) and not schedule.takes_fed_encoders:
        yield (
            f"--schedule {name}: is for models whose encoders all feed the LLM, but {', '.join(fed)} takes what other "
            f"encoders give; choose --schedule {schedule.otherwise}"
        )
    if schedule.needs_messages and plan.is_whole_on_every_rank:
        yield f"{ignored} every rank holds the whole model, so no backward is late; {leave_out}"


def useful_passes(config: RunConfig, *, graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """List the passes that cost nothing and change something in this plan, as every planned run has them."""
    zero_stage = 3 if config.parallelism.shards_weights else 0 if config.training.dtype == "float64" else 1
    zero_stage = zero_stage if plan.has_alike_copies else 0
    planned = ((name, row) for name, row in PASSES.items() if row.is_planned and row.least_zero_stage <= zero_stage)
    allowed = (name for name, row in planned if row.works_with_sharded_weights or zero_stage < 3)
    return tuple(name for name in allowed if not _why_useless(name, graph, plan))


def _why_useless(name: str, graph: ModelGraph, plan: Plan) -> str:
    """Explain why a pass can change nothing in this plan, and what to change; empty if it can."""
    need, backbone = PASSES[name].need, graph.backbone.name
    if need is Need.COPIES and all(unit.data_parallel_size * unit.context_parallel_size == 1 for unit in plan.units.values()):
        return f"no two ranks hold the same weights; raise a unit's data parallel size (such as --{LLM}-data-parallel-size 2)"
    if need is Need.MESSAGES and plan.is_whole_on_every_rank:
        return (
            "every rank holds the whole model and waits for no message; raise a unit's pipeline size (such as "
            f"--{LLM}-pipeline-model-parallel-size 2)"
        )
    elsewhere = {rank for name, unit in plan.units.items() if name != backbone for rank in unit.ranks}
    if need is Need.OWN_RANKS and elsewhere.issuperset(plan.units[backbone].ranks):
        return f"it leaves ranks as they are that '{backbone}' shares with other units, and those are all; give it its own ranks"
    if need is Need.ENCODERS and not graph.encoders:
        return "it cuts backwards of encoders, and the model has none; add one"
    return ""


def with_device_defaults(config: RunConfig, *, graph: ModelGraph, plan: Plan, has_cuda: bool) -> RunConfig:
    """Return the configuration with this machine's defaults for flags not given; raises ConfigError for FP8 without layers."""
    if not has_cuda or config.training.emulate is not None:
        return config
    config = _with_dtype(config)
    if "schedule_passes" not in config.given:
        passes = ",".join(useful_passes(config, graph=graph, plan=plan))
        config = replace(config, training=replace(config.training, schedule_passes=passes))
    engine = _with_engine(config)
    return engine if next(problems_of_schedule(engine, graph, plan), None) is None else config


def with_layer_defaults(config: RunConfig, *, has_cuda: bool) -> RunConfig:
    """Return the configuration with those defaults that depend on no plan: precision and implementation of layers."""
    return _with_engine(_with_dtype(config)) if has_cuda else config


def _with_dtype(config: RunConfig) -> RunConfig:
    return config if "dtype" in config.given else replace(config, training=replace(config.training, dtype="bfloat16"))


def _with_engine(config: RunConfig) -> RunConfig:
    if "transformer_impl" in config.given or find_spec("transformer_engine") is None:
        return config
    engine = replace(config, model=replace(config.model, transformer_impl="transformer_engine"))
    broken = next((message for message, is_broken in RULES.items() if is_broken(engine)), None)
    if broken is None:
        return engine
    if config.model.fp8_format is not None:
        raise ConfigError(broken.format(c=engine))
    return config


def read_templates(config: RunConfig, graph: ModelGraph) -> "TemplateSet":
    """Read the templates of --plan; raises PlanError if there are none, ConfigError if they are for another run."""
    from multimodal.plan.planners.templates.template_set import TemplateSet

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
    training, planned_batch = config.training, templates.num_microbatches * templates.micro_batch_size
    for flag, given, planned_size, what in (
        ("--micro-batch-size", training.micro_batch_size, templates.micro_batch_size, "are planned for {}"),
        ("--global-batch-size", training.global_batch_size, planned_batch, "share out {} samples"),
    ):
        if given != planned_size:
            raise ConfigError(
                f"{flag} {given}, but the templates of --plan {path} {what.format(planned_size)}; give {flag} {planned_size}, or "
                "plan them anew"
            )
    if templates.recompute_granularity != training.recompute_granularity:
        wanted_recompute = templates.recompute_granularity
        fix = f"give --recompute-granularity {wanted_recompute}" if wanted_recompute else "leave --recompute-granularity out"
        raise ConfigError(
            f"the templates of --plan {path} count on recomputing {wanted_recompute or 'nothing'}, the run recomputes "
            f"{training.recompute_granularity or 'nothing'}; {fix}, or plan them anew"
        )
    asked, kept = config.parallelism.fault_tolerance, templates.tolerance.fault_tolerance
    if asked is None:
        return templates
    if asked > kept:
        raise ConfigError(
            f"--fault-tolerance {asked} needs {asked + 1} replicas at all times, but the templates of --plan {path} keep "
            f"{kept + 1}; plan them with --fault-tolerance {asked}, or ask for at most {kept}"
        )
    return replace(templates, tolerance=replace(templates.tolerance, fault_tolerance=asked))


def plan_of_start(config: RunConfig, graph: ModelGraph, world_size: int) -> Plan:
    """Return the plan that an elastic run begins with; raises ConfigError if it was started with other nodes."""
    from multimodal.plan.planners.templates.template_plan import plan_nodes

    templates = read_templates(config, graph)
    planned = templates.num_nodes * templates.gpus_per_node
    if world_size != planned:
        raise ConfigError(
            f"the templates of --plan {config.parallelism.plan} start on {templates.num_nodes} nodes of "
            f"{templates.gpus_per_node} GPUs, but {world_size} processes were started; start scripts/elastic.sh with --nodes "
            f"{templates.num_nodes} --nproc-per-node {templates.gpus_per_node}, or plan templates for the nodes that there are"
        )
    return plan_nodes(templates, range(templates.num_nodes), graph=graph).plan
