"""Seconds of a step after its last backward: gradient norm, clipping and optimizer, for which all ranks wait."""

from collections.abc import Collection

from multimodal.cost.cluster import Cluster
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_profile import StepProfile
from multimodal.cost.stage_layers import StageKey, StageLayers
from multimodal.cost.step_memory import GRADIENT_BYTES, optimizer_bytes


def update_seconds(stages: StageLayers, *, options: RunOptions, cluster: Cluster, profile: StepProfile | None = None) -> float:
    """Return the seconds of the slowest rank; a profile gives measured ones, including a step's other work outside of layers.

    Without a profile: the optimizer's bytes over the memory bandwidth; 0 if the cluster does not give it.
    """
    # Replicas that are alike need one rank of each kind only.
    units = stages.plan.units
    held = {
        tuple((unit, replica if units[unit].is_unlike else 0, stage) for unit, replica, stage in keys)
        for keys in stages.of_rank.values()
    }
    shares = [_updated_weights(stages, keys, options) for keys in held]
    if profile is not None:
        return profile.seconds + max(
            profile.unit_update_seconds * sum(count > 0 for count in share.values())
            + profile.weight_update_seconds * sum(share.values())
            for share in shares
        )
    if cluster.memory_bandwidth_gbytes_per_second is None:
        return 0.0
    num_bytes = update_traffic_bytes(cluster.bytes_per_element) * max(sum(share.values()) for share in shares)
    return num_bytes / (cluster.memory_bandwidth_gbytes_per_second * 1e9)


def update_traffic_bytes(bytes_per_element: int) -> float:
    """Return the bytes per weight that an update moves through memory.

    The gradient is read for its norm, read and written by clipping, and read by Adam, which reads and writes its state. The
    weight itself is written if that state includes an fp32 master weight, else also read.
    """
    gradient = max(GRADIENT_BYTES, bytes_per_element)
    return float(4 * gradient + 2 * optimizer_bytes(bytes_per_element) + bytes_per_element * (1 if bytes_per_element < 4 else 2))


def _updated_weights(stages: StageLayers, keys: Collection[StageKey], options: RunOptions) -> dict[str, float]:
    """Return, by unit, the trained weights that a rank with these stages updates: a share if replicas share the optimizer."""
    weights: dict[str, float] = {}
    for unit, replica, stage in keys:
        shares = stages.state_shares((unit, replica, stage), num_copies=options.num_state_copies)
        own = sum(num_weights / (len(ranks) if options.zero_stage else 1) for ranks, num_weights in shares)
        weights[unit] = weights.get(unit, 0.0) + own / stages.tensor_size((unit, replica, stage))
    return weights
