"""Entrain's hierarchical microbatch assignment: encoders and LLM group the same samples differently (Entrain, Alg. 4)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multimodal.balance.algorithms.pairwise_deferral import (
    defer_pairwise,
    dominant_shares,
    effective_num_microbatches,
    order_pairs,
    sort_descending,
    stratify,
)
from multimodal.kernels import kernels
from multimodal.values.arrays.rows import Floats

MAX_SUBSET_SUMS = 256
"""Resolution of the search for the subset to defer, see `SubsetSums`."""


def assign_entrain(
    llm_loads: npt.ArrayLike,
    *,
    encoder_loads: npt.ArrayLike,
    num_replicas: int,
    num_microbatches: int,
    min_num_microbatches: int | None = None,
) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
    """Distribute samples over replicas and microbatches so that encoder and LLM microbatches are each even.

    Replicas get their samples, each replica its number of microbatches (`effective_num_microbatches`) and encoder microbatches
    (`stratify`); then LLM parts are deferred inside pairs of microbatches (`defer_pairwise`) that run one after the other
    (`order_pairs`). LLM microbatch k needs encoder microbatches k and k - 1 only.

    Two greedy rules choose replicas, and the better result is kept. Entrain's (4.3): by encoder load in descending order, each
    sample to the replica with the least LLM load. And one for all units together: by *pressure* in descending order, each sample
    to the replica where the pressure of the units that it needs is then least; that of a load is its ratio to the least load that
    the heaviest replica must have in that unit, the larger of the mean and the largest sample. Then samples are exchanged between
    the heaviest and lighter replicas (`csrc/sample_exchange.cpp`).

    llm_loads: [num_samples], at least one for each replica; encoder_loads: [num_samples] or [num_encoders, num_samples], in any
        unit, added in double precision; encoders are balanced independently. Ties are broken by index: pass samples by their ids.
    num_microbatches: per replica; at most its number of samples. min_num_microbatches: the lower bound for replicas in which one
        sample's encoder load would dominate a microbatch. None: never lower the number; 1: down to Entrain's K_eff.

    Returns every sample's replica, its encoder microbatch and its LLM microbatch there (the same, or the next one), and every
    replica's number of microbatches. Runs as a C++ kernel; without the kernels, replicas get their samples by Entrain's rule
    alone, and all else is the same.
    """
    llm = np.asarray(llm_loads, np.float64)
    encoders = np.ascontiguousarray(encoder_loads, np.float64).reshape(-1, len(llm))
    assign = _assign_in_python if kernels is None else kernels.assign_entrain
    return assign(
        llm,
        encoders,
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
        min_num_microbatches=num_microbatches if min_num_microbatches is None else min_num_microbatches,
        max_subset_sums=MAX_SUBSET_SUMS,
    )


def _assign_in_python(
    llm_loads: Floats,
    encoder_loads: Floats,
    *,
    num_replicas: int,
    num_microbatches: int,
    min_num_microbatches: int,
    max_subset_sums: int,
) -> tuple[list[int], list[int], list[int], list[int]]:
    llm, encoders = llm_loads.tolist(), encoder_loads.tolist()
    replicas = _assign_by_llm_load(llm, encoders, num_replicas)
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
        work = [0.0] * count  # of each microbatch: the sum of its shares of the replica's encoder and LLM work
        shares = (dominant_shares(each, members=members) for each in (encoders, [llm]))
        for microbatch, encoder_share, llm_share in zip(strata, *shares, strict=True):
            work[microbatch] += encoder_share + llm_share
        order = {microbatch: index for index, microbatch in enumerate(order_pairs(deferral.pairs, work=work))}
        for sample, microbatch in zip(members, strata, strict=True):
            encoder_microbatches[sample] = llm_microbatches[sample] = order[microbatch]
        for sample, microbatch in deferral.deferred:
            llm_microbatches[sample] = order[microbatch]
            if not any(loads[sample] > 0 for loads in encoders):
                encoder_microbatches[sample] = order[microbatch]
    return replicas, encoder_microbatches, llm_microbatches, counts


def _assign_by_llm_load(llm: Sequence[float], encoders: Sequence[Sequence[float]], num_replicas: int) -> list[int]:
    """Return the replica of every sample by Entrain's rule (4.3)."""
    shares = dominant_shares(encoders, members=range(len(llm)))
    bins = [(0.0, 0.0, 0)] * num_replicas  # LLM load, encoder share, number of samples
    replicas = [0] * len(llm)
    for sample in sort_descending(shares):
        replica = min(range(num_replicas), key=bins.__getitem__)
        llm_load, encoder_share, count = bins[replica]
        bins[replica] = llm_load + llm[sample], encoder_share + shares[sample], count + 1
        replicas[sample] = replica
    return replicas
