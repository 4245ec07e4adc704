"""Places a global batch on replicas that are not alike: each gets microbatches, and work, in proportion to its speed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from multimodal.balance import BalancerRow
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.values.arrays.length_arrays import LengthBatch
from multimodal.values.assignment import Assignment, Microbatch
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import SampleLengths


def balance_unlike(
    lengths: Sequence[SampleLengths],
    *,
    graph: ModelGraph,
    shares: Sequence[int],
    balancer: BalancerRow,
    options: BalanceOptions,
) -> Assignment:
    """Place every sample, and its items beside it, on replicas of all units with `shares` microbatches.

    The balancer makes all microbatches as it would for a single replica. The heaviest ones are dealt first, each to the replica
    whose work per microbatch of its share stays least. balancer: one that keeps samples whole. With fewer samples than
    microbatches, replicas get fewer. Raises AssignmentError. O(samples + microbatches x replicas).
    """
    if not balancer.keeps_samples_whole:
        raise AssignmentError("replicas that are not alike need a balancer that keeps samples whole; choose another --balance")
    if not shares or min(shares) < 1:
        raise AssignmentError(f"every replica needs at least one microbatch, found shares of {list(shares)}")
    whole = balancer(lengths, graph=graph, plan=_one_replica(graph), options=replace(options, num_microbatches=sum(shares)))
    microbatches = whole.units[graph.backbone.name][0]
    of_sample = {atom.sample_id: index for index, microbatch in enumerate(microbatches) for atom in microbatch}
    owners = _deal(_microbatch_work(microbatches, graph, lengths, options), shares)
    return Assignment({name: _split(replicas[0], of_sample, owners, len(shares)) for name, replicas in whole.units.items()})


def _one_replica(graph: ModelGraph) -> Plan:
    return Plan({unit.name: UnitPlan((Replica((Stage((0,), ((0, len(unit.layers)),)),)),)) for unit in graph.units})


def _microbatch_work(
    microbatches: Sequence[Microbatch], graph: ModelGraph, lengths: Sequence[SampleLengths], options: BalanceOptions
) -> list[float]:
    work = BatchWork(graph, LengthBatch.of(lengths), options)
    flops = dict(zip(work.arrays.sample_ids.tolist(), work.whole_sample_flops().tolist(), strict=True))
    return [sum(flops[atom.sample_id] for atom in microbatch) for microbatch in microbatches]


def _deal(work: Sequence[float], shares: Sequence[int]) -> list[int]:
    """Return the replica of each microbatch."""
    owners, counts, loads = [0] * len(work), [0] * len(shares), [0.0] * len(shares)
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        open_ones = (each for each in range(len(shares)) if counts[each] < shares[each])
        owner = min(open_ones, key=lambda each: ((loads[each] + work[index]) / shares[each], each))
        owners[index], counts[owner], loads[owner] = owner, counts[owner] + 1, loads[owner] + work[index]
    return owners


def _split(
    microbatches: Sequence[Microbatch], of_sample: Mapping[int, int], owners: Sequence[int], num_replicas: int
) -> tuple[tuple[Microbatch, ...], ...]:
    """Deal a unit's microbatches, each to where the LLM's microbatch of its samples goes."""
    found: list[list[Microbatch]] = [[] for _ in range(num_replicas)]
    for microbatch in microbatches:
        found[owners[of_sample[microbatch[0].sample_id]]].append(microbatch)
    return tuple(map(tuple, found))
