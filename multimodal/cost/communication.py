"""Seconds of messages and collectives on a cluster's links: latency plus size over bandwidth."""

from collections.abc import Sequence
from typing import NamedTuple

from multimodal.cost.cluster import Cluster


class TransferCost(NamedTuple):
    """One message between two lanes."""

    latency_seconds: float
    """Seconds from the end of sending to the message's arrival; occupies nothing."""
    occupied_seconds: float
    """Size over bandwidth: occupies the sender's sending, the receiver's receiving and the shared link."""
    link: int = -1
    """Messages with the same number share one link (a node's network card) one after the other; -1: a link of its own."""


def collective_seconds(num_bytes: float, *, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of an all-gather or a reduce-scatter by a ring; an all-reduce takes two of these.

    num_bytes: of the whole tensor. ranks: the members of the group. Each of the n - 1 steps moves one share,
    `num_bytes / n / bandwidth`, and starts with a latency: the network's for as many steps as there are nodes less one, that of
    the node's links for the others (NCCL's tuning model, src/graph/tuning.cc). Across nodes a rank has its share of the node's
    network cards, since the other ranks of its node communicate with their peers at the same time.
    """
    num_ranks = len(ranks)
    if num_ranks < 2:
        return 0.0
    between = len({cluster.node(rank) for rank in ranks}) - 1
    latency_us = between * cluster.inter_node.latency_us + (num_ranks - 1 - between) * cluster.intra_node.latency_us
    bandwidth = _link_of_one(ranks, cluster)[1]
    return latency_us * 1e-6 + (num_ranks - 1) * num_bytes / num_ranks / (bandwidth * 1e9)


def exchange_cost(num_bytes: float, *, ranks: Sequence[int], cluster: Cluster) -> TransferCost:
    """Return the cost of exchanging rows of so many bytes in a group: each rank sends 1/n, and keeps 1/n of these."""
    num_ranks = len(ranks)
    latency_us, bandwidth = _link_of_one(ranks, cluster)
    return TransferCost(latency_us * 1e-6, num_bytes * (num_ranks - 1) / num_ranks**2 / (bandwidth * 1e9))


def _link_of_one(ranks: Sequence[int], cluster: Cluster) -> tuple[float, float]:
    """Return latency in us and bandwidth in 10^9 bytes/s of a rank in a collective of all ranks of its node."""
    inside, network = cluster.intra_node, cluster.inter_node
    if cluster.is_one_node(ranks):
        return inside.latency_us, inside.bandwidth_gbytes_per_second
    share = network.bandwidth_gbytes_per_second * network.nics_per_node / cluster.gpus_per_node
    return network.latency_us, min(inside.bandwidth_gbytes_per_second, share * network.collective_efficiency)


def message_cost(num_bytes: float, *, source_ranks: Sequence[int], target_ranks: Sequence[int], cluster: Cluster) -> TransferCost:
    """Return the cost of a message of so many bytes in all; every source rank sends its share at the same time."""
    if set(source_ranks) == set(target_ranks):
        return TransferCost(0.0, 0.0)
    is_inside = cluster.is_one_node((*source_ranks, *target_ranks))
    return (cost_inside_node if is_inside else cost_between_nodes)(num_bytes, source_ranks=source_ranks, cluster=cluster)


def cost_inside_node(num_bytes: float, *, source_ranks: Sequence[int], cluster: Cluster) -> TransferCost:
    """Return the cost of a message inside one node: each rank has its own link."""
    bandwidth = cluster.intra_node.bandwidth_gbytes_per_second * len(source_ranks)
    return TransferCost(cluster.intra_node.latency_us * 1e-6, num_bytes / (bandwidth * 1e9))


def cost_between_nodes(num_bytes: float, *, source_ranks: Sequence[int], cluster: Cluster) -> TransferCost:
    """Return the cost of a message over the source ranks' network cards; their first is the link if others use them as well."""
    nics = sorted({cluster.nic(rank) for rank in source_ranks})
    bandwidth = min(
        cluster.inter_node.bandwidth_gbytes_per_second * len(nics),
        cluster.intra_node.bandwidth_gbytes_per_second * len(source_ranks),
    )
    is_shared = len(nics) * cluster.gpus_per_node > len(source_ranks) * cluster.inter_node.nics_per_node
    return TransferCost(cluster.inter_node.latency_us * 1e-6, num_bytes / (bandwidth * 1e9), nics[0] if is_shared else -1)
