"""Checks the chosen schedule and passes against the plan; refuses a schedule that would silently run as another one."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import flag_of
from megatron.runtime.flags.unit_flags import LLM
from multimodal.plan.unit_grid import V_SHAPE_RANGES
from multimodal.schedule.builders import BUILDERS, ScheduleRow, VirtualStages, fed_encoders
from multimodal.schedule.passes import PASSES, Need, passes_named
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


class _Choice(NamedTuple):
    """A choice of schedule and passes, on a plan."""

    name: str
    schedule: ScheduleRow
    passes: tuple[str, ...]
    graph: ModelGraph
    plan: Plan
    plan_file: str
    """Empty if the plan was made from size flags."""


def check_schedule(config: RunConfig, *, graph: ModelGraph, plan: Plan) -> None:
    """Check the schedule, its passes and the units' virtual stages against each other and the plan; raises ConfigError."""
    passes = tuple(name for name in config.training.schedule_passes.split(",") if name)
    name = config.training.schedule
    choice = _Choice(name, BUILDERS[name], passes, graph, plan, str(config.parallelism.plan or ""))
    for check in (_check_virtual_stages, _check_shape, _check_units, _check_passes):
        for problem in check(choice):
            raise ConfigError(problem)


def _check_virtual_stages(choice: _Choice) -> Iterator[str]:
    """Require a schedule that uses the size flags' virtual stages; a plan file may cut layers in any way."""
    if choice.plan_file:
        return
    schedule, others = choice.schedule, [name for name, row in BUILDERS.items() if row.can_train]
    for name, unit in choice.plan.units.items():
        count, flag = len(unit.replicas[0].stages[0].layer_ranges), f"{flag_of(name)}-virtual-pipeline-model-parallel-size"
        if count > 1 and schedule.virtual_stages is VirtualStages.NO_USE:
            fitting = [other for other in others if BUILDERS[other].virtual_stages is not VirtualStages.NO_USE]
            yield (
                f"{flag} {count}: --schedule {choice.name} has no use for virtual stages; choose --schedule "
                f"{' or '.join(fitting)}, or leave {flag} out"
            )
        if count > V_SHAPE_RANGES and schedule.is_folded:
            dealt = [
                each
                for each in others
                if BUILDERS[each].virtual_stages is VirtualStages.EXPECTED and not BUILDERS[each].is_folded
            ]
            yield (
                f"{flag} {count}: --schedule {choice.name} folds {V_SHAPE_RANGES} virtual stages per pipeline rank into a V; "
                f"use {V_SHAPE_RANGES}, or --schedule {' or '.join(dealt)}"
            )


def _check_shape(choice: _Choice) -> Iterator[str]:
    """Require, for schedules with virtual stages, a plan that has such stages in the right shape."""
    layout = choice.schedule.layout
    if layout is not None and not layout.is_met(choice.graph, choice.plan):
        yield _missing_shape(choice, wanted=layout.wanted, instead=choice.schedule.otherwise)


def _missing_shape(choice: _Choice, *, wanted: str, instead: str) -> str:
    found = ", ".join(f"{name} {unit.describe_ranges()}" for name, unit in choice.plan.units.items())
    flags = f"--{LLM}-virtual-pipeline-model-parallel-size 2 beside --{LLM}-pipeline-model-parallel-size 2 or more"
    fix = f"give a unit such 'layers' in {choice.plan_file}" if choice.plan_file else f"add {flags}"
    return (
        f"--schedule {choice.name} needs virtual stages: {wanted}; found the layers {found}, stage by stage; {fix}, or "
        f"choose --schedule {instead}"
    )


def _check_units(choice: _Choice) -> Iterator[str]:
    """Refuse schedules that equal a simpler one for this model and plan."""
    row, num_encoders = choice.schedule, len(choice.graph.encoders)
    ignored, leave_out = f"--schedule {choice.name} would be ignored:", f"leave it out, which is --schedule {row.otherwise}"
    if num_encoders < row.fewest_encoders:
        yield f"{ignored} it {row.role_of_encoders}, and the model has {num_encoders or 'none'}; {leave_out}"
    if (fed := fed_encoders(choice.graph)) and not row.takes_fed_encoders:
        yield (
            f"--schedule {choice.name}: is for models whose encoders all feed the LLM, but {', '.join(fed)} takes what other "
            f"encoders give; choose --schedule {row.otherwise}"
        )
    if row.needs_messages and choice.plan.is_whole_on_every_rank:
        yield f"{ignored} every rank holds the whole model, so no backward is late; {leave_out}"


def _check_passes(choice: _Choice) -> Iterator[str]:
    passes_named(",".join(choice.passes))
    for name in choice.passes:
        if reason := _why_useless(name, choice):
            yield f"--schedule-passes {name} would be ignored: {reason}, or leave it out"


def useful_passes(config: RunConfig, *, graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """List the passes that cost nothing and change something in this plan, as every planned run has them."""
    name = config.training.schedule
    choice = _Choice(name, BUILDERS[name], (), graph, plan, str(config.parallelism.plan or ""))
    zero_stage = 3 if config.parallelism.shards_weights else 0 if config.training.dtype == "float64" else 1
    zero_stage = zero_stage if plan.has_alike_copies else 0
    return tuple(
        name
        for name, row in PASSES.items()
        if row.is_planned
        and row.least_zero_stage <= zero_stage
        and (row.works_with_sharded_weights or zero_stage < 3)
        and not _why_useless(name, choice)
    )


def _why_useless(name: str, choice: _Choice) -> str:
    """Explain why a pass can change nothing in this plan, and what to change; empty if it can."""
    need, backbone = PASSES[name].need, choice.graph.backbone.name
    if need is Need.COPIES and all(
        unit.data_parallel_size * unit.context_parallel_size == 1 for unit in choice.plan.units.values()
    ):
        return f"no two ranks hold the same weights; raise a unit's data parallel size (such as --{LLM}-data-parallel-size 2)"
    if need is Need.MESSAGES and choice.plan.is_whole_on_every_rank:
        return (
            "every rank holds the whole model and waits for no message; raise a unit's pipeline size (such as "
            f"--{LLM}-pipeline-model-parallel-size 2)"
        )
    elsewhere = {rank for unit, plan in choice.plan.units.items() if unit != backbone for rank in plan.ranks}
    if need is Need.OWN_RANKS and elsewhere.issuperset(choice.plan.units[backbone].ranks):
        return f"it leaves ranks as they are that '{backbone}' shares with other units, and those are all; give it its own ranks"
    if need is Need.ENCODERS and not choice.graph.encoders:
        return "it cuts backwards of encoders, and the model has none; add one"
    return ""
