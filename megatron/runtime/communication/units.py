"""Parallelism units: a plan's rank grids as process groups (DistTrain 4.1: each unit has its own DP and TP groups)."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Stage, UnitPlan


@dataclass(frozen=True)
class Membership:
    """This rank's place in one unit, and its groups there."""

    unit: str
    replica_index: int
    stage_index: int
    context_parallel_rank: int
    groups: ProcessGroupCollection
    """tp, cp, tp_cp (the whole stage), dp (replicas), dp_cp (ranks that hold the same parameters: replicas and context parallel
    ranks) and what megatron-core asks for beside; pp is this rank alone, as the plan numbers layers and stages."""
    embedding_group: dist.ProcessGroup | None
    """This rank and its counterpart with the same share of weights, when one is in the first stage and one in the last."""


class GroupBook:
    """Process groups by their ranks, each made once, in one order on every rank (torch wants non-members to take part, too)."""

    def __init__(self, *, rank: int, timeout: timedelta) -> None:
        self._rank, self._timeout = rank, timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def create(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Make all groups and keep those that this rank belongs to; collective over all ranks."""
        for ranks in sorted(set(rank_sets)):
            group = dist.new_group(list(ranks), timeout=self._timeout)
            if self._rank in ranks:
                self._groups[ranks] = group

    def close(self) -> None:
        """Give all groups up; collective, when no message is under way."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def __getitem__(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return self._groups[ranks]


def build_memberships(plan: Plan, *, rank: int, book: GroupBook) -> dict[str, Membership]:
    """Make all process groups of the plan in `book` and return this rank's place in each unit it belongs to; collective."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # where sequence parallel layers gather their inputs
        parallel_state._set_global_memory_buffer()
    book.create(_all_rank_sets(plan))
    memberships = {}
    for name, unit in plan.units.items():
        for replica_index, replica in enumerate(unit.replicas):
            for stage_index, stage in enumerate(replica.stages):
                if rank in stage.ranks:
                    memberships[name] = _membership(plan, name, replica_index, stage_index, rank=rank, book=book)
    return memberships


def _membership(plan: Plan, name: str, replica_index: int, stage_index: int, *, rank: int, book: GroupBook) -> Membership:
    unit = plan.units[name]
    stage = unit.replicas[replica_index].stages[stage_index]
    position = stage.ranks.index(rank)
    context_rank, tensor_rank = divmod(position, unit.tensor_parallel_size)
    alone, data = book[(rank,)], book[_data_parallel_ranks(plan, name, stage_index, position)]
    tensor, context = (book[peers] for peers in _peers(unit, stage, position))
    holders = book[_holders_of_parameters(plan, name, stage_index, tensor_rank)]
    ends = next((pair for pair in _embedding_ranks(plan, name, tensor_rank) if rank in pair), None)
    embedding = book[ends] if ends else None
    groups = ProcessGroupCollection(
        **dict.fromkeys(("tp", "mp"), tensor),
        cp=context,
        tp_cp=book[stage.ranks],
        dp=data,
        **dict.fromkeys(("dp_cp", "intra_dp_cp", "intra_dist_opt"), holders),
        **dict.fromkeys(("pp", "ep", "expt_dp", "intra_expt_dp", "expt_tp", "tp_ep", "tp_ep_pp"), alone),
        embd=embedding,
    )
    return Membership(name, replica_index, stage_index, context_rank, groups, embedding)


def _all_rank_sets(plan: Plan) -> Iterable[tuple[int, ...]]:
    for name, unit in plan.units.items():
        for replica in unit.replicas:
            for stage_index, stage in enumerate(replica.stages):
                yield stage.ranks
                for tensor_rank in range(unit.tensor_parallel_size):
                    yield from _embedding_ranks(plan, name, tensor_rank)
                for position, rank in enumerate(stage.ranks):
                    yield (rank,)
                    yield from _peers(unit, stage, position)
                    yield _holders_of_parameters(plan, name, stage_index, position % unit.tensor_parallel_size)
                    yield _data_parallel_ranks(plan, name, stage_index, position)


def _peers(unit: UnitPlan, stage: Stage, position: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensor and the context parallel group of a rank of a stage."""
    groups = unit.tensor_parallel_groups(stage)
    context_rank, tensor_rank = divmod(position, unit.tensor_parallel_size)
    return groups[context_rank], tuple(group[tensor_rank] for group in groups)


def _holders_of_parameters(plan: Plan, name: str, stage_index: int, tensor_rank: int) -> tuple[int, ...]:
    unit = plan.units[name]
    stages = (replica.stages[stage_index] for replica in unit.replicas)
    return tuple(sorted(group[tensor_rank] for stage in stages for group in unit.tensor_parallel_groups(stage)))


def _data_parallel_ranks(plan: Plan, name: str, stage_index: int, position: int) -> tuple[int, ...]:
    return tuple(sorted(replica.stages[stage_index].ranks[position] for replica in plan.units[name].replicas))


def _embedding_ranks(plan: Plan, name: str, tensor_rank: int) -> tuple[tuple[int, ...], ...]:
    """Pairs of ranks that hold the same share of first and last stage: both in the order in which a group counts its ranks."""
    stages = plan.units[name].replicas[0].virtual_stages
    ends = (_holders_of_parameters(plan, name, stage.stage_index, tensor_rank) for stage in (stages[0], stages[-1]))
    return tuple(tuple(sorted({first, last})) for first, last in zip(*ends, strict=True))


def message_pairs(graph: ModelGraph, plan: Plan) -> set[tuple[int, int]]:
    """All (source, target) rank pairs that may ever exchange a message, in either direction."""
    pairs: set[tuple[int, int]] = set()
    for name, unit in plan.units.items():
        for replica in unit.replicas:
            for first, second in zip(replica.virtual_stages, replica.virtual_stages[1:], strict=False):
                pairs |= set(zip(first.ranks, second.ranks, strict=True))
            for target in graph.downstream(name):
                for other in plan.units[target].replicas:
                    ends = replica.virtual_stages[-1].ranks, other.virtual_stages[0].ranks
                    pairs |= {(source, sink) for source in ends[0] for sink in ends[1]}
    return {pair for source, target in pairs for pair in ((source, target), (target, source)) if source != target}
