"""Chooses how many replicas of each template to use for a number of nodes, and the microbatches of each replica."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from multimodal.plan.planners.templates.template_set import Instance, PipelineTimes
from multimodal.values.arrays.rows import Integers
from multimodal.values.errors import PlanError

BISECTIONS = 50
"""Halvings of the interval that holds the shortest step: below the precision of its inputs."""


class Instantiation(NamedTuple):
    """Replicas that use all nodes, the largest first."""

    instances: tuple[Instance, ...]
    step_seconds: float
    """Seconds of a step of the slowest replica."""


def instantiate(
    times: Mapping[int, PipelineTimes], num_nodes: int, num_microbatches: int, least_replicas: int = 1
) -> Instantiation:
    """Return the replicas with the shortest step among all that use all nodes, with the best shares of the batch.

    times: nodes -> the pipeline of their template. num_microbatches: of the global batch; every replica gets one at least. For a
    step of T seconds, a template of n nodes takes c_n(T) microbatches, and a knapsack over nodes finds the replicas that take
    most: A(k, m) = max_n A(k - 1, m - n) + c_n(T). The shortest T for which they take the whole batch is found by bisection
    (Oobleck 2.4.2 enumerates). Raises PlanError if there is none. O(replicas x nodes x templates).
    """
    most = min(num_nodes // min(times), num_microbatches)
    if most < least_replicas:
        raise PlanError(_problem(times, num_nodes, num_microbatches, least_replicas))
    low, high = 0.0, max(each.seconds(num_microbatches) for each in times.values())
    choose = partial(_choose, times, num_nodes, num_microbatches, least_replicas, most)
    sizes = choose(high)
    if sizes is None:
        raise PlanError(_problem(times, num_nodes, num_microbatches, least_replicas))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = choose(middle)
        low, high, sizes = (middle, high, sizes) if found is None else (low, middle, found)
    return share_batch(times, sizes, num_microbatches=num_microbatches)


def share_batch(times: Mapping[int, PipelineTimes], sizes: Sequence[int], *, num_microbatches: int) -> Instantiation:
    """Share whole microbatches so that the slowest replica (of `sizes` nodes) is fastest; raises PlanError if these are few."""
    if num_microbatches < len(sizes):
        raise PlanError(_cannot_share(num_microbatches, len(sizes)))
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


def _choose(
    times: Mapping[int, PipelineTimes], num_nodes: int, num_microbatches: int, least: int, most: int, seconds: float
) -> tuple[int, ...] | None:
    """Return the nodes of at least `least` and at most `most` replicas that process the whole batch in this time, if any can."""
    takes = {size: each.most_microbatches(seconds) for size, each in times.items()}
    usable = [size for size in takes if takes[size] >= 1 and size <= num_nodes]
    nothing = np.iinfo(np.int64).min // 2
    taken = np.full(num_nodes + 1, nothing)
    taken[0] = 0
    last: list[Integers] = []
    best: tuple[int, int] | None = None
    for count in range(1, most + 1):
        options = np.full((len(usable), num_nodes + 1), nothing)
        for row, size in enumerate(usable):
            options[row, size:] = taken[: num_nodes + 1 - size] + takes[size]
        if not len(usable):
            return None
        last.append(np.array(usable)[options.argmax(axis=0)])
        taken = np.maximum(options.max(axis=0), nothing)
        found = int(taken[-1])
        if count >= least and found >= num_microbatches and (best is None or found > best[0]):
            best = found, count
    if best is None:
        return None
    sizes, left = [], num_nodes
    for of_nodes in reversed(last[: best[1]]):
        sizes.append(int(of_nodes[left]))
        left -= sizes[-1]
    return tuple(sizes)


def _problem(times: Mapping[int, PipelineTimes], num_nodes: int, num_microbatches: int, least_replicas: int) -> str:
    least, most = min(times), max(times)
    if num_nodes < least_replicas * least:
        return (
            f"{num_nodes} nodes cannot hold {least_replicas} replicas of at least {least} nodes each; use "
            f"{least_replicas * least} nodes, or a lower fault tolerance"
        )
    if num_microbatches < least_replicas:
        return _cannot_share(num_microbatches, least_replicas)
    return (
        f"{num_nodes} nodes cannot all be used by at most {num_microbatches} replicas (one for each microbatch) "
        f"of {least} to {most} nodes; make the global batch larger, or use fewer nodes"
    )


def _cannot_share(num_microbatches: int, num_replicas: int) -> str:
    return (
        f"a global batch of {num_microbatches} microbatches cannot be shared by {num_replicas} replicas; make it at least "
        f"{num_replicas} microbatches, or microbatches smaller"
    )
