"""Replicas of templates for a number of nodes, and when nodes are lost or return: new ones, and the layers copied for them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from multimodal.cost.memoize import memoized
from multimodal.plan.planners.templates.template_set import Instance, PipelineTimes, TemplateSet
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
    least, most = min(times), max(times)
    if num_nodes < least_replicas * least:
        raise PlanError(
            f"{num_nodes} nodes cannot hold {least_replicas} replicas of at least {least} nodes each; use "
            f"{least_replicas * least} nodes, or a lower fault tolerance"
        )
    if num_microbatches < least_replicas:
        raise PlanError(_cannot_share(num_microbatches, least_replicas))
    low, high = 0.0, max(each.seconds(num_microbatches) for each in times.values())
    most_replicas = min(num_nodes // least, num_microbatches)
    choose = partial(_choose, times, num_nodes, num_microbatches, least_replicas, most_replicas)
    sizes = choose(high)
    if sizes is None:
        raise PlanError(
            f"{num_nodes} nodes cannot all be used by at most {num_microbatches} replicas (one for each microbatch) "
            f"of {least} to {most} nodes; make the global batch larger, or use fewer nodes"
        )
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
        latest = max((each for each in range(len(counts)) if counts[each] > 1), key=end)
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
        taken = options.max(axis=0)
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


def _cannot_share(num_microbatches: int, num_replicas: int) -> str:
    return (
        f"a global batch of {num_microbatches} microbatches cannot be shared by {num_replicas} replicas; make it at least "
        f"{num_replicas} microbatches, or microbatches smaller"
    )


class LayerCopy(NamedTuple):
    """A copy of one layer's weights and optimizer state between nodes; the GPUs of the receiving node share it."""

    layer: int
    source: int
    target: int
    num_bytes: int


def deal_copies(
    wanted: Mapping[int, Sequence[int]], held: Mapping[int, Sequence[int]], layer_bytes: Sequence[int]
) -> tuple[tuple[LayerCopy, ...], tuple[int, ...]]:
    """Return the copies after which every node has its wanted layers, and the layers that no node has.

    wanted, held: node -> layers. Layers that few nodes have come first, larger ones before smaller ones; each is copied from the
    node that has sent least so far.
    """
    owners: dict[int, list[int]] = defaultdict(list)
    for node in sorted(held):
        for layer in held[node]:
            owners[layer].append(node)
    lacking = [(layer, node) for node in sorted(wanted) for layer in sorted(set(wanted[node]) - set(held.get(node, ())))]
    missing = tuple(sorted({layer for layer, _ in lacking if not owners[layer]}))
    sent: dict[int, int] = defaultdict(int)
    copies = []
    for layer, target in sorted(lacking, key=lambda each: (len(owners[each[0]]), -layer_bytes[each[0]], each)):
        if owners[layer]:
            source = min(owners[layer], key=lambda node: (sent[node], node))
            sent[source] += layer_bytes[layer]
            copies.append(LayerCopy(layer, source, target, layer_bytes[layer]))
    return tuple(copies), missing


def copy_seconds(copies: Sequence[LayerCopy], *, bytes_per_second: float) -> float:
    """Return the seconds of all copies in parallel: those of the node that sends or receives most."""
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for each in copies:
        sent[each.source] += each.num_bytes
        received[each.target] += each.num_bytes
    return max((*sent.values(), *received.values()), default=0) / bytes_per_second


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica: a template on nodes of the cluster."""

    nodes: tuple[int, ...]
    """The node in each place of the template; the number of nodes identifies the template."""
    num_microbatches: int
    """Its share of the global batch."""


def _on_nodes(instances: Sequence[Instance], nodes: Iterable[int]) -> tuple[Pipeline, ...]:
    """Return the replicas on these nodes, one after the other."""
    left = iter(nodes)
    return tuple(Pipeline(tuple(islice(left, each.nodes)), each.num_microbatches) for each in instances)


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The replicas with which a run continues, and the transition to them."""

    how: str
    """`keep`, `reinstantiate`, `borrow` or `merge`: the last step that any pipeline took; `replan`: all nodes anew."""
    pipelines: tuple[Pipeline, ...]
    step_seconds: float
    copies: tuple[LayerCopy, ...]
    """Each layer that a node lacks, once, from a node that has it; copies run in parallel."""
    copy_seconds: float
    missing_layers: tuple[int, ...] = ()
    """Layers that no node has any more: the run must go back to its newest checkpoint."""


