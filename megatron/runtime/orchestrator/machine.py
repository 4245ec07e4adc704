"""Describes the machine of a run, as known or measured here, and keeps what takes long to compute for later runs on it."""

import hashlib
import importlib.metadata
import json
import math
import os
import platform as host
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from megatron.runtime import platform
from megatron.runtime.communication.create_groups import create_groups
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.launch.distributed_setup import World
from megatron.runtime.launch.rank_place import find_rank_place, find_ranks_per_node
from megatron.runtime.profiler import find_peak_tflops
from multimodal.attention.context_parallel import all_gather_single
from multimodal.cost.cluster import Cluster, Network, NodeLink, peak_tflops
from multimodal.data.byte_cache import write_whole
from multimodal.data.remote import user_cache
from multimodal.values.errors import BraidError

_GLOO = NodeLink(1.5, 70.0), Network(1.0, 100.0, 1)
_NVLINK = NodeLink(450.0, 3.0), Network(50.0, 8.0, 1)
_CPU_TFLOPS = 0.118
"""One core's peak, from examples/clusters/cpu.yaml, which gives the source of these numbers."""
_UNKNOWN_DEVICE_TFLOPS = 500.0


_SMALL_BYTES = 4096
_LARGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""Sizes of gathered tensors by which a link's latency and bandwidth are distinguished."""
_NUM_WARM_UPS, _NUM_REPETITIONS = 3, 10


def assumed_cluster() -> Cluster:
    """Return a machine like this one, by the accelerator's name: the ratio of computing to sending is what matters."""
    ranks_per_node = ranks_on_node()
    if not torch.cuda.is_available():
        return Cluster(
            ranks_per_node,
            _CPU_TFLOPS,
            8.0,
            *_GLOO,
            efficiency=0.87,
            half_efficiency_gflop=0.014,
            attention_efficiency=0.3,
            memory_bandwidth_gbytes_per_second=4.0,
            dtype="float32",
        )
    peak = peak_tflops(torch.cuda.get_device_name(), "bfloat16") or _UNKNOWN_DEVICE_TFLOPS
    return Cluster(ranks_per_node, peak, 80.0, *_NVLINK)


def ranks_on_node() -> int:
    """Return the ranks of a node according to the launcher, else the number of accelerators, or all ranks."""
    num_ranks = find_rank_place(os.environ).size
    most = torch.cuda.device_count() if torch.cuda.is_available() else num_ranks
    return find_ranks_per_node(os.environ) or min(num_ranks, most)


def describe_device(*, dtype: str, ranks_per_node: int) -> Cluster:
    """Return the machine with the actual peak and memory of this rank; its links are assumed."""
    peak = find_peak_tflops(getattr(torch, dtype))
    described = replace(assumed_cluster(), gpus_per_node=ranks_per_node, peak_tflops=peak, dtype=dtype)
    if torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return replace(described, memory_gb=memory_bytes / 1e9)
    # Ranks without accelerators share their node's memory, or the limit of this process.
    return replace(described, memory_gb=_node_bytes() / ranks_per_node / 1e9, cores_per_node=os.cpu_count())


def free_memory_bytes() -> float:
    """Return the bytes that this rank can still take: of its accelerator, or its share of what its node has available."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    available = float(_node_bytes())
    with suppress(OSError), open("/proc/meminfo") as file:
        lines = (line.split() for line in file)
        available = min(available, *(1024 * float(words[1]) for words in lines if words[0] == "MemAvailable:"), math.inf)
    return available / ranks_on_node()


def _node_bytes() -> int:
    """Return the bytes of a node's memory, or the limit of this process."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.isfile(limit):
            with open(limit) as file:
                text = file.read().strip()
            total = min(total, int(text)) if text.isdecimal() else total
    return total


def find_cluster(config: RunConfig, *, world_size: int) -> tuple[Cluster, bool]:
    """Return the machine of --cluster, or as measured, and True; else one with assumed links, and False. Raises ConfigError."""
    if config.training.cluster is not None:
        return Cluster.from_file(config.training.cluster), True
    if (known := find_value("machines", _machine_key(config, world_size), Cluster.from_dict)) is not None:
        return known, True
    return describe_device(dtype=config.training.dtype, ranks_per_node=ranks_on_node()), False


