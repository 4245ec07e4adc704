"""Chooses how many replicas of each template to use for a number of nodes, and the microbatches of each replica."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.plan.planners.templates.pipeline_times import PipelineTimes
from multimodal.plan.planners.templates.template_set import Instance
from multimodal.values.arrays.rows import Integers
from multimodal.values.errors import PlanError

BISECTIONS = 50
"""Halvings of the interval that holds the shortest step: below the precision of its inputs."""


class Instantiation(NamedTuple):
    """Replicas that use all nodes, the largest first."""

    instances: tuple[Instance, ...]
    step_seconds: float
    """Seconds of a step of the slowest replica."""


@dataclass(frozen=True)
class Demand:
    """The nodes and microbatches that a set of replicas must serve, and how many replicas it must have."""

    num_nodes: int
    """All of them are used."""
    num_microbatches: int
    """Microbatches of the global batch; every replica gets one at least."""
    least_replicas: int = 1


def instantiate(times: Mapping[int, PipelineTimes], demand: Demand) -> Instantiation:
    """Return the replicas with the shortest step among all that use all nodes, with the best shares of the batch.

    times: nodes -> the pipeline of their template. For a step of T seconds, a template of n nodes takes c_n(T) microbatches, and
    a knapsack over nodes finds the replicas that take most: A(k, m) = max_n A(k - 1, m - n) + c_n(T). The shortest T for which
    they take the whole batch is found by bisection, so combinations are not enumerated (Oobleck 2.4.2 enumerates all, more than
    10^8 for 100 nodes). Raises PlanError if there is none. O(replicas x nodes x templates).
    """
    most = min(demand.num_nodes // min(times), demand.num_microbatches)
    if most < demand.least_replicas:
        raise PlanError(_problem(times, demand))
    low, high = 0.0, max(each.seconds(demand.num_microbatches) for each in times.values())
    sizes = _choose(times, demand, high, most)
    if sizes is None:
        raise PlanError(_problem(times, demand))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _choose(times, demand, middle, most)
        low, high, sizes = (middle, high, sizes) if found is None else (low, middle, found)
    return share_batch(times, sizes, num_microbatches=demand.num_microbatches)


def share_batch(times: Mapping[int, PipelineTimes], sizes: Sequence[int], *, num_microbatches: int) -> Instantiation:
    """Share a batch among replicas in whole microbatches so that the slowest one is as fast as possible; each gets one at least.

    sizes: nodes of each replica. Raises PlanError if there are fewer microbatches than replicas.
    """
    if num_microbatches < len(sizes):
        raise PlanError(
            f"a global batch of {num_microbatches} microbatches cannot be shared by {len(sizes)} replicas; make it at least "
            f"{len(sizes)} microbatches, or microbatches smaller"
        )
    ordered = sorted(sizes, reverse=True)
    low, high = 0.0, max(times[size].seconds(num_microbatches) for size in ordered)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        counts = [times[size].most_microbatches(middle) for size in ordered]
        low, high = (low, middle) if min(counts) >= 1 and sum(counts) >= num_microbatches else (middle, high)
    counts = [times[size].most_microbatches(high) for size in ordered]

    def end(index: int) -> float:
        return times[ordered[index]].seconds(counts[index])

    while sum(counts) > num_microbatches:
        shrinking = (each for each in range(len(counts)) if counts[each] > 1)
        latest = max(shrinking, key=end)
        counts[latest] -= max(1, min(counts[latest] - 1, (sum(counts) - num_microbatches) // len(counts)))
    return Instantiation(tuple(map(Instance, ordered, counts)), max(map(end, range(len(counts)))))


def _choose(times: Mapping[int, PipelineTimes], demand: Demand, seconds: float, most: int) -> tuple[int, ...] | None:
    """Return the nodes of replicas that process the whole batch in this time; None if there are none."""
    takes = {size: each.most_microbatches(seconds) for size, each in times.items()}
    usable = [size for size in takes if takes[size] >= 1 and size <= demand.num_nodes]
    nothing = np.iinfo(np.int64).min // 2
    taken = np.full(demand.num_nodes + 1, nothing)
    taken[0] = 0
    last: list[Integers] = []
    best: tuple[int, int] | None = None
    for count in range(1, most + 1):
        options = np.full((len(usable), demand.num_nodes + 1), nothing)
        for row, size in enumerate(usable):
            options[row, size:] = taken[: demand.num_nodes + 1 - size] + takes[size]
        if not len(usable):
            return None
        last.append(np.array(usable)[options.argmax(axis=0)])
        taken = np.maximum(options.max(axis=0), nothing)
        found = int(taken[-1])
        if count >= demand.least_replicas and found >= demand.num_microbatches and (best is None or found > best[0]):
            best = found, count
    if best is None:
        return None
    sizes, left = [], demand.num_nodes
    for of_nodes in reversed(last[: best[1]]):
        sizes.append(int(of_nodes[left]))
        left -= sizes[-1]
    return tuple(sizes)


def _problem(times: Mapping[int, PipelineTimes], demand: Demand) -> str:
    least, most = min(times), max(times)
    if demand.num_nodes < demand.least_replicas * least:
        return (
            f"{demand.num_nodes} nodes cannot hold {demand.least_replicas} replicas of at least {least} nodes each; use "
            f"{demand.least_replicas * least} nodes, or a lower fault tolerance"
        )
    if demand.num_microbatches < demand.least_replicas:
        return (
            f"a global batch of {demand.num_microbatches} microbatches cannot be shared by {demand.least_replicas} replicas; "
            f"make it at least {demand.least_replicas} microbatches, or microbatches smaller"
        )
    return (
        f"{demand.num_nodes} nodes cannot all be used by at most {demand.num_microbatches} replicas (one for each microbatch) "
        f"of {least} to {most} nodes; make the global batch larger, or use fewer nodes"
    )
