"""Sets how fast a cluster computes by one measured step: every computation takes the same factor longer or shorter."""

from collections.abc import Callable
from dataclasses import replace

from multimodal.cost.cluster import Cluster
from multimodal.values.errors import ConfigError

_MOST_ROUNDS = 20


def scale_compute(cluster: Cluster, *, factor: float) -> Cluster:
    """Return the cluster with matrix products, attention and elementwise work `factor` times as fast; links stay as they are.

    Raises ConfigError where that would be more than the peak.
    """
    attention = cluster.efficiency if cluster.attention_efficiency is None else cluster.attention_efficiency
    if factor <= 0 or max(cluster.efficiency, attention) * factor > 1:
        raise ConfigError(
            f"computing {factor:.3g} times as fast as efficiency {cluster.efficiency:.3g} (attention {attention:.3g}) is beyond "
            "the peak, or no speed at all; check the measured step and the set-up"
        )
    bandwidth = cluster.memory_bandwidth_gbytes_per_second
    return replace(
        cluster,
        efficiency=cluster.efficiency * factor,
        attention_efficiency=attention * factor,
        memory_bandwidth_gbytes_per_second=None if bandwidth is None else bandwidth * factor,
    )


def calibrate_compute(
    cluster: Cluster, *, predict_seconds: Callable[[Cluster], float], measured_seconds: float, tolerance: float = 1e-4
) -> Cluster:
    """Return the cluster on which the prediction equals one measurement, up to `tolerance` of it.

    A step's seconds grow with 1 / factor along pieces of straight lines, so the secant method needs a few predictions.
    Raises ConfigError when communication alone takes longer than was measured, or the peak would be exceeded.
    """
    slowness, seconds = 1.0, predict_seconds(cluster)
    previous_slowness, previous_seconds = 2.0, predict_seconds(scale_compute(cluster, factor=0.5))
    for _ in range(_MOST_ROUNDS):
        if abs(seconds - measured_seconds) <= tolerance * measured_seconds:
            return scale_compute(cluster, factor=1 / slowness)
        if seconds == previous_seconds:
            break
        slope = (seconds - previous_seconds) / (slowness - previous_slowness)
        previous_slowness, previous_seconds = slowness, seconds
        slowness += (measured_seconds - seconds) / slope
        if slowness <= 0:
            raise ConfigError(
                f"a step of {measured_seconds:.4g} s cannot be reached: its communication alone is predicted to take longer; "
                "check the links of the cluster file and the set-up"
            )
        seconds = predict_seconds(scale_compute(cluster, factor=1 / slowness))
    raise ConfigError(
        f"no speed of computation predicts a step of {measured_seconds:.4g} s; the closest found was {seconds:.4g} s at "
        f"{1 / slowness:.3g} times the cluster file's speed"
    )