def measure_cluster(config: RunConfig, world: World, cluster: Cluster | None) -> Cluster:
    """Time collectives inside nodes, and between corresponding ranks of all nodes, for this run and later ones; collective.

    cluster: on rank 0, all else that is known. Solves `collective_seconds` for its parameters: n ranks take t = (n - 1) (latency
    + bytes / n / bandwidth). All ranks of a node measure at once, so a rank has its share of the network. Links with too few
    ranks keep their values.
    """
    world.connect(backend=config.training.distributed_backend)
    known = cluster or assumed_cluster()
    size, inside, between = known.gpus_per_node, known.intra_node, known.inter_node
    nodes = [list(range(first, min(first + size, world.size))) for first in range(0, world.size, size)]
    across = [list(range(place, world.size, size)) for place in range(min(size, world.size))]
    if len(nodes[0]) > 1:
        inside = NodeLink(*_time_link(nodes, world))
    if len(nodes) > 1:
        between = Network(*_time_link(across, world), nics_per_node=size)
    measured = replace(known, intra_node=inside, inter_node=between)
    if world.rank == 0:
        keep_value("machines", _machine_key(config, world.size), measured.to_dict())
    return measured


def device_name() -> str:
    """Return the name of the device; different CPUs may have the same name, so they are distinguished by their hosts."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU of {host.node()}"


def _machine_key(config: RunConfig, world_size: int) -> str:
    of_run = (config.training.dtype, config.training.distributed_backend, world_size, ranks_on_node())
    return key_of((device_name(), torch.__version__, *of_run))


def _time_link(groups: list[list[int]], world: World) -> tuple[float, float]:
    """Return this rank's bandwidth in 10^9 bytes/s and latency in us in its group."""
    made = create_groups(groups, timeout=world.timeout)
    own, group = next((ranks, group) for ranks, group in zip(groups, made, strict=True) if world.rank in ranks)
    num_ranks, device = len(own), platform.device()
    if num_ranks == 1:
        return 1.0, 100.0  # a rank without counterparts on other nodes; rank 0's figures count
    large_bytes = _LARGE_BYTES[device.type] // num_ranks * num_ranks
    seconds = {}
    for num_bytes in (_SMALL_BYTES // num_ranks * num_ranks, large_bytes):
        part = torch.zeros(num_bytes // num_ranks, dtype=torch.uint8, device=device)
        whole = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        taken = []
        for _ in range(_NUM_WARM_UPS + _NUM_REPETITIONS):
            start = time.perf_counter()
            all_gather_single(whole, part, group=group)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        seconds[num_bytes] = median(taken[_NUM_WARM_UPS:])
    (small_bytes, small), (_, large) = seconds.items()
    per_byte = max(1e-15, (large - small) / (large_bytes - small_bytes))
    latency = max(0.0, small - per_byte * small_bytes)
    return (num_ranks - 1) / num_ranks / per_byte / 1e9, 1e6 * latency / (num_ranks - 1)


_FORMAT = 1
_Kept = TypeVar("_Kept")


def key_of(depends_on: Iterable[object]) -> str:
    """Return a key that, with near certainty, only equal dependencies share; Braid's version is one of them."""
    digest = hashlib.blake2b(digest_size=8)
    for each in (_FORMAT, version_of("braid"), *depends_on):
        digest.update(f"{each}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def version_of(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def find_value(room: str, key: str, read: Callable[[Any], _Kept]) -> _Kept | None:
    """Return a kept value, as `read` makes it of its plain form; None if there is none, or it cannot be read."""
    with suppress(OSError, BraidError, ValueError, KeyError, TypeError, AttributeError):
        return read(json.loads((user_cache(room) / f"{key}.json").read_text()))
    return None


def keep_value(room: str, key: str, value: Mapping[str, Any]) -> None:
    """Keep a value for later runs, if the user's cache can be written."""
    with suppress(OSError):
        write_whole(user_cache(room) / f"{key}.json", json.dumps(value).encode())


def place_file(room: str, name: str, text: str) -> Path:
    """Return a file with this text: in the user's cache, or if that cannot be written, in a new folder of this process."""
    path = user_cache(room) / name
    with suppress(OSError, ValueError):
        if path.is_file() and path.read_text() == text:
            return path
    try:
        write_whole(path, text.encode())
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="braid-")) / name
        path.write_text(text)
    return path
