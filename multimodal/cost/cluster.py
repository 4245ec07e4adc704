"""The machine that a plan runs on: accelerators, nodes and the links between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from multimodal.cost.hardware import PEAK_TFLOPS, peak_tflops
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_mapping

BYTES_OF_DTYPE: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "float64": 8}
_Part = TypeVar("_Part", "NodeLink", "Network")


@dataclass(frozen=True, slots=True)
class NodeLink:
    """What connects the accelerators of one node (NVLink, PCIe)."""

    bandwidth_gbytes_per_second: float
    """Of one accelerator in one direction; 10^9 bytes."""
    latency_us: float


@dataclass(frozen=True, slots=True)
class Network:
    """What connects nodes."""

    bandwidth_gbytes_per_second: float
    """Of one network card in one direction; 10^9 bytes."""
    latency_us: float
    nics_per_node: int
    """Network cards; the accelerators of a node are dealt to them in equal runs of neighbours."""
    collective_efficiency: float = 1.0
    """Share of a card's bandwidth that collectives over many nodes reach, where flows meet on the way; measured, not known."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Any number of equal nodes. Rank r is accelerator r % gpus_per_node of node r // gpus_per_node."""

    gpus_per_node: int
    peak_tflops: float
    """Dense peak of one accelerator, of `dtype`."""
    memory_gb: float
    """Of one accelerator, 10^9 bytes."""
    intra_node: NodeLink
    inter_node: Network
    efficiency: float = 0.5
    """Share of the peak that large matrix products reach, 0 to 1."""
    half_efficiency_gflop: float = 0.0
    """Size of the matrix product that reaches half of `efficiency`: one of w reaches `efficiency x w / (w + this)`."""
    attention_efficiency: float | None = None
    """Share of the peak that core attention reaches; None: `efficiency`."""
    memory_bandwidth_gbytes_per_second: float | None = None
    """Of one accelerator's own memory, as reached; None: elementwise work is part of `efficiency`."""
    dtype: str = "bfloat16"
    """What layers compute in."""

    @property
    def flops_per_second(self) -> float:
        """What one accelerator really computes in large matrix products."""
        return self.peak_tflops * 1e12 * self.efficiency

    def product_efficiency(self, flops: float) -> float:
        """Share of the peak that one matrix product of so many FLOPs reaches."""
        return self.efficiency * flops / (flops + self.half_efficiency_gflop * 1e9)

    @property
    def attention_flops_per_second(self) -> float:
        """What one accelerator really computes in core attention."""
        share = self.efficiency if self.attention_efficiency is None else self.attention_efficiency
        return self.peak_tflops * 1e12 * share

    @property
    def bytes_per_element(self) -> int:
        """Of weights and activations."""
        return BYTES_OF_DTYPE[self.dtype]

    def node(self, rank: int) -> int:
        """Node of a rank."""
        return rank // self.gpus_per_node

    def nic(self, rank: int) -> int:
        """Network card of a rank, numbered over all nodes."""
        local = rank % self.gpus_per_node * self.inter_node.nics_per_node // self.gpus_per_node
        return self.node(rank) * self.inter_node.nics_per_node + local

    def is_one_node(self, ranks: Sequence[int]) -> bool:
        """Whether all ranks live on the same node."""
        return len({self.node(rank) for rank in ranks}) <= 1

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Cluster":
        """Build from the file's form, with `device` (a name of cost/hardware.py) or `peak_tflops`; raises ConfigError."""
        given = dict(value)
        if ("device" in given) == ("peak_tflops" in given):
            raise ConfigError("cluster: give exactly one of 'device' and 'peak_tflops'")
        if "device" in given:
            device = str(given.pop("device"))
            peak = peak_tflops(device, _dtype(given))
            if peak is None:
                raise ConfigError(f"cluster: unknown device '{device}'; known are {', '.join(PEAK_TFLOPS)}; or give peak_tflops")
            given["peak_tflops"] = peak
        _check_keys(given, cls, where="cluster", also=("device",))
        given["intra_node"] = _part(NodeLink, given["intra_node"], where="cluster, intra_node")
        given["inter_node"] = _part(Network, given["inter_node"], where="cluster, inter_node")
        _dtype(given)
        for name in _NUMBERS:
            if name in given:
                is_count, or_zero = name == "gpus_per_node", name == "half_efficiency_gflop"
                _check_number(given[name], where=f"cluster, {name}", is_count=is_count, or_zero=or_zero)
        cluster = cls(**given)
        for name, share in (("efficiency", cluster.efficiency), ("attention_efficiency", cluster.attention_efficiency)):
            if share is not None and share > 1:
                raise ConfigError(f"cluster, {name}: a share of the peak cannot exceed 1, found {share}")
        if (share := cluster.inter_node.collective_efficiency) > 1:
            raise ConfigError(
                f"cluster, inter_node, collective_efficiency: a share of the bandwidth cannot exceed 1, found {share}"
            )
        if cluster.inter_node.nics_per_node > cluster.gpus_per_node:
            raise ConfigError(
                f"cluster, inter_node: {cluster.inter_node.nics_per_node} cards for {cluster.gpus_per_node} accelerators; "
                "give one card with the bandwidth that one accelerator can use"
            )
        return cluster

    @classmethod
    def from_file(cls, path: str | Path) -> "Cluster":
        """Read a YAML or JSON cluster file."""
        try:
            return cls.from_dict(read_mapping(path, error=ConfigError))
        except ConfigError as problem:
            raise problem if str(problem).startswith(str(path)) else ConfigError(f"{path}: {problem}") from None


_NUMBERS = (
    "gpus_per_node",
    "peak_tflops",
    "memory_gb",
    "efficiency",
    "half_efficiency_gflop",
    "attention_efficiency",
    "memory_bandwidth_gbytes_per_second",
)


def _dtype(given: Mapping[str, Any]) -> str:
    dtype = str(given.get("dtype", "bfloat16"))
    if dtype not in BYTES_OF_DTYPE:
        raise ConfigError(f"cluster, dtype: expected one of {', '.join(BYTES_OF_DTYPE)}, found {dtype!r}")
    return dtype


def _part(kind: type[_Part], value: Any, *, where: str) -> _Part:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {value!r}")
    _check_keys(value, kind, where=where)
    for name, number in value.items():
        _check_number(number, where=f"{where}, {name}", is_count=name == "nics_per_node", or_zero=name == "latency_us")
    return kind(**value)


def _check_keys(value: Mapping[str, Any], kind: type, *, where: str, also: tuple[str, ...] = ()) -> None:
    known = {field.name: field for field in fields(kind)}
    if unknown := [key for key in value if key not in known]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join((*known, *also))}")
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in value]:
        raise ConfigError(f"{where}: '{missing[0]}' is missing")


def _check_number(value: Any, *, where: str, is_count: bool, or_zero: bool = False) -> None:
    is_number = isinstance(value, int if is_count else (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        expected = "a positive integer" if is_count else "a number of at least 0" if or_zero else "a positive number"
        raise ConfigError(f"{where}: expected {expected}, found {value!r}")
