"""Reconfigures a run when nodes are lost or return: new replicas of the same templates, and the layers copied for them."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.plan.planners.templates.instantiate import Instantiation, instantiate, share_batch
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.values.errors import PlanError


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
        pipelines, first = [], 0
        for each in self.templates.instances:
            pipelines.append(Pipeline(tuple(range(first, first + each.nodes)), each.num_microbatches))
            first += each.nodes
        return tuple(pipelines)

    def fresh(self, nodes: Sequence[int]) -> tuple[tuple[Pipeline, ...], float]:
        """Return replicas with the shortest step on these nodes, and its seconds, whatever the nodes hold."""
        chosen = self._fastest(len(nodes))
        placed = self._place("replan", chosen, nodes, {})
        return placed.pipelines, chosen.step_seconds

    def step_seconds(self, pipelines: Sequence[Pipeline]) -> float:
        """Return the seconds of a step of the slowest pipeline."""
        return max((self.templates.times[len(each.nodes)].seconds(each.num_microbatches) for each in pipelines), default=0.0)

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

        def lost_seconds(choice: Reconfiguration) -> float:
            return choice.copy_seconds + self.horizon_seconds * (1 - fastest.step_seconds / choice.step_seconds)

        return min(found, key=lost_seconds)

    def _held_layers(self, pipelines: Sequence[Pipeline]) -> dict[int, tuple[int, ...]]:
        """Return node -> the layers that it holds."""
        layers = self.templates.layers_of_node
        return {node: layers[len(each.nodes), index] for each in pipelines for index, node in enumerate(each.nodes)}

    def _place(
        self, how: str, choice: Instantiation, nodes: Sequence[int], held: Mapping[int, tuple[int, ...]]
    ) -> Reconfiguration:
        """Place nodes where they lack the fewest bytes in total, and plan the copies."""
        from scipy.optimize import linear_sum_assignment  # which every rank would wait for at its start otherwise

        places = [(each.nodes, index) for each in choice.instances for index in range(each.nodes)]
        wanted = [self.templates.layers_of_node[place] for place in places]
        weights = np.array(self.templates.layer_bytes, np.float64)
        layers = range(len(weights))
        needs = np.array([np.isin(layers, each) for each in wanted])
        lacks = np.array([~np.isin(layers, held.get(node, ())) for node in nodes])
        _, chosen = linear_sum_assignment((needs * weights) @ lacks.T)
        node_of_place = iter([nodes[index] for index in chosen.tolist()])
        pipelines = tuple(
            Pipeline(tuple(next(node_of_place) for _ in range(each.nodes)), each.num_microbatches) for each in choice.instances
        )
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
