"""The groups of ranks in which a plan's run communicates; NCCL has a communicator for each of them on its ranks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from multimodal.values.action import Place
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.state_copies import sharing_groups
from multimodal.values.plan import Plan, UnitPlan, VirtualStage


class Track(NamedTuple):
    """Messages that share a communicator over all ranks, so that they follow each other on a rank.

    Forwards and backwards of a stage, its incoming and outgoing messages, and messages between units never wait for each other.
    """

    direction: str
    """`forward` or `backward`."""
    parity: int
    """Within a unit, 1 if the earlier stage has an odd number, else 0; between units, `BETWEEN_UNITS`."""


BETWEEN_UNITS = -1


def track_of(direction: str, source: Place, target: Place) -> Track:
    """Return the track of a message."""
    return Track(direction, min(source.stage, target.stage) % 2 if source.unit == target.unit else BETWEEN_UNITS)


class Partners(NamedTuple):
    """Ranks with which one rank may exchange messages on a track."""

    targets: frozenset[int]
    sources: frozenset[int]


def message_partners(graph: ModelGraph, plan: Plan, *, rank: int) -> Mapping[Track, Partners]:
    """Return a rank's partners by track; lists every track of the plan, in the same order on all ranks. O(ranks)."""
    found: dict[Track, tuple[set[int], set[int]]] = {}
    for track, sources, targets, is_paired in _links(graph, plan):
        back = track._replace(direction="backward")
        for way in (track, back):
            found.setdefault(way, (set(), set()))
        receivers, senders = (
            set() if rank not in here else {there[here.index(rank)]} if is_paired else set(there)
            for here, there in ((sources, targets), (targets, sources))
        )
        for way, theirs, ours in ((track, receivers, senders), (back, senders, receivers)):
            found[way][0].update(theirs - {rank})
            found[way][1].update(ours - {rank})
    return {track: Partners(*map(frozenset, found[track])) for track in sorted(found)}


def _links(graph: ModelGraph, plan: Plan) -> Iterator[tuple[Track, tuple[int, ...], tuple[int, ...], bool]]:
    """Yield each forward link: its track, the ranks at both ends, and True if rank i sends only to rank i."""

    def ranks_of(unit: UnitPlan, stage: int) -> tuple[int, ...]:
        return tuple(rank for replica in unit.replicas for rank in replica.virtual_stages[stage].ranks)

    for name, unit in plan.units.items():
        for replica in unit.replicas:
            for first, second in pairwise(replica.virtual_stages):
                if first.ranks != second.ranks:
                    is_paired = len(first.ranks) == len(second.ranks)
                    yield Track("forward", first.index % 2), first.ranks, second.ranks, is_paired
        for target in graph.downstream(name):
            ends = ranks_of(unit, -1), ranks_of(plan.units[target], 0)
            if len(set(ends[0]) | set(ends[1])) > 1:
                yield Track("forward", BETWEEN_UNITS), *ends, False


def group_ranks(
    graph: ModelGraph, plan: Plan, *, num_state_copies: int | None = None, shares_weights: bool = False
) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of all process groups of units, some repeatedly or single; num_state_copies: as in `RunOptions`.

    shares_weights: each copy is of the weights, too, and the ranks that keep the same part of every copy sum its gradients.
    """
    for name, unit in plan.units.items():
        if unit.is_unlike or (num_state_copies is not None and not shares_weights):
            yield from sharing_groups(graph, name, unit, num_copies=num_state_copies or 1)
        for replica in unit.replicas:
            for stage in replica.stages:
                yield stage.ranks
                yield from ((rank,) for rank in stage.ranks)
                yield from unit.tensor_parallel_groups(stage)
                yield from zip(*unit.tensor_parallel_groups(stage), strict=True)
        if unit.is_unlike:
            yield from reduction_groups(graph, name, unit)
            continue
        for index, stage in enumerate(unit.replicas[0].stages):
            yield from (data_parallel_ranks(unit, index, position) for position in range(len(stage.ranks)))
            for tensor_rank in range(unit.tensor_size(stage)):
                yield (holders := holders_of_parameters(unit, index, tensor_rank))
                if shares_weights and num_state_copies is not None and len(holders) > 1:
                    yield from (copies := cut_into_copies(holders, num_state_copies))
                    yield from zip(*copies, strict=True)
            if unit.expert_parallel_size > 1:
                for rank in (rank for replica in unit.replicas for rank in replica.stages[index].ranks):
                    yield expert_parallel_ranks(unit, index, rank)
                    yield holders_of_experts(unit, index, rank)
        for tensor_rank in range(unit.tensor_sizes[0]):
            yield from embedding_ranks(unit, tensor_rank, are_tied=graph.unit(name).ties_embeddings)


def data_parallel_ranks(unit: UnitPlan, stage_index: int, position: int) -> tuple[int, ...]:
    """Return the ranks at one position of a stage, over its replicas."""
    return tuple(sorted(replica.stages[stage_index].ranks[position] for replica in unit.replicas))


def holders_of_parameters(unit: UnitPlan, stage_index: int, tensor_rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same parameters of a stage: replicas and context parallel ranks."""
    stages = (replica.stages[stage_index] for replica in unit.replicas)
    return tuple(sorted(group[tensor_rank] for stage in stages for group in unit.tensor_parallel_groups(stage)))


