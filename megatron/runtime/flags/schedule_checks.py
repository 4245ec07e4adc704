"""Whether the chosen schedule and passes find in the plan what they are for: what would silently run as another is refused."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron.runtime.flags.configuration import FOLDED_SCHEDULE, VIRTUAL_STAGE_SCHEDULES, RunConfig
from megatron.runtime.flags.field_flags import flag_of
from megatron.runtime.flags.unit_flags import LLM
from multimodal.plan.unit_grid import V_SHAPE_RANGES
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


class _Choice(NamedTuple):
    """What is checked: a choice of schedule, on a plan."""

    schedule: str
    passes: tuple[str, ...]
    graph: ModelGraph
    plan: Plan
    plan_file: str
    """Empty where the plan was made from size flags."""

    @property
    def is_whole_on_every_rank(self) -> bool:
        """Whether no rank ever waits for another's activations."""
        lanes_of_units = [
            [{self.plan.lane_of_rank[rank] for rank in replica.ranks} for replica in unit.replicas]
            for unit in self.plan.units.values()
        ]
        return all(len(lanes) == 1 for unit in lanes_of_units for lanes in unit) and all(
            set().union(*unit) == set().union(*lanes_of_units[0]) for unit in lanes_of_units
        )


def check_schedule(config: RunConfig, *, graph: ModelGraph, plan: Plan) -> None:
    """Check the schedule, its passes and the units' virtual stages against each other and the plan; raises ConfigError."""
    passes = tuple(name for name in config.training.schedule_passes.split(",") if name)
    choice = _Choice(config.training.schedule, passes, graph, plan, str(config.parallelism.plan or ""))
    for check in (_check_virtual_stages, _check_shape, _check_units, _check_passes):
        for problem in check(choice):
            raise ConfigError(problem)


def _check_virtual_stages(choice: _Choice) -> Iterator[str]:
    """Virtual stages of the size flags want a schedule that makes use of them; a plan file may cut layers as it likes."""
    if choice.plan_file:
        return
    for name, unit in choice.plan.units.items():
        count, flag = len(unit.replicas[0].stages[0].layer_ranges), f"{flag_of(name)}-virtual-pipeline-model-parallel-size"
        if count > 1 and choice.schedule not in VIRTUAL_STAGE_SCHEDULES:
            yield (
                f"{flag} {count}: --schedule {choice.schedule} has no use for virtual stages; choose --schedule "
                f"{' or '.join(VIRTUAL_STAGE_SCHEDULES)}, or leave {flag} out"
            )
        if count > V_SHAPE_RANGES and choice.schedule == FOLDED_SCHEDULE:
            yield (
                f"{flag} {count}: --schedule {choice.schedule} folds {V_SHAPE_RANGES} virtual stages per pipeline rank into a V; "
                f"use {V_SHAPE_RANGES}, or --schedule interleaved-1f1b"
            )


def _check_shape(choice: _Choice) -> Iterator[str]:
    """Schedules for virtual stages want a plan with such stages, in the right shape."""
    from multimodal.schedule.builders.interleaved_1f1b import interleaves  # only here: it takes longer than to read all flags
    from multimodal.schedule.builders.zb_v import is_v_shaped

    if choice.schedule == "interleaved-1f1b" and not interleaves(choice.graph, choice.plan):
        yield _missing_shape(choice, wanted="a unit whose stages hold several layer ranges each, dealt in turn", instead="1f1b")
    if choice.schedule == FOLDED_SCHEDULE and not any(map(is_v_shaped, choice.plan.units.values())):
        wanted = "a unit whose stages hold two layer ranges each in the shape of a V, the first stage the first and the last"
        yield _missing_shape(choice, wanted=wanted, instead="zb-h1")


def _missing_shape(choice: _Choice, *, wanted: str, instead: str) -> str:
    found = ", ".join(
        f"{name} {[[list(pair) for pair in stage.layer_ranges] for stage in unit.replicas[0].stages]}"
        for name, unit in choice.plan.units.items()
    )
    flags = f"--{LLM}-virtual-pipeline-model-parallel-size 2 beside --{LLM}-pipeline-model-parallel-size 2 or more"
    fix = f"give a unit such 'layers' in {choice.plan_file}" if choice.plan_file else f"add {flags}"
    return (
        f"--schedule {choice.schedule} needs virtual stages: {wanted}; found the layers {found}, stage by stage; {fix}, or "
        f"choose --schedule {instead}"
    )


def _check_units(choice: _Choice) -> Iterator[str]:
    """Schedules that are another word for 1f1b on this model and plan."""
    name, num_encoders = choice.schedule, len(choice.graph.encoders)
    ignored = f"--schedule {name} would be ignored:"
    if name in ("dip", "encoders-replicated") and not num_encoders:
        yield f"{ignored} it arranges encoders, and the model has none; leave it out, which is --schedule 1f1b"
    if name == "encoders-colocated" and num_encoders < 2:
        count = num_encoders or "none"
        yield f"{ignored} it runs several encoders as one, and the model has {count}; leave it out, which is --schedule 1f1b"
    if name == "encoders-replicated" and len(choice.plan.units[choice.graph.backbone.name].replicas[0].stages) == 1:
        yield (
            f"{ignored} it repeats the encoders in every stage of '{choice.graph.backbone.name}', which has one; raise "
            f"--{LLM}-pipeline-model-parallel-size or leave it out, which is --schedule 1f1b"
        )
    if name == "eager-1f1b" and choice.is_whole_on_every_rank:
        yield f"{ignored} every rank holds the whole model, so no backward is late; leave it out, which is --schedule 1f1b"


def _check_passes(choice: _Choice) -> Iterator[str]:
    from multimodal.schedule.passes import passes_named  # only here: it takes longer than to read all flags

    passes_named(",".join(choice.passes))
    for name in choice.passes:
        if reason := _why_useless(name, choice):
            yield f"--schedule-passes {name} would be ignored: {reason}, or leave it out"


def _why_useless(name: str, choice: _Choice) -> str:
    """Say why a pass can change nothing on this plan, and what to change; empty where it can."""
    backbone = choice.graph.backbone.name
    elsewhere = {rank for unit, plan in choice.plan.units.items() if unit != backbone for rank in plan.ranks}
    is_alone = all(unit.data_parallel_size * unit.context_parallel_size == 1 for unit in choice.plan.units.values())
    if name in ("gather-parameters", "reduce-by-layer") and is_alone:
        return f"no two ranks hold the same weights; raise a unit's data parallel size (such as --{LLM}-data-parallel-size 2)"
    if name in ("defer-receives", "fill") and choice.is_whole_on_every_rank:
        return (
            "every rank holds the whole model and waits for no message; raise a unit's pipeline size (such as "
            f"--{LLM}-pipeline-model-parallel-size 2)"
        )
    if name == "delay-forward" and elsewhere.issuperset(choice.plan.units[backbone].ranks):
        return f"it leaves ranks as they are that '{backbone}' shares with other units, and those are all; give it its own ranks"
    if name == "split-backward" and not choice.graph.encoders:
        return "it cuts backwards of encoders, and the model has none; add one"
    return ""
