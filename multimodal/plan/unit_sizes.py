"""The sizes of a unit's parallelism, before any rank is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from multimodal.values.errors import PlanError
from multimodal.values.plan import MOST_RANKS
from multimodal.values.typed_reader import shown


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """The parallel sizes of one unit; raises PlanError if one is below 1, or beyond any run."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer's weights (tensor parallelism)."""
    pipeline_parallel_size: int = 1
    """Pipeline stages that the unit's layers are cut into."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of every microbatch (context parallelism)."""
    data_parallel_size: int | None = None
    """Replicas of the unit. May be left out for one unit, and then follows from the number of processes."""
    virtual_pipeline_size: int = 1
    """Virtual stages (layer ranges) that each pipeline rank holds, dealt in turn; --schedule zb-v folds two into a V."""
    layers_per_virtual_stage: int | None = None
    """The same, as transformer layers in each virtual stage; these must come out even."""

    expert_parallel_size: int = 1
    """Neighbouring replicas that share the LLM's experts, each with as many; all else every replica has (expert parallelism)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise PlanError(f"{field.name} must be at least 1, found {size}")
            if size is not None and size > MOST_RANKS:
                raise PlanError(f"{field.name} must be at most {MOST_RANKS:,}, found {shown(size)}")
        if self.virtual_pipeline_size > 1 and self.layers_per_virtual_stage is not None:
            raise PlanError("virtual_pipeline_size and layers_per_virtual_stage say the same in two ways; keep one")

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one replica: tp x cp x pp."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the unit; None while its data parallel size is open."""
        return None if self.data_parallel_size is None else self.ranks_per_replica * self.data_parallel_size

    def __str__(self) -> str:
        """Show the arithmetic as in error messages: `tp 1 x pp 3 x dp ?`."""
        context = f"cp {self.context_parallel_size} x " if self.context_parallel_size != 1 else ""
        replicas = "?" if self.data_parallel_size is None else self.data_parallel_size
        experts = f" (ep {self.expert_parallel_size})" if self.expert_parallel_size != 1 else ""
        return f"tp {self.tensor_parallel_size} x {context}pp {self.pipeline_parallel_size} x dp {replicas}{experts}"


def complete_sizes(sizes: Mapping[str, UnitSizes], units: Sequence[str]) -> dict[str, UnitSizes]:
    """Return the sizes of all units, 1 in everything for units without given sizes; raises PlanError for an unknown unit."""
    if unknown := [name for name in sizes if name not in units]:
        raise PlanError(f"sizes were given for a unit '{unknown[0]}'; the model's units are {', '.join(units)}")
    return {name: sizes.get(name, UnitSizes()) for name in units}


def describe_sizes(sizes: Mapping[str, UnitSizes]) -> str:
    """Show the arithmetic of all units, for error messages: `vision tp 1 x pp 1 x dp 2 = 2 ranks, llm tp 1 x pp 3 x dp ?`."""
    return ", ".join(
        f"{name} {size}" + ("" if size.num_ranks is None else f" = {size.num_ranks} rank{'s' * (size.num_ranks != 1)}")
        for name, size in sizes.items()
    )
