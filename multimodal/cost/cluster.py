"""The machine that a plan runs on: accelerators, nodes and the links between them, and what messages take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from multimodal.values.errors import ConfigError
from multimodal.values.file_form import FileValue
from multimodal.values.typed_reader import BRIEF, Plain

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "H200": {"bfloat16": 989.0, "float32": 67.0, "float64": 67.0},
    "H100": {"bfloat16": 989.0, "float32": 67.0, "float64": 67.0},
    "H800": {"bfloat16": 989.0, "float32": 67.0, "float64": 1.0},
    "B200": {"bfloat16": 2250.0, "float32": 80.0, "float64": 40.0},
    "A100": {"bfloat16": 312.0, "float32": 19.5, "float64": 19.5},
    "A800": {"bfloat16": 312.0, "float32": 19.5, "float64": 9.7},
    "A40": {"bfloat16": 149.7, "float32": 37.4, "float64": 0.58},
    "L40S": {"bfloat16": 362.0, "float32": 91.6, "float64": 1.4},
}
"""Part of the device's name -> dtype -> TFLOP/s, from the makers' data sheets (dense, without sparsity)."""
BYTES_OF_DTYPE: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "float64": 8}
_COUNT = {"minimum": 1, "maximum": 2**16}
_POSITIVE = {"above": 0, "maximum": 1e15}
_AT_LEAST_ZERO = {"minimum": 0, "maximum": 1e15}


@dataclass(frozen=True, slots=True)
class NodeLink:
    """The links between the accelerators of one node (NVLink, PCIe)."""

    bandwidth_gbytes_per_second: float = field(metadata=_POSITIVE)
    """10^9 bytes per second of one accelerator in one direction."""
    latency_us: float = field(metadata=_AT_LEAST_ZERO)


@dataclass(frozen=True, slots=True)
class Network:
    """The network between nodes."""

    bandwidth_gbytes_per_second: float = field(metadata=_POSITIVE)
    """10^9 bytes per second of one network card in one direction."""
    latency_us: float = field(metadata=_AT_LEAST_ZERO)
    nics_per_node: int = field(metadata=_COUNT)
    """Network cards; a node's accelerators share them evenly, neighbours first."""
    collective_efficiency: float = field(default=1.0, metadata=_POSITIVE)
    """Share of a card's bandwidth that collectives over many nodes reach, where flows meet on the way; to be measured."""


