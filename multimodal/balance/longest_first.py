"""Balances tokens over replicas and microbatches with the greedy longest-first partition."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil

from multimodal.balance.encoder_items import list_items
from multimodal.balance.generator_samples import place_generators
from multimodal.balance.longest_first_partition import partition_longest_first
from multimodal.balance.validate_inputs import validate_inputs
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths, index_by_sample

_Replicas = tuple[tuple[Microbatch, ...], ...]


def balance_longest_first(
    lengths: Sequence[SampleLengths],
    *,
    graph: ModelGraph,
    plan: Plan,
    micro_batch_size: int,
    encoder_micro_batch_sizes: Mapping[str, int],
) -> Assignment:
    """Balance every unit's tokens on its own: samples over the LLM's replicas, items over each encoder's replicas.

    The LLM's samples go over its replicas by their tokens (DistTrain, Alg. 2; OrchMLLM, Alg. 1), and each replica's samples
    the same way over as few microbatches of at most `micro_batch_size` samples as hold them. Replicas may get unequal numbers
    of microbatches; what is equal is their tokens.

    An encoder's items go over its replicas by their own tokens, wherever their samples went, and each replica processes its items
    in the order in which the LLM needs them. They form microbatches of `encoder_micro_batch_sizes[unit]` items or, by default,
    as many microbatches as there would be if each LLM microbatch with items had one, dealt over the encoder's replicas.

    Ties break by sample id, then by item, so the result does not depend on the order of `lengths`.

    lengths: the global batch.
    micro_batch_size: most samples per LLM microbatch.
    encoder_micro_batch_sizes: unit -> most items per microbatch.

    Raises AssignmentError when the batch is empty or a size is below 1. O(n log n) in the number of items.
    """
    validate_inputs(lengths, graph=graph, micro_batch_size=micro_batch_size, encoder_micro_batch_sizes=encoder_micro_batch_sizes)
    lengths_by_sample = index_by_sample(sorted(lengths, key=lambda sample: sample.sample_id))
    backbone = graph.backbone.name
    llm = _balance_samples(
        lengths_by_sample, num_replicas=plan.units[backbone].data_parallel_size, micro_batch_size=micro_batch_size
    )
    units = {
        unit.name: _balance_items(
            lengths_by_sample,
            unit=unit.name,
            llm=llm,
            num_replicas=plan.units[unit.name].data_parallel_size,
            micro_batch_size=encoder_micro_batch_sizes.get(unit.name),
        )
        for unit in graph.encoders
    }
    return Assignment({**units, backbone: llm, **place_generators(llm, graph=graph, plan=plan)})


def _balance_samples(lengths_by_sample: Mapping[int, SampleLengths], *, num_replicas: int, micro_batch_size: int) -> _Replicas:
    samples = [Atom(sample_id) for sample_id in lengths_by_sample]
    replicas = _partition(samples, _llm_tokens(samples, lengths_by_sample), num_bins=num_replicas)
    return tuple(
        _partition(
            replica,
            _llm_tokens(replica, lengths_by_sample),
            num_bins=ceil(len(replica) / micro_batch_size),
            max_items_per_bin=micro_batch_size,
        )
        for replica in replicas
    )


def _llm_tokens(samples: Sequence[Atom], lengths_by_sample: Mapping[int, SampleLengths]) -> list[int]:
    return [lengths_by_sample[sample.sample_id].num_tokens for sample in samples]


def _partition(
    atoms: Sequence[Atom], costs: Sequence[int], *, num_bins: int, max_items_per_bin: int | None = None
) -> tuple[Microbatch, ...]:
    """Partition atoms; inside a bin they keep their order, and bins keep the order of the partition (longest atom first)."""
    if not atoms:
        return ((),) * num_bins
    bins = partition_longest_first(costs, num_bins=num_bins, max_items_per_bin=max_items_per_bin)
    return tuple(tuple(atoms[index] for index in sorted(members)) for members in bins)


def _balance_items(
    lengths_by_sample: Mapping[int, SampleLengths], *, unit: str, llm: _Replicas, num_replicas: int, micro_batch_size: int | None
) -> _Replicas:
    needed = _items_in_order_of_need(llm, unit=unit, lengths_by_sample=lengths_by_sample)
    position = {atom: index for index, atom in enumerate(atom for items in needed for atom in items)}
    items = sorted(position)
    costs = [lengths_by_sample[atom.sample_id].items[atom.item_index].num_tokens for atom in items]
    replicas = [sorted(replica, key=position.__getitem__) for replica in _partition(items, costs, num_bins=num_replicas)]
    default_count = ceil(len(needed) / num_replicas)
    return tuple(
        _cut_evenly(replica, count=default_count if micro_batch_size is None else ceil(len(replica) / micro_batch_size))
        for replica in replicas
    )


def _items_in_order_of_need(llm: _Replicas, *, unit: str, lengths_by_sample: Mapping[int, SampleLengths]) -> list[Microbatch]:
    """Items of every LLM microbatch that has any: all replicas' first microbatches, then all second ones, ..."""
    rounds = range(max(len(replica) for replica in llm))
    in_time = [replica[index] for index in rounds for replica in llm if index < len(replica)]
    items = (list_items(microbatch, unit=unit, lengths_by_sample=lengths_by_sample) for microbatch in in_time)
    return [microbatch for microbatch in items if microbatch]


def _cut_evenly(atoms: Sequence[Atom], *, count: int) -> tuple[Microbatch, ...]:
    """Cut into `count` runs whose lengths differ by at most one; fewer when there are fewer atoms."""
    count = min(count, len(atoms))
    bounds = [len(atoms) * index // count for index in range(count + 1)] if count else [0]
    return tuple(tuple(atoms[first:last]) for first, last in pairwise(bounds))
