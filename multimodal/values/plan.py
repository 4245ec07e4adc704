"""The ranks of each layer: unit -> replicas -> stages -> ranks and layer ranges."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from multimodal.values.errors import PlanError
from multimodal.values.file_form import FileValue
from multimodal.values.typed_reader import BRIEF, Plain
from multimodal.values.units.transformer import MOST_LAYERS

if TYPE_CHECKING:
    from multimodal.values.arrays.rows import Integers

MOST_RANKS = 2**20
"""Every rank is smaller than this, so that a typing error does not make a list that fills the memory."""
_SIZE = {"minimum": 1, "maximum": MOST_RANKS}
MOST_SHARE = 2**16
"""The largest number in `UnitPlan.microbatch_shares`."""


@dataclass(frozen=True)
class Stage:
    """A rank group (one tensor x context parallel grid) and the layers it holds."""

    ranks: tuple[int, ...] = field(metadata={"minimum": 0, "maximum": MOST_RANKS - 1, "min_entries": 1})
    """Global ranks; context parallel rank is the slower index, tensor parallel rank the faster."""
    layer_ranges: tuple[tuple[int, int], ...] = field(
        metadata={"key": "layers", "minimum": 0, "maximum": MOST_LAYERS + 2, "min_entries": 1}
    )
    """Half-open ranges of the unit's layer list; several when the stage is virtual."""
    tensor_parallel_size: int | None = field(default=None, metadata={**BRIEF, **_SIZE})
    """The stage's own size, if replicas are not alike; None: that of its unit."""


@dataclass(frozen=True)
class VirtualStage:
    """One layer range in pipeline order; an action's `stage` is its index."""

    index: int
    stage_index: int
    ranks: tuple[int, ...]
    layers: range