@dataclass(frozen=True, slots=True)
class Cluster(FileValue):
    """Any number of equal nodes. Rank r is accelerator r % gpus_per_node of node r // gpus_per_node."""

    gpus_per_node: int = field(metadata=_COUNT)
    peak_tflops: float = field(metadata=_POSITIVE)
    """Dense peak of one accelerator in `dtype`."""
    memory_gb: float = field(metadata=_POSITIVE)
    """Memory of one accelerator in 10^9 bytes."""
    intra_node: NodeLink
    inter_node: Network
    efficiency: float = field(default=0.5, metadata=_POSITIVE)
    """Share of the peak that large matrix products reach, 0 to 1."""
    half_efficiency_gflop: float = field(default=0.0, metadata=_AT_LEAST_ZERO)
    """FLOPs (10^9) of the matrix product that reaches half of `efficiency`: one of w reaches `efficiency x w / (w + this)`."""
    attention_efficiency: float | None = field(default=None, metadata={**BRIEF, **_POSITIVE})
    """Share of the peak that core attention reaches; None: `efficiency`."""
    memory_bandwidth_gbytes_per_second: float | None = field(default=None, metadata={**BRIEF, **_POSITIVE})
    """10^9 bytes per second, as reached in one accelerator's memory; None: elementwise work is part of `efficiency`."""
    dtype: str = field(default="bfloat16", metadata={"choices": tuple(BYTES_OF_DTYPE)})
    """Type of activations and weights."""
    cores_per_node: int | None = field(default=None, metadata={**BRIEF, **_COUNT})
    """Cores on which all ranks of a node compute, each on one at a time; None: every rank has an accelerator of its own."""

    @property
    def flops_per_second(self) -> float:
        """FLOP/s that one accelerator reaches in large matrix products."""
        return self.peak_tflops * 1e12 * self.efficiency

    @property
    def attention_flops_per_second(self) -> float:
        """FLOP/s that one accelerator reaches in core attention."""
        share = self.efficiency if self.attention_efficiency is None else self.attention_efficiency
        return self.peak_tflops * 1e12 * share

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one weight or activation."""
        return BYTES_OF_DTYPE[self.dtype]

    def ranks_per_core(self, num_ranks: int) -> float:
        """Return how many ranks share a core where a plan has this many; 1 if each has its own."""
        return max(1.0, min(num_ranks, self.gpus_per_node) / (self.cores_per_node or num_ranks))

    def node(self, rank: int) -> int:
        """Node of a rank."""
        return rank // self.gpus_per_node

    def nic(self, rank: int) -> int:
        """Network card of a rank, numbered over all nodes."""
        local = rank % self.gpus_per_node * self.inter_node.nics_per_node // self.gpus_per_node
        return self.node(rank) * self.inter_node.nics_per_node + local

    def is_one_node(self, ranks: Sequence[int]) -> bool:
        """Return True if all ranks are on the same node."""
        return len({self.node(rank) for rank in ranks}) <= 1

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Cluster":
        """Build from the file's form, with `device` (a name of cost/hardware.py) or `peak_tflops`; raises ConfigError."""
        top = Plain(value, "cluster", ConfigError)
        entries = top.mapping(known=(*(part.name for part in fields(cls)), "device"))
        if ("device" in entries) == ("peak_tflops" in entries):
            top.fail("give exactly one of 'device' and 'peak_tflops'")
        if "device" in entries:
            device = entries["device"]
            dtype = entries["dtype"].read(str, choices=tuple(BYTES_OF_DTYPE)) if "dtype" in entries else "bfloat16"
            if (peak := peak_tflops(device.read(str), dtype)) is None:
                device.fail(f"unknown device '{device.value}'; known are {', '.join(PEAK_TFLOPS)}; or give peak_tflops")
            top = replace(top, value={**{key: part for key, part in value.items() if key != "device"}, "peak_tflops": peak})
        cluster, network = top.build(cls), top.inner("inter_node", None)
        for at, of, share in (
            (top.inner("efficiency", None), "peak", cluster.efficiency),
            (top.inner("attention_efficiency", None), "peak", cluster.attention_efficiency),
            (network.inner("collective_efficiency", None), "bandwidth", cluster.inter_node.collective_efficiency),
        ):
            if share is not None and share > 1:
                at.fail(f"a share of the {of} cannot exceed 1, found {share}; give 0 to 1")
        if cluster.inter_node.nics_per_node > cluster.gpus_per_node:
            network.inner("nics_per_node", None, where=network.where).fail(
                f"nics_per_node says {cluster.inter_node.nics_per_node} cards for {cluster.gpus_per_node} accelerators; "
                "give one card with the bandwidth that one accelerator can use"
            )
        return cluster


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the peak of a device in TFLOP/s, or None when it is not in the table."""
    for name, peaks in PEAK_TFLOPS.items():
        if name in device_name:
            return peaks[dtype]
    return None


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


def cost_inside_node(num_bytes: float, *, source_ranks: Sequence[int], cluster: Cluster) -> TransferCost:
    """Return the cost of a message of so many bytes in all inside one node: each rank sends its share over its own link."""
    bandwidth = cluster.intra_node.bandwidth_gbytes_per_second * len(source_ranks)
    return TransferCost(cluster.intra_node.latency_us * 1e-6, num_bytes / (bandwidth * 1e9))


def cost_between_nodes(num_bytes: float, *, source_ranks: Sequence[int], cluster: Cluster) -> TransferCost:
    """Return the cost of a message over the source ranks' network cards; their first is the link if others use them as well."""
    inside, network, nics = cluster.intra_node, cluster.inter_node, sorted({cluster.nic(rank) for rank in source_ranks})
    widths = network.bandwidth_gbytes_per_second * len(nics), inside.bandwidth_gbytes_per_second * len(source_ranks)
    is_shared = len(nics) * cluster.gpus_per_node > len(source_ranks) * network.nics_per_node
    return TransferCost(network.latency_us * 1e-6, num_bytes / (min(widths) * 1e9), nics[0] if is_shared else -1)
