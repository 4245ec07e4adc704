"""Joins this process to the run: rank, device, process group; the same under torchrun and under srun."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from multimodal.values.errors import ConfigError


@dataclass(frozen=True)
class World:
    """This process among all others."""

    rank: int
    size: int
    local_rank: int
    store: Store
    """Shared by all ranks of this attempt."""


def join_world(*, backend: str | None, timeout: timedelta) -> World:
    """Initialise torch.distributed; alone when no launcher set RANK. Raises ConfigError for a backend that cannot work."""
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs CUDA, which this machine lacks; use gloo or leave the flag out")
    for name, default in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", os.environ.get("RANK", "0")),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(name, default)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))
    # A restarted attempt must not read the keys of the one before.
    store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank, size, local_rank, store)


def leave_world() -> None:
    """Wait for all ranks and take the process group down, so that none sees a peer vanish."""
    dist.barrier()
    dist.destroy_process_group()