def cut_into_copies(holders: tuple[int, ...], num_copies: int) -> list[tuple[int, ...]]:
    """Return the ranks that share each copy of the same parameters: neighbours, equally many; num_copies divides their number."""
    size = len(holders) // num_copies
    return [holders[start : start + size] for start in range(0, len(holders), size)]


def expert_parallel_ranks(unit: UnitPlan, stage_index: int, rank: int) -> tuple[int, ...]:
    """Return the ranks that share a stage's experts with this rank, in the order of their replicas, and so of their experts."""
    stages = [replica.stages[stage_index].ranks for replica in unit.replicas]
    replica = next(index for index, ranks in enumerate(stages) if rank in ranks)
    first = replica - replica % unit.expert_parallel_size
    return tuple(ranks[stages[replica].index(rank)] for ranks in stages[first : first + unit.expert_parallel_size])


def holders_of_experts(unit: UnitPlan, stage_index: int, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same parameters of experts as this rank."""
    stage = next(replica.stages[stage_index] for replica in unit.replicas if rank in replica.stages[stage_index].ranks)
    tensor_rank = stage.ranks.index(rank) % unit.tensor_size(stage)
    place = expert_parallel_ranks(unit, stage_index, rank).index(rank)
    holders = holders_of_parameters(unit, stage_index, tensor_rank)
    return tuple(each for each in holders if expert_parallel_ranks(unit, stage_index, each).index(each) == place)


def embedding_ranks(unit: UnitPlan, tensor_rank: int, *, are_tied: bool) -> tuple[tuple[int, ...], ...]:
    """Return pairs of ranks that hold the same share of tied embeddings, in the order in which groups count ranks."""
    if not are_tied:
        return ()
    stages = unit.replicas[0].virtual_stages
    ends = (holders_of_parameters(unit, stage.stage_index, tensor_rank) for stage in (stages[0], stages[-1]))
    return tuple(tuple(sorted({first, last})) for first, last in zip(*ends, strict=True))


def max_communicators_per_rank(graph: ModelGraph, plan: Plan) -> int:
    """Return the most communicators of a rank: groups of different ranks, tracks of messages, and the group of all. O(ranks)."""
    groups: Iterable[tuple[int, ...]] = {ranks for ranks in group_ranks(graph, plan) if len(ranks) > 1}
    of_ranks = Counter(rank for ranks in groups for rank in ranks)
    return 1 + 2 * len({track for track, *_ in _links(graph, plan)}) + max(of_ranks.values(), default=0)


class WeightPart(NamedTuple):
    """The share from `first` / `num_parts` to `end` / `num_parts` of every matrix that tensor parallel ranks cut.

    Its holders reduce gradients together if the replicas of a unit are not alike. Tensor parallel rank i of t holds the share
    [i / t, (i + 1) / t) of every such matrix, or of each of its blocks. Replicas of tp 2 and of tp 4 together cut at 1/4, 1/2
    and 3/4: each of these four parts is held by one rank of every replica (and context parallel rank).
    """

    first: int
    end: int
    num_parts: int
    ranks: tuple[int, ...]
    """The ranks that hold it, ascending."""


def holders_of_layer(unit: UnitPlan, layer: int) -> list[VirtualStage]:
    """Return the stage of every replica that holds a layer."""
    return [stage for replica in unit.replicas for stage in replica.virtual_stages if layer in stage.layers]


def holders_of_embeddings(unit: UnitPlan) -> list[VirtualStage]:
    """Return the stages that hold tied word embeddings: the first and the last of every replica."""
    ends = ((replica.virtual_stages[0], replica.virtual_stages[-1]) for replica in unit.replicas)
    return [stage for pair in ends for stage in dict.fromkeys(pair)]


def weight_parts(unit: UnitPlan, holders: Sequence[VirtualStage]) -> list[WeightPart]:
    """Cut the weights that some stages all hold wherever one of them cuts; parts ascend."""
    num_parts = lcm(*map(unit.tensor_size, holders))
    bounds = sorted({num_parts * index // size for size in map(unit.tensor_size, holders) for index in range(size + 1)})
    groups = [group for stage in holders for group in unit.tensor_parallel_groups(stage)]
    return [
        WeightPart(first, end, num_parts, tuple(sorted({group[first * len(group) // num_parts] for group in groups})))
        for first, end in pairwise(bounds)
    ]


def whole_holders(holders: Sequence[VirtualStage]) -> tuple[int, ...]:
    """Return the ranks that hold the weights that are not cut, ascending."""
    return tuple(sorted({rank for stage in holders for rank in stage.ranks}))


def reduction_groups(graph: ModelGraph, name: str, unit: UnitPlan) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of all groups in which a unit with unlike replicas reduces gradients."""
    model = graph.unit(name)
    together = [holders_of_layer(unit, each.start) for each in unit.shared_ranges if any(map(model.is_trainable, each))]
    if model.ties_embeddings and model.is_trainable(0):
        together.append(holders_of_embeddings(unit))
    for holders in together:
        yield whole_holders(holders)
        yield from (part.ranks for part in weight_parts(unit, holders))