@dataclass(frozen=True)
class Reconfigurer:
    """Decides how a run continues; every rank decides alike."""

    templates: TemplateSet
    bytes_per_second: float
    """Bytes per second that a node sends and, at the same time, receives."""
    horizon_seconds: float = 600.0
    """Assumed time until the next change: the gain of a copy within it must exceed its cost."""

    def start(self) -> tuple[Pipeline, ...]:
        """Return the instances of the set on nodes 0, 1, ..."""
        return _on_nodes(self.templates.instances, range(self.templates.num_nodes))

    def fresh(self, nodes: Sequence[int]) -> tuple[tuple[Pipeline, ...], float]:
        """Return replicas with the shortest step on these nodes, and its seconds, whatever the nodes hold."""
        chosen = self._fastest(len(nodes))
        return self._place("replan", chosen, nodes, {}).pipelines, chosen.step_seconds

    @memoized
    def _fastest(self, num_nodes: int) -> Instantiation:
        templates = self.templates
        return instantiate(templates.times, num_nodes, templates.num_microbatches, templates.fewest_replicas)

    def reconfigure(
        self, pipelines: Sequence[Pipeline], *, lost: Collection[int] = (), joined: Collection[int] = ()
    ) -> Reconfiguration:
        """Return how the run continues on all remaining and joined nodes.

        Two sets of sizes are compared: the one with the shortest possible step, and the one that changes least (a pipeline that
        lost nodes takes a smaller template, borrows a node from a larger pipeline, or merges with another one; Oobleck 2.5.1).
        The one that loses least time until the horizon, by copies and longer steps together, is taken. Nodes are placed where
        they lack the fewest bytes. Raises PlanError if fewer nodes are left than f + 1 replicas need.
        """
        templates, before = self.templates, {node for each in pipelines for node in each.nodes}
        if strange := sorted(set(lost) - before) or sorted(set(joined) & (before - set(lost))):
            raise PlanError(f"node {strange[0]} is lost and was not there, or joins and is there already; correct the nodes")
        nodes = sorted((before - set(lost)) | set(joined))
        if len(nodes) < templates.fewest_nodes:
            raise PlanError(
                f"{len(nodes)} nodes are left, but {templates.fewest_replicas} replicas of {templates.least_nodes} nodes "
                f"need {templates.fewest_nodes}; wait for nodes to return, or plan anew with a lower fault tolerance"
            )
        held = self._held_layers(pipelines)
        fastest = self._fastest(len(nodes))
        choices = [("replan", fastest)]
        left = [sum(node not in lost for node in each.nodes) for each in pipelines]
        kept = change_least(templates, left, len(joined))
        if kept is not None and len(kept[1]) <= templates.num_microbatches:
            choices.insert(0, (kept[0], share_batch(templates.times, kept[1], num_microbatches=templates.num_microbatches)))
        found = [self._place(how, choice, nodes, held) for how, choice in choices]
        seconds = [each.copy_seconds + self.horizon_seconds * (1 - fastest.step_seconds / each.step_seconds) for each in found]
        return found[seconds.index(min(seconds))]

    def _held_layers(self, pipelines: Sequence[Pipeline]) -> dict[int, tuple[int, ...]]:
        """Return node -> the layers that it holds."""
        layers = self.templates.layers_of_node
        return {node: layers[len(each.nodes), index] for each in pipelines for index, node in enumerate(each.nodes)}

    def _place(
        self, how: str, choice: Instantiation, nodes: Sequence[int], held: Mapping[int, tuple[int, ...]]
    ) -> Reconfiguration:
        """Place nodes where they lack the fewest bytes in total, and plan the copies."""
        from scipy.optimize import linear_sum_assignment  # which ranks that are never lost need not wait for

        places = [(each.nodes, index) for each in choice.instances for index in range(each.nodes)]
        wanted = [self.templates.layers_of_node[place] for place in places]
        weights = np.array(self.templates.layer_bytes, np.float64)
        layers = range(len(weights))
        needs = np.array([np.isin(layers, each) for each in wanted])
        lacks = np.array([~np.isin(layers, held.get(node, ())) for node in nodes])
        _, chosen = linear_sum_assignment((needs * weights) @ lacks.T)
        pipelines = _on_nodes(choice.instances, [nodes[index] for index in chosen.tolist()])
        left = {node: held[node] for node in nodes if node in held}
        copies, missing = deal_copies(self._held_layers(pipelines), left, self.templates.layer_bytes)
        seconds = copy_seconds(copies, bytes_per_second=self.bytes_per_second)
        is_kept = not copies and how == "reinstantiate"
        return Reconfiguration("keep" if is_kept else how, pipelines, choice.step_seconds, copies, seconds, missing)


def change_least(templates: TemplateSet, left: Sequence[int], num_joined: int) -> tuple[str, tuple[int, ...]] | None:
    """Return the result of Oobleck's three steps: the last step taken, and the pipelines' numbers of nodes; None if impossible.

    left: the nodes that each pipeline has left. Nodes that joined first fill up pipelines that are too small, then form a
    pipeline of their own if they can, and otherwise enlarge the smallest ones.
    """
    least, most = templates.least_nodes, templates.most_nodes
    sizes = [count for count in left if count]
    steps = {"reinstantiate"}
    while short := sorted(size for size in sizes if size < least):
        size = short[-1]
        sizes.remove(size)
        filled = min(num_joined, least - size)
        num_joined -= filled
        size += filled
        while size < least and max(sizes, default=0) > least:
            sizes[sizes.index(max(sizes))] -= 1
            size += 1
            steps.add("borrow")
        if size < least:
            if not sizes:
                return None
            size += sizes.pop(sizes.index(min(sizes)))
            steps.add("merge")
        sizes.append(size)
    extra = num_joined if num_joined < least else 0
    for num_own in range(num_joined // least, 0, -1):
        sizes.append(min(most, -(-num_joined // num_own)))
        num_joined -= sizes[-1]
    for _ in range(extra):
        if not sizes or min(sizes) >= most:
            return None
        sizes[sizes.index(min(sizes))] += 1
    if max(sizes, default=most + 1) > most or len(sizes) < templates.fewest_replicas:
        return None
    return next(step for step in ("merge", "borrow", "reinstantiate") if step in steps), tuple(sizes)
