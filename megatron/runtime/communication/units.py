"""Parallelism units: a plan's rank grids as process groups (DistTrain 4.1: each unit has its own DP and TP groups)."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.runtime.communication.create_groups import create_groups
from multimodal.plan import communicators
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.plan import Plan, UnitPlan


@dataclass(frozen=True)
class Membership:
    """This rank's place in one unit, and its groups there."""

    unit: str
    replica_index: int
    stage_index: int
    groups: ProcessGroupCollection
    """tp, cp, tp_cp (the whole stage), dp (replicas), dp_cp (ranks that hold the same parameters: replicas and context parallel
    ranks), ep (ranks that share experts), expt_dp (ranks that hold the same experts), embd (this rank and its counterpart with
    the same share of weights, if one is in the first stage and one in the last; else None) and further groups that megatron-core
    requires; pp is this rank alone, as the plan numbers layers and stages."""
    is_unlike: bool = False
    """True if the replicas are not alike: dp and dp_cp are this rank alone, and gradients are reduced by layer and part."""

    @property
    def is_first_holder(self) -> bool:
        """True if this rank is the first of those that hold the same weights: it counts, or writes, them for all."""
        if self.is_unlike:
            return self.replica_index == 0 and self.groups.cp.rank() == 0
        return self.groups.dp_cp.rank() == 0

    @property
    def is_first_expert_holder(self) -> bool:
        """The same for the experts that this rank holds."""
        return self.is_first_holder if self.is_unlike else self.groups.expt_dp.rank() == 0


class GroupBook:
    """Process groups by their ranks, each created once, in one order on every rank (torch requires non-members to take part)."""

    def __init__(self, *, rank: int, timeout: timedelta) -> None:
        self.rank, self._timeout = rank, timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def create(self, rank_sets: Iterable[tuple[int, ...]], *, urgent: Collection[tuple[int, ...]] = ()) -> None:
        """Create all groups and keep those that this rank belongs to; collective over all ranks; urgent: see `create_groups`."""
        listed = sorted(set(rank_sets))
        groups = create_groups(listed, timeout=self._timeout, urgent=urgent)
        self._groups |= {ranks: group for ranks, group in zip(listed, groups, strict=True) if self.rank in ranks}

    def close(self) -> None:
        """Destroy all groups; collective, when no message is under way."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def __getitem__(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return self._groups[ranks]


def build_memberships(
    graph: ModelGraph, plan: Plan, *, book: GroupBook, num_state_copies: int | None = None, shares_weights: bool = False
) -> dict[str, Membership]:
    """Create all process groups of `group_ranks` in `book`; returns this rank's place in each of its units; collective."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # in which sequence parallel layers gather their inputs
        parallel_state._set_global_memory_buffer()
    stages = [(unit, stage) for unit in plan.units.values() for replica in unit.replicas for stage in replica.stages]
    tensor_groups = {group for unit, stage in stages for group in unit.tensor_parallel_groups(stage) if len(group) > 1}
    sets = communicators.group_ranks(graph, plan, num_state_copies=num_state_copies, shares_weights=shares_weights)
    book.create(sets, urgent=tensor_groups)
    return {
        name: _membership(graph.unit(name), unit, replica_index, stage_index, book=book)
        for name, unit in plan.units.items()
        for replica_index, replica in enumerate(unit.replicas)
        for stage_index, stage in enumerate(replica.stages)
        if book.rank in stage.ranks
    }


def _membership(model: Unit, unit: UnitPlan, replica_index: int, stage_index: int, *, book: GroupBook) -> Membership:
    stage, rank = unit.replicas[replica_index].stages[stage_index], book.rank
    position = stage.ranks.index(rank)
    context_rank, tensor_rank = divmod(position, unit.tensor_size(stage))
    tensor_groups = unit.tensor_parallel_groups(stage)
    tensor, context = book[tensor_groups[context_rank]], book[tuple(group[tensor_rank] for group in tensor_groups)]
    alone = data = holders = expert_holders = experts = book[(rank,)]
    ends = None
    if not unit.is_unlike:
        data = book[communicators.data_parallel_ranks(unit, stage_index, position)]
        holders = expert_holders = book[communicators.holders_of_parameters(unit, stage_index, tensor_rank)]
        if unit.expert_parallel_size > 1:
            experts = book[communicators.expert_parallel_ranks(unit, stage_index, rank)]
            expert_holders = book[communicators.holders_of_experts(unit, stage_index, rank)]
        pairs = communicators.embedding_ranks(unit, tensor_rank, are_tied=model.ties_embeddings)
        ends = next((pair for pair in pairs if rank in pair), None)
    groups = ProcessGroupCollection(
        **dict.fromkeys(("tp", "mp"), tensor),
        cp=context,
        tp_cp=book[stage.ranks],
        dp=data,
        **dict.fromkeys(("dp_cp", "intra_dp_cp", "intra_dist_opt"), holders),
        ep=experts,
        **dict.fromkeys(("expt_dp", "intra_expt_dp"), expert_holders),
        **dict.fromkeys(("pp", "expt_tp", "tp_ep", "tp_ep_pp"), alone),
        embd=book[ends] if ends else None,
    )
    return Membership(model.name, replica_index, stage_index, groups, unit.is_unlike)
