"""Entrain's hierarchical microbatch assignment: encoders and LLM group the same samples differently (Entrain, Alg. 4)."""

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy.typing as npt

from multimodal.balance.pair_order import order_pairs
from multimodal.balance.pairwise_deferral import defer_pairwise
from multimodal.balance.replica_assignment import assign_replicas, dominant_shares
from multimodal.balance.sample_loads import SampleLoads, order_by_id
from multimodal.balance.stratified_assignment import effective_num_microbatches, stratify
from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError

Microbatches = tuple[tuple[int, ...], ...]

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ReplicaMicrobatches:
    """The microbatches of one replica in their order, each the indices of its samples in the order of their ids."""

    encoder_microbatches: Microbatches
    """Every sample of the replica once, also those without encoder work (in the microbatch where the LLM has them)."""
    llm_microbatches: Microbatches
    """Every sample of the replica once: in the microbatch of the same number as the encoders, or in the next one."""
    deferred: tuple[int, ...]
    """The samples whose LLM microbatch is later than their encoder microbatch, in the order of their ids."""


@dataclass(frozen=True, slots=True)
class EntrainAssignment:
    """The placement of one global batch."""

    replicas: tuple[ReplicaMicrobatches, ...]


def assign_entrain(
    llm_loads: npt.ArrayLike,
    *,
    encoder_loads: npt.ArrayLike,
    num_replicas: int,
    num_microbatches: int,
    sample_ids: Sequence[int] | None = None,
    min_num_microbatches: int | None = None,
    merge_encoders: bool = False,
    max_subset_sums: int = 256,
) -> EntrainAssignment:
    """Distribute samples over replicas and microbatches so that encoder and LLM microbatches are even, each for itself.

    Replicas get their samples (`assign_replicas`), each replica its number of microbatches (`effective_num_microbatches`) and
    encoder microbatches (`stratify`); then LLM parts are deferred inside pairs of microbatches (`defer_pairwise`) that run one
    after the other (`order_pairs`). LLM microbatch k needs encoder microbatches k and k - 1 only, so a schedule that runs both
    in order never waits for a later one.

    llm_loads: [num_samples]; encoder_loads: [num_samples] or [num_encoders, num_samples], in any unit (seconds, FLOPs, tokens);
        they are compared and added in double precision.
    num_microbatches: per replica; never more than it has samples.
    min_num_microbatches: how far the number may be lowered in a replica where one sample's encoder load would dominate a
        microbatch. None: not at all; 1: to Entrain's K_eff. Fewer, larger microbatches are more even, but in simulation every
        step took as long or longer with them (`benchmarks/entrain_microbatch_count.py`), and they need more memory.
    sample_ids: break ties, so that the result does not depend on the order of the samples; None: their order.
    merge_encoders: several encoders count as one with the sum of their loads (the paper's rule, for encoders that run one after
        the other on the same ranks); otherwise each is balanced for itself.
    max_subset_sums: how finely deferral looks for the subset to defer, see `SubsetSums`.

    Returns indices into the given loads. Raises AssignmentError when there is no sample, a load is negative, not a number or too
    large, or there are fewer samples than replicas.
    """
    loads = _prepare(llm_loads, encoder_loads=encoder_loads, sample_ids=sample_ids, merge_encoders=merge_encoders)
    least = num_microbatches if min_num_microbatches is None else min_num_microbatches
    counts = _Counts(num_replicas, num_microbatches, least, max_subset_sums)
    counts.check(num_samples=len(loads.llm))
    if kernels is None:
        return _build(loads, _place(loads, counts))
    return _build(loads, _Places(*kernels.assign_entrain(loads.llm, loads.encoders, **asdict(counts))))


def assign_entrain_reference(
    llm_loads: npt.ArrayLike,
    *,
    encoder_loads: npt.ArrayLike,
    num_replicas: int,
    num_microbatches: int,
    sample_ids: Sequence[int] | None = None,
    min_num_microbatches: int | None = None,
    merge_encoders: bool = False,
    max_subset_sums: int = 256,
) -> EntrainAssignment:
    """Do in Python what `assign_entrain` does; arguments, result and errors are the same."""
    loads = _prepare(llm_loads, encoder_loads=encoder_loads, sample_ids=sample_ids, merge_encoders=merge_encoders)
    least = num_microbatches if min_num_microbatches is None else min_num_microbatches
    counts = _Counts(num_replicas, num_microbatches, least, max_subset_sums)
    counts.check(num_samples=len(loads.llm))
    return _build(loads, _place(loads, counts))