@dataclass(frozen=True)
class Replica:
    """One data-parallel copy of a unit."""

    stages: tuple[Stage, ...] = field(metadata={"min_entries": 1})

    @cached_property
    def virtual_stages(self) -> tuple[VirtualStage, ...]:
        """All layer ranges of all stages, ordered by their first layer."""
        ranges = sorted((first, last, index) for index, stage in enumerate(self.stages) for first, last in stage.layer_ranges)
        return tuple(
            VirtualStage(position, index, self.stages[index].ranks, range(first, last))
            for position, (first, last, index) in enumerate(ranges)
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of this replica, stage by stage."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)


@dataclass(frozen=True)
class UnitPlan:
    """The parallelism of one unit."""

    replicas: tuple[Replica, ...] = field(metadata={"min_entries": 1})
    tensor_parallel_size: int = field(default=1, metadata=_SIZE)
    context_parallel_size: int = field(default=1, metadata=_SIZE)
    microbatch_shares: tuple[int, ...] = field(default=(), metadata={**BRIEF, "minimum": 0, "maximum": MOST_SHARE})
    """Whole numbers. For the LLM: the share of a step's microbatches that each replica takes; empty: by their numbers of ranks.

    For an encoder: the shares of an LLM replica's microbatches that the encoder's own replicas take; empty: equal shares. With m
    shares and d replicas of the LLM, replica j d + r of the encoder takes share j of the microbatches of the LLM's replica r: the
    partition over m encoder pipelines (Optimus 4.1). Microbatches are dealt in turn.
    """
    expert_parallel_size: int = field(default=1, metadata={**BRIEF, **_SIZE})
    """Neighbouring replicas that share the experts of every layer evenly; every replica has all other weights."""

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    @cached_property
    def num_virtual_stages(self) -> int:
        """Layer ranges that a microbatch passes through: equally many in every replica, or the largest number if they differ."""
        return max(len(replica.virtual_stages) for replica in self.replicas)

    def num_stages_of(self, replica: int) -> int:
        """Layer ranges that a microbatch of a replica passes through."""
        return len(self.replicas[replica].virtual_stages)

    @cached_property
    def is_unlike(self) -> bool:
        """True if stages differ in their tensor parallel sizes, or replicas in the layers of their stages."""
        forms = {tuple(stage.layer_ranges for stage in replica.stages) for replica in self.replicas}
        return len(forms) > 1 or len(self.tensor_sizes) > 1

    @cached_property
    def has_virtual_stages(self) -> bool:
        """True if some stage holds several layer ranges."""
        return any(len(stage.layer_ranges) > 1 for replica in self.replicas for stage in replica.stages)

    def describe_sizes(self) -> str:
        """Return the sizes as error messages show them: `tp 2 x pp 4 x dp 3`; cp and ep only if they are not 1."""
        if self.is_unlike:
            counts = "/".join(str(len(replica.stages)) for replica in self.replicas)
            return f"tp {'/'.join(map(str, self.tensor_sizes))} x pp {counts} x dp {self.data_parallel_size}"
        stages = len(self.replicas[0].stages)
        virtual = f" (v {self.num_virtual_stages / stages:g})" if self.num_virtual_stages > stages else ""
        context = f"cp {self.context_parallel_size} x " if self.context_parallel_size > 1 else ""
        experts = f" (ep {self.expert_parallel_size})" if self.expert_parallel_size > 1 else ""
        return f"tp {self.tensor_sizes[0]} x {context}pp {stages}{virtual} x dp {self.data_parallel_size}{experts}"

    def describe_ranges(self) -> str:
        """Return the layer ranges of its stages as lists; those of each replica if replicas differ."""
        forms = [[[list(pair) for pair in stage.layer_ranges] for stage in replica.stages] for replica in self.replicas]
        return str(forms[0]) if all(form == forms[0] for form in forms) else " and ".join(map(str, forms))

    @cached_property
    def shared_ranges(self) -> tuple[range, ...]:
        """The unit's layers, cut wherever any replica cuts them: all layers of a range are held by the same ranks."""
        stages = (stage.layers for replica in self.replicas for stage in replica.virtual_stages)
        bounds = sorted({bound for layers in stages for bound in (layers.start, layers.stop)})
        return tuple(range(*pair) for pair in pairwise(bounds))

    def tensor_size(self, stage: Stage | VirtualStage) -> int:
        """Return the tensor parallel size of one of its stages."""
        return len(stage.ranks) // self.context_parallel_size

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """The tensor parallel sizes of its stages, each once, ascending."""
        return tuple(sorted({self.tensor_size(stage) for replica in self.replicas for stage in replica.stages}))

    def tensor_parallel_groups(self, stage: Stage | VirtualStage) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of one of its stages, by context parallel rank."""
        size = self.tensor_size(stage)
        return tuple(stage.ranks[first : first + size] for first in range(0, len(stage.ranks), size))

    def context_parallel_rank(self, rank: int) -> int:
        """Return the context parallel rank of one of the unit's ranks: the index of its part of each sequence."""
        stage = next(stage for replica in self.replicas for stage in replica.stages if rank in stage.ranks)
        return stage.ranks.index(rank) // self.tensor_size(stage)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of this unit, replica by replica."""
        return tuple(rank for replica in self.replicas for rank in replica.ranks)


class StageTable(NamedTuple):
    """The virtual stages of a unit, stage by stage, replica by replica."""

    lane_starts: "Integers"
    """[num_stages x num_replicas + 1] into the lanes; none where a replica has fewer stages than others."""
    lanes: "Integers"
    rank_groups: "Integers"
    """[num_stages x num_replicas] a number for each group of ranks, the same in all units; -1 where there is no such stage."""


@dataclass(frozen=True)
class Plan(FileValue):
    """The parallelism of every unit; units may own disjoint ranks or share them."""

    file_error: ClassVar = PlanError
    units: Mapping[str, UnitPlan] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the units in compact form: a process that receives step after step of one plan makes a single value of them."""
        return _unfolded, (self._folded,)

    @cached_property
    def _folded(self) -> bytes:
        return pickle.dumps(dict(self.units), protocol=pickle.HIGHEST_PROTOCOL)

    @cached_property
    def num_ranks(self) -> int:
        """World size that this plan is for."""
        return 1 + max(rank for unit in self.units.values() for rank in unit.ranks)

    @property
    def has_alike_copies(self) -> bool:
        """True if ranks of any unit hold the same parameters and can share its optimizer: several replicas that do not differ."""
        alike = (unit for unit in self.units.values() if not unit.is_unlike)
        return any(unit.data_parallel_size * unit.context_parallel_size > 1 for unit in alike)

    @property
    def units_with_shared_experts(self) -> tuple[str, ...]:
        """Units whose replicas hold different experts, and so compute every layer together."""
        return tuple(name for name, unit in self.units.items() if unit.expert_parallel_size > 1)

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Rank groups that act as one: ranks that belong to exactly the same stages; ordered by their first rank."""
        membership: dict[int, list[tuple[str, int, int]]] = {}
        for name, unit in self.units.items():
            for replica_index, replica in enumerate(unit.replicas):
                for stage_index, stage in enumerate(replica.stages):
                    for rank in stage.ranks:
                        membership.setdefault(rank, []).append((name, replica_index, stage_index))
        groups: dict[tuple[tuple[str, int, int], ...], list[int]] = {}
        for rank in sorted(membership):
            groups.setdefault(tuple(membership[rank]), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    @cached_property
    def lane_of_rank(self) -> Mapping[int, int]:
        """Index into `lanes` of every rank."""
        return {rank: index for index, ranks in enumerate(self.lanes) for rank in ranks}

    def describe_sizes(self) -> str:
        """Return the sizes of all units."""
        return ", ".join(f"{name} {unit.describe_sizes()}" for name, unit in self.units.items())

    @cached_property
    def is_whole_on_every_rank(self) -> bool:
        """True if no rank ever waits for another's activations."""
        lane = self.lane_of_rank
        held = [[{lane[rank] for rank in each.ranks} for each in unit.replicas] for unit in self.units.values()]
        lanes = [set().union(*of_unit) for of_unit in held]
        return all(len(each) == 1 for of_unit in held for each in of_unit) and all(each == lanes[0] for each in lanes)

    @cached_property
    def stage_tables(self) -> "Mapping[str, StageTable]":
        """unit -> the lanes and ranks of its virtual stages, as arrays."""
        from multimodal.values.arrays.rows import integers, row_starts  # NumPy's, which takes longer to import than all flags

        groups: dict[tuple[int, ...], int] = {}
        lanes: dict[int, tuple[int, ...]] = {}
        tables: dict[str, StageTable] = {}
        for name, unit in self.units.items():
            of_stages: list[int] = []
            for stage in range(unit.num_virtual_stages):
                of_stages += [
                    groups.setdefault(each.virtual_stages[stage].ranks, len(groups)) if stage < len(each.virtual_stages) else -1
                    for each in unit.replicas
                ]
            for ranks, group in islice(groups.items(), len(lanes), None):
                lanes[group] = tuple(dict.fromkeys(map(self.lane_of_rank.__getitem__, ranks)))
            rows = [lanes[group] if group >= 0 else () for group in of_stages]
            tables[name] = StageTable(row_starts(list(map(len, rows))), integers(chain.from_iterable(rows)), integers(of_stages))
        return tables

    def virtual_stage(self, unit: str, replica: int, stage: int) -> VirtualStage:
        """The virtual stage that an action's (unit, replica, stage) names."""
        return self.units[unit].replicas[replica].virtual_stages[stage]

    def lanes_of_stage(self, unit: str, replica: int, stage: int) -> tuple[int, ...]:
        """Indices of the lanes that together execute this virtual stage (one, unless units overlap in part)."""
        ranks = self.virtual_stage(unit, replica, stage).ranks
        return tuple(dict.fromkeys(self.lane_of_rank[rank] for rank in ranks))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Plan":
        """Build from the plain form; raises PlanError naming the offending place."""
        top = Plain(value, "plan", PlanError).mapping(known=("units",), required=("units",))
        units = top["units"].mapping(at_least=1, expected="each unit's name with its replicas")
        return cls({name: replace(entry, where=f"plan: unit '{name}'").build(UnitPlan) for name, entry in units.items()})


@lru_cache(maxsize=4)
def _unfolded(folded: bytes) -> Plan:
    return Plan(pickle.loads(folded))


def split_layers(layers: tuple[str, ...], *, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Cut a unit's layer list into `num_stages` ranges with transformer layers as even as possible.

    The first layer (an embedding) joins the first range, the last (projector or head) the last. First ranges take a remainder.
    """
    num_transformer = max(1, len(layers) - 2)  # a module of transformers is the first layer, and one piece
    if not 1 <= num_stages <= num_transformer:
        raise PlanError(
            f"{num_transformer} transformer layers cannot be cut into {num_stages} pipeline stages; use 1 to {num_transformer}"
        )
    base, surplus = divmod(num_transformer, num_stages)
    cuts = [1 + base * index + min(index, surplus) for index in range(1, num_stages)]
    return tuple(pairwise((0, *cuts, len(layers))))
