"""Entrain's hierarchical microbatch assignment: encoders and LLM group the same samples differently (Entrain, Alg. 4)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError

MAX_SUBSET_SUMS = 256
"""Most sums of samples' loads that are kept in the search for those to defer (csrc/subset_sums.h)."""
NEEDS_KERNELS = (
    "Entrain's microbatches are assigned by the C++ kernels, which cannot be used here; run 'pip install -e .' where this copy "
    "of Braid lies"
)


def assign_entrain(
    llm_loads: npt.ArrayLike,
    *,
    encoder_loads: npt.ArrayLike,
    num_replicas: int,
    num_microbatches: int,
    min_num_microbatches: int | None = None,
) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
    """Distribute samples over replicas and microbatches so that encoder and LLM microbatches are each even.

    Replicas get their samples, each replica its number of microbatches and encoder microbatches (csrc/stratified_assignment.cpp);
    then LLM parts are deferred inside pairs of microbatches (csrc/pairwise_deferral.cpp) that run one after the other. LLM
    microbatch k needs encoder microbatches k and k - 1 only.

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
    replica's number of microbatches. Raises AssignmentError if the C++ kernels are not built: it has no other form.
    """
    if kernels is None:
        raise AssignmentError(f"{NEEDS_KERNELS}, or choose another balancer")
    llm = np.asarray(llm_loads, np.float64)
    encoders = np.ascontiguousarray(encoder_loads, np.float64).reshape(-1, len(llm))
    return kernels.assign_entrain(
        llm,
        encoders,
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
        min_num_microbatches=num_microbatches if min_num_microbatches is None else min_num_microbatches,
        max_subset_sums=MAX_SUBSET_SUMS,
    )
