"""Entrain's hierarchical microbatch assignment: encoders and LLM group the same samples differently (Entrain, Alg. 4)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multimodal.balance.algorithms.greedy_assignment import dominant_shares, effective_num_microbatches, stratify
from multimodal.balance.algorithms.pairwise_deferral import defer_pairwise, order_pairs
from multimodal.balance.algorithms.replica_assignment import assign_replicas
from multimodal.balance.algorithms.validate_arguments import Loads, read_loads, validate_count
from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError


def assign_entrain(
    llm_loads: npt.ArrayLike,
    *,
    encoder_loads: npt.ArrayLike,
    num_replicas: int,
    num_microbatches: int,
    min_num_microbatches: int | None = None,
    max_subset_sums: int = 256,
) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
    """Distribute samples over replicas and microbatches so that encoder and LLM microbatches are each even.

    Replicas get their samples (`assign_replicas`), each replica its number of microbatches (`effective_num_microbatches`) and
    encoder microbatches (`stratify`); then LLM parts are deferred inside pairs of microbatches (`defer_pairwise`) that run one
    after the other (`order_pairs`). LLM microbatch k needs encoder microbatches k and k - 1 only, so a schedule that runs both
    in order never waits for a later one.

    llm_loads: [num_samples]; encoder_loads: [num_samples] or [num_encoders, num_samples] (0 encoders are allowed), in any unit
        (seconds, FLOPs, tokens); they are compared and added in double precision. Ties are broken by index: pass samples by their
        ids.
    num_microbatches: per replica; at most its number of samples.
    min_num_microbatches: the lower bound for replicas in which one sample's encoder load would dominate a microbatch. None: never
    lower the number; 1: down to Entrain's K_eff. Fewer, larger microbatches are more even, but in simulation every step took as
    long or longer with them (`benchmarks/entrain_microbatch_count.py`), and they need more memory. max_subset_sums: resolution of
    the search for the subset to defer, see `SubsetSums`.

    Several encoders are balanced independently; for the paper's rule (encoders that run one after the other on the same ranks
    count as one) pass the sum of their loads.

    Returns every sample's replica, its encoder microbatch and its LLM microbatch there (the same, or the next one), and every
    replica's number of microbatches. Runs as a C++ kernel, with the same result, if the kernels are built. Raises AssignmentError
    if there is no sample, a load is negative, not a number or too large, or there are fewer samples than replicas.
    """
    llm, encoders = _read_loads(llm_loads, encoder_loads)
    min_num_microbatches = num_microbatches if min_num_microbatches is None else min_num_microbatches
    validate_count(num_replicas, name="num_replicas")
    validate_count(num_microbatches, name="num_microbatches")
    validate_count(min_num_microbatches, name="min_num_microbatches")
    validate_count(max_subset_sums, name="max_subset_sums")
    if len(llm) < num_replicas:
        raise AssignmentError(
            f"{len(llm)} samples cannot fill {num_replicas} replicas; use a larger global batch or fewer replicas"
        )
    assign = assign_entrain_reference if kernels is None else kernels.assign_entrain
    return assign(
        llm,
        encoders,
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
        min_num_microbatches=min_num_microbatches,
        max_subset_sums=max_subset_sums,
    )


def assign_entrain_reference(
    llm_loads: Loads,
    encoder_loads: Loads,
    *,
    num_replicas: int,
    num_microbatches: int,
    min_num_microbatches: int,
    max_subset_sums: int,
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Compute the kernel's result in Python.

    Returns every sample's replica, encoder microbatch and LLM microbatch, and every replica's number of microbatches.
    """
    llm, encoders = llm_loads.tolist(), encoder_loads.tolist()
    replicas = assign_replicas(llm, encoders=encoders, num_replicas=num_replicas)
    encoder_microbatches, llm_microbatches, counts = [0] * len(llm), [0] * len(llm), []
    for replica in range(num_replicas):
        members = [sample for sample, replica_of_sample in enumerate(replicas) if replica_of_sample == replica]
        count = effective_num_microbatches(
            encoders, members=members, num_microbatches=num_microbatches, min_num_microbatches=min_num_microbatches
        )
        counts.append(count)
        strata = stratify(llm, encoders=encoders, members=members, num_microbatches=count)
        microbatches: list[list[int]] = [[] for _ in range(count)]
        for sample, microbatch in zip(members, strata, strict=True):
            microbatches[microbatch].append(sample)
        deferral = defer_pairwise(llm, microbatches=microbatches, max_subset_sums=max_subset_sums)
        work = _add_shares(llm, encoders, members, strata, count)
        order = {microbatch: index for index, microbatch in enumerate(order_pairs(deferral.pairs, work=work))}
        for sample, microbatch in zip(members, strata, strict=True):
            encoder_microbatches[sample] = llm_microbatches[sample] = order[microbatch]
        for sample, microbatch in deferral.deferred:
            llm_microbatches[sample] = order[microbatch]
            if not any(loads[sample] > 0 for loads in encoders):
                encoder_microbatches[sample] = order[microbatch]
    return replicas, encoder_microbatches, llm_microbatches, counts


def _add_shares(
    llm: Sequence[float], encoders: Sequence[Sequence[float]], members: Sequence[int], strata: Sequence[int], count: int
) -> list[float]:
    """Return the work of each microbatch of a replica: the sum of its shares of the replica's encoder and LLM work."""
    work = [0.0] * count
    encoder_shares, llm_shares = dominant_shares(encoders, members=members), dominant_shares([llm], members=members)
    for microbatch, encoder_share, llm_share in zip(strata, encoder_shares, llm_shares, strict=True):
        work[microbatch] += encoder_share + llm_share
    return work


def _read_loads(llm_loads: npt.ArrayLike, encoder_loads: npt.ArrayLike) -> tuple[Loads, Loads]:
    """Return [num_samples] and [num_encoders, num_samples] of float64; raises AssignmentError."""
    llm, encoders = read_loads(llm_loads, name="LLM loads"), read_loads(encoder_loads, name="encoder loads")
    if llm.ndim != 1 or llm.size == 0:
        raise AssignmentError(f"LLM loads of shape {llm.shape}: give one per sample, of at least one sample")
    encoders = encoders[None, :] if encoders.ndim == 1 else encoders
    if encoders.ndim != 2 or encoders.shape[1] != llm.size:
        raise AssignmentError(
            f"encoder loads of shape {encoders.shape} for {llm.size} samples: give one per sample, or a row of them per encoder"
        )
    return llm, np.ascontiguousarray(encoders)
