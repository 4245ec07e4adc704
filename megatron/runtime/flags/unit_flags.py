"""The flags that contain a unit's name, known only once the model has been read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.runtime.flags.configuration import UNIT_RATES
from megatron.runtime.flags.field_flags import FieldFlag, all_flags, field_docstrings, finite_number, flag_of, whole_number
from multimodal.plan.plans_of_sizes import UnitSizes
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Role, Unit

LLM = "llm"
"""Name of the backbone in flags, in addition to its name in the model."""


EXPERT_PARALLEL_SIZE = "expert_parallel_size"
"""For the LLM only."""
SIZE_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("tensor-model-parallel-size", "tp"),
    "pipeline_parallel_size": ("pipeline-model-parallel-size", "pp"),
    "context_parallel_size": ("context-parallel-size", "cp"),
    "data_parallel_size": ("data-parallel-size", "dp"),
    "virtual_pipeline_size": ("virtual-pipeline-model-parallel-size", "vpp", "num-virtual-stages-per-pipeline-rank"),
    "layers_per_virtual_stage": ("num-layers-per-virtual-pipeline-stage",),
    EXPERT_PARALLEL_SIZE: ("expert-model-parallel-size", "ep"),
}
"""Field of `UnitSizes` -> the endings of its flags: Megatron's, a short one, and Megatron's other one."""
_LONGEST_SHORT = 3
"""Letters of the longest short ending, which Megatron does not have."""

MICRO_BATCH_SIZE = "micro_batch_size"
MICRO_BATCH_ENDING = "micro-batch-size"
MICRO_BATCH_HELP = "Items in one microbatch of this encoder; by default they follow the LLM's microbatches."


def unit_flags(graph: ModelGraph | None) -> Mapping[str, tuple[FieldFlag, ...]]:
    """Return unit -> its flags; without a model, those of the LLM. Raises ConfigError when two units' flags would coincide."""
    if graph is None:
        return {LLM: tuple(_size_flags(LLM, is_backbone=True))}
    spelled = [flag_of(unit.name) for unit in graph.units]
    for unit in (*graph.encoders, *graph.generators):
        if unit.name == LLM or spelled.count(flag_of(unit.name)) > 1:
            raise ConfigError(
                f"the flags of unit '{unit.name}' would coincide with another unit's ('{LLM}' always means the backbone, and "
                "underscores count as dashes); rename the unit in the model file"
            )
    flags = {unit.name: list(_size_flags(unit.name, is_backbone=unit.role is Role.BACKBONE)) for unit in graph.units}
    for unit in graph.encoders:
        flags[unit.name].append(_count_flag(unit.name, MICRO_BATCH_SIZE, [f"{flag_of(unit.name)}-{MICRO_BATCH_ENDING}"]))
    for unit in graph.units:
        flags[unit.name] += _rate_flags(unit)
    return {name: tuple(of_unit) for name, of_unit in flags.items()}


def names_a_unit(flag: str) -> bool:
    """Return True if a flag has the form of a unit's flag, for any unit."""
    endings = [ending for of_field in SIZE_SPELLINGS.values() for ending in of_field]
    endings += [MICRO_BATCH_ENDING, *(flag_of(name)[2:] for name in UNIT_RATES)]
    return any(flag.endswith(f"-{ending}") for ending in endings)


def plain_endings(name: str) -> tuple[str, ...]:
    """Return the endings that are also flags of the backbone, as in Megatron; its data parallel size has none."""
    return tuple(each for each in SIZE_SPELLINGS[name] if name != "data_parallel_size" and len(each) > _LONGEST_SHORT)


def _size_flags(unit: str, *, is_backbone: bool) -> Iterator[FieldFlag]:
    for name, endings in SIZE_SPELLINGS.items():
        if name == EXPERT_PARALLEL_SIZE and not is_backbone:
            continue
        prefixes = dict.fromkeys([flag_of(unit), flag_of(LLM)] if is_backbone else [flag_of(unit)])
        plain = [f"--{ending}" for ending in plain_endings(name)] if is_backbone else []
        yield _count_flag(unit, name, [*plain, *(f"{prefix}-{ending}" for prefix in prefixes for ending in endings)])


def _count_flag(unit: str, name: str, spellings: Sequence[str]) -> FieldFlag:
    return FieldFlag(
        name=f"{unit}.{name}",
        flag=spellings[0],
        also=tuple(spellings[1:]),
        parse=whole_number,
        bounds={"minimum": 1},
        metavar="N",
        default=getattr(UnitSizes(), name, None),
        help=field_docstrings(UnitSizes).get(name, MICRO_BATCH_HELP),
    )


def _rate_flags(unit: Unit) -> Iterator[FieldFlag]:
    prefixes = dict.fromkeys([flag_of(unit.name), *([flag_of(LLM)] if unit.role is Role.BACKBONE else ())])
    for name, meaning in UNIT_RATES.items():
        if unit.projector_layer is None and name.startswith("projector_"):
            continue
        flag, *also = (f"{prefix}{flag_of(name)[1:]}" for prefix in prefixes)
        parse, metavar = (whole_number, "N") if name.endswith("iters") else (finite_number, "X")
        bounds = {"above" if name.endswith("lr") else "minimum": 0}
        named: dict[str, Any] = {"flag": flag, "also": tuple(also), "metavar": metavar, "help": meaning}
        yield FieldFlag(name=f"{unit.name}.{name}", parse=parse, bounds=bounds, **named)


def shown_flag(name: str) -> str:
    """Return the spelling of a field's flag, or of a unit's field's, in messages."""
    unit, _, size = name.rpartition(".")
    if not unit:
        return next(flag.flag for flag in all_flags() if flag.name == name)
    return f"{flag_of(unit)}-{SIZE_SPELLINGS[size][0] if size in SIZE_SPELLINGS else size.replace('_', '-')}"
