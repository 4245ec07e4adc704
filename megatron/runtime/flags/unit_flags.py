"""The flags that contain a unit's name, known only once the model has been read."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron.runtime.flags.field_flags import field_docstrings
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Role

LLM = "llm"
"""Name of the backbone in flags, in addition to its name in the model."""


class SizeSpelling(NamedTuple):
    """The endings of the flags of one field of `UnitSizes`."""

    long: str
    """Megatron's ending."""
    short: str = ""
    also: str = ""
    """Megatron's other name for it."""

    @property
    def endings(self) -> tuple[str, ...]:
        """All endings, without the dash in front."""
        return tuple(ending for ending in self if ending)


EXPERT_PARALLEL_SIZE = "expert_parallel_size"
"""For the LLM only."""
SIZE_SPELLINGS = {
    "tensor_parallel_size": SizeSpelling("tensor-model-parallel-size", "tp"),
    "pipeline_parallel_size": SizeSpelling("pipeline-model-parallel-size", "pp"),
    "context_parallel_size": SizeSpelling("context-parallel-size", "cp"),
    "data_parallel_size": SizeSpelling("data-parallel-size", "dp"),
    "virtual_pipeline_size": SizeSpelling("virtual-pipeline-model-parallel-size", "vpp", "num-virtual-stages-per-pipeline-rank"),
    "layers_per_virtual_stage": SizeSpelling("num-layers-per-virtual-pipeline-stage"),
    EXPERT_PARALLEL_SIZE: SizeSpelling("expert-model-parallel-size", "ep"),
}
"""Field of `UnitSizes` -> the endings of its flags."""

MICRO_BATCH_SIZE = "micro_batch_size"
MICRO_BATCH_ENDING = "micro-batch-size"
MICRO_BATCH_HELP = "Items in one microbatch of this encoder; by default they follow the LLM's microbatches."


@dataclass(frozen=True)
class UnitFlag:
    """One flag of one unit."""

    unit: str
    name: str
    """A field of `UnitSizes`, or `micro_batch_size`."""
    spellings: tuple[str, ...]
    help: str

    @property
    def default(self) -> int | None:
        """The value if left out; None if it then follows from something else."""
        default: int | None = getattr(UnitSizes(), self.name, None)
        return default

    @property
    def destination(self) -> str:
        """The parser's destination of the value: `vision.tensor_parallel_size`."""
        return f"{self.unit}.{self.name}"


def unit_flags(graph: ModelGraph | None) -> tuple[UnitFlag, ...]:
    """List the flags of every unit; without a model, those of the LLM.

    Raises ConfigError when two units' flags would coincide.
    """
    if graph is None:
        return _size_flags(LLM, is_backbone=True)
    names = [_dashed(unit.name) for unit in graph.units]
    for unit in (*graph.encoders, *graph.generators):
        if unit.name == LLM or names.count(_dashed(unit.name)) > 1:
            raise ConfigError(
                f"the flags of unit '{unit.name}' would coincide with another unit's ('{LLM}' always means the backbone, and "
                "underscores count as dashes); rename the unit in the model file"
            )
    flags: list[UnitFlag] = []
    for unit in graph.units:
        flags += _size_flags(unit.name, is_backbone=unit.role is Role.BACKBONE)
        if unit.role is Role.ENCODER:
            spelling = f"--{_dashed(unit.name)}-{MICRO_BATCH_ENDING}"
            flags.append(UnitFlag(unit.name, MICRO_BATCH_SIZE, (spelling,), MICRO_BATCH_HELP))
    return tuple(flags)


def names_a_unit(flag: str) -> bool:
    """Return True if a flag has the form of a unit's flag, for any unit."""
    endings = [ending for spelling in SIZE_SPELLINGS.values() for ending in spelling.endings] + [MICRO_BATCH_ENDING]
    return any(flag.endswith(f"-{ending}") for ending in endings)


def plain_endings(name: str) -> tuple[str, ...]:
    """Return the endings that are also flags of the backbone, as in Megatron; its data parallel size has none."""
    spelling = SIZE_SPELLINGS[name]
    return () if name == "data_parallel_size" else tuple(ending for ending in (spelling.long, spelling.also) if ending)


def _size_flags(unit: str, *, is_backbone: bool) -> tuple[UnitFlag, ...]:
    helps = field_docstrings(UnitSizes)
    flags = []
    for name, spelling in SIZE_SPELLINGS.items():
        if name == EXPERT_PARALLEL_SIZE and not is_backbone:
            continue
        prefixes = dict.fromkeys([_dashed(unit), LLM] if is_backbone else [_dashed(unit)])
        plain = [f"--{ending}" for ending in plain_endings(name)] if is_backbone else []
        spellings = [*plain, *(f"--{prefix}-{ending}" for prefix in prefixes for ending in spelling.endings)]
        flags.append(UnitFlag(unit, name, tuple(spellings), helps[name]))
    return tuple(flags)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