def _prepare(
    llm_loads: npt.ArrayLike, *, encoder_loads: npt.ArrayLike, sample_ids: Sequence[int] | None, merge_encoders: bool
) -> SampleLoads:
    loads = order_by_id(llm_loads, encoder_loads=encoder_loads, sample_ids=sample_ids)
    if not merge_encoders or len(loads.encoders) < 2:
        return loads
    return SampleLoads(loads.llm, loads.encoders.sum(axis=0, keepdims=True), loads.positions)


@dataclass(frozen=True)
class _Counts:
    num_replicas: int
    num_microbatches: int
    min_num_microbatches: int
    max_subset_sums: int

    def check(self, *, num_samples: int) -> None:
        for name, count in asdict(self).items():
            if not 1 <= operator.index(count) <= _MOST:
                raise AssignmentError(f"{name} is {count}; it must be from 1 to {_MOST}")
        if num_samples < self.num_replicas:
            raise AssignmentError(
                f"{num_samples} samples cannot fill {self.num_replicas} replicas; use a larger global batch or fewer replicas"
            )


class _Places(NamedTuple):
    """Where each sample (in the order of ids) is placed."""

    replicas: Sequence[int]
    encoder_microbatches: Sequence[int]
    llm_microbatches: Sequence[int]
    num_microbatches: Sequence[int]
    """Per replica."""


def _place(loads: SampleLoads, asked: _Counts) -> _Places:
    llm, encoders = loads.llm.tolist(), loads.encoders.tolist()
    replicas = assign_replicas(llm, encoders=encoders, num_replicas=asked.num_replicas)
    encoder_places, llm_places, counts = [0] * len(llm), [0] * len(llm), []
    for replica in range(asked.num_replicas):
        members = [sample for sample, at in enumerate(replicas) if at == replica]
        count = effective_num_microbatches(
            encoders, members=members, num_microbatches=asked.num_microbatches, min_num_microbatches=asked.min_num_microbatches
        )
        counts.append(count)
        placed = stratify(llm, encoders=encoders, members=members, num_microbatches=count)
        groups = [[s for s, at in zip(members, placed, strict=True) if at == index] for index in range(count)]
        deferral = defer_pairwise(llm, microbatches=groups, max_subset_sums=asked.max_subset_sums)
        encoder_shares, llm_shares = dominant_shares(encoders, members=members), dominant_shares([llm], members=members)
        work = [0.0] * count
        for microbatch, encoder_share, llm_share in zip(placed, encoder_shares, llm_shares, strict=True):
            work[microbatch] += encoder_share + llm_share
        order = order_pairs(deferral.pairs, work=work)
        number = {microbatch: index for index, microbatch in enumerate(order)}
        for sample, microbatch in zip(members, placed, strict=True):
            encoder_places[sample] = llm_places[sample] = number[microbatch]
        for sample, microbatch in deferral.deferred:
            llm_places[sample] = number[microbatch]
            if not any(of_encoder[sample] > 0 for of_encoder in encoders):
                encoder_places[sample] = number[microbatch]
    return _Places(replicas, encoder_places, llm_places, counts)


def _build(loads: SampleLoads, places: _Places) -> EntrainAssignment:
    encoder: list[list[list[int]]] = [[[] for _ in range(count)] for count in places.num_microbatches]
    llm: list[list[list[int]]] = [[[] for _ in range(count)] for count in places.num_microbatches]
    deferred: list[list[int]] = [[] for _ in places.num_microbatches]
    rows = zip(loads.positions.tolist(), places.replicas, places.encoder_microbatches, places.llm_microbatches, strict=True)
    for sample, replica, encoder_index, llm_index in rows:
        encoder[replica][encoder_index].append(sample)
        llm[replica][llm_index].append(sample)
        if llm_index > encoder_index:
            deferred[replica].append(sample)
    return EntrainAssignment(
        tuple(
            ReplicaMicrobatches(tuple(map(tuple, encoder[index])), tuple(map(tuple, llm[index])), tuple(deferred[index]))
            for index in range(len(deferred))
        )
    )
