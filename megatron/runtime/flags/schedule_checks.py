"""Checks the chosen schedule and passes against the plan; refuses a schedule that would silently run as another one."""

from collections.abc import Iterator

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import flag_of
from megatron.runtime.flags.unit_flags import LLM
from multimodal.plan.unit_grid import V_SHAPE_RANGES
from multimodal.schedule.builders import BUILDERS, ScheduleRow, VirtualStages, fed_encoders
from multimodal.schedule.passes import PASSES, Need, passes_named
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


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
    passes_named(config.training.schedule_passes)  # raises what is wrong with the names alone
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
    return tuple(
        name
        for name, row in PASSES.items()
        if row.is_planned
        and row.least_zero_stage <= zero_stage
        and (row.works_with_sharded_weights or zero_stage < 3)
        and not _why_useless(name, graph, plan)
    )


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
