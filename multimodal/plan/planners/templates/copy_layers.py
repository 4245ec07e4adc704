"""Plans the copies of layers between nodes: in parallel, and once for each node that lacks the layer."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


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
