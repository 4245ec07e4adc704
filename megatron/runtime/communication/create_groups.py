"""Creates process groups; over gloo all ranks together, and once more on all of them if one could not connect to its peers.

gloo connects every pair of a group's ranks at once, without another attempt if a connection is lost or never noticed, as happens
now and then on busy machines; the run would end at its start. No rank can repeat that alone, since its peers may have connected,
so the ranks tell each other in the store how an attempt went. A first attempt is short, and begins when all ranks have come.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from multimodal.values.errors import first_line

logger = logging.getLogger(__name__)
NUM_ATTEMPTS = 3
FIRST_PATIENCE = timedelta(seconds=30)
"""Longest wait for a peer's connection in the first attempt; it doubles with each one."""
_LEEWAY = 4
"""Longest time for all groups of an attempt, as a multiple of the longest wait for one."""
_CONNECTED = b"connected"
_Made = TypeVar("_Made")


def connect_world(backend: str, *, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Initialise torch.distributed; collective. timeout: for ranks to come, and for later messages. Raises RuntimeError."""

    def make(attempt: int, patience: timedelta) -> None:
        dist.distributed_c10d._world.group_count = 0  # for torch's names, which must be the same on all ranks
        of_attempt = PrefixStore(str(attempt), store)
        dist.init_process_group(backend, store=of_attempt, rank=rank, world_size=size, timeout=patience)

    def drop(_: None) -> None:
        dist.destroy_process_group()

    if backend != "gloo" or size == 1:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return
    _try_together(make, drop=drop, store=store, rank=rank, size=size, timeout=timeout)
    dist.distributed_c10d._set_pg_timeout(timeout)


def create_groups(
    rank_sets: Iterable[Sequence[int]],
    *,
    timeout: timedelta,
    backend: str | None = None,
    urgent: Collection[Sequence[int]] = (),
    most_blocks: int | None = None,
) -> list[dist.ProcessGroup]:
    """Create one group for each set of ranks; collective over the world, in which every rank gives the same sets.

    urgent: sets whose collectives go before other work that is ready (NCCL); most_blocks: multiprocessors that a call of a group
    may hold (NCCL). Returns the groups in order, with torch's mark where this rank is no member. Raises RuntimeError.
    """
    listed, rank, size = [list(ranks) for ranks in rank_sets], dist.get_rank(), dist.get_world_size()
    if (backend or dist.get_backend()) != "gloo" or size == 1:
        is_nccl, urgent_sets = (backend or dist.get_backend()) == "nccl", {tuple(ranks) for ranks in urgent}
        options = [_nccl_options(tuple(ranks) in urgent_sets, most_blocks) if is_nccl else None for ranks in listed]
        given = zip(listed, options, strict=True)
        return [dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=each) for ranks, each in given]
    world = dist.distributed_c10d._world
    first = world.group_count

    def make(attempt: int, patience: timedelta) -> list[dist.ProcessGroup]:
        world.group_count = first + attempt * len(listed)
        made: list[dist.ProcessGroup] = []
        try:
            for ranks in listed:
                made.append(dist.new_group(ranks, timeout=patience, backend=backend))
        except RuntimeError:
            drop(made)
            raise
        return made

    def drop(made: list[dist.ProcessGroup]) -> None:
        for group in _own(made):
            dist.destroy_process_group(group)

    _, store = world.pg_map[dist.distributed_c10d._get_default_group()]
    groups = _try_together(make, drop=drop, store=PrefixStore(f"attempts/{first}", store), rank=rank, size=size, timeout=timeout)
    for group in _own(groups):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return groups


def _nccl_options(is_urgent: bool, most_blocks: int | None) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent)
    if most_blocks is not None:
        options.config.max_ctas = most_blocks
    return options


def _own(groups: list[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def _try_together(
    make: Callable[[int, timedelta], _Made],
    *,
    drop: Callable[[_Made], None],
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
) -> _Made:
    """Return what `make(attempt, patience)` made here in the first attempt in which it raised RuntimeError on no rank."""
    told = ""
    for attempt in range(NUM_ATTEMPTS):
        patience = min(timeout, FIRST_PATIENCE * 2**attempt)
        came, made_by, verdict = (f"attempt-{attempt}/{name}" for name in ("came", "made", "verdict"))
        if store.add(f"{came}/count", 1) == size:
            store.set(came, "all")
        store.wait([came], min(timeout, _LEEWAY * patience) if attempt else timeout)
        try:
            made = make(attempt, patience)
        except RuntimeError as problem:
            store.compare_set(verdict, "", f"rank {rank}: {first_line(problem)}")  # unless another rank failed before
        else:
            if store.add(made_by, 1) == size:
                store.set(verdict, _CONNECTED.decode())
            store.wait([verdict], min(timeout, _LEEWAY * patience))
            if store.get(verdict) == _CONNECTED:
                return made
            drop(made)
        told = store.get(verdict).decode()
        logger.warning("attempt %d of %d to connect all ranks failed: %s", attempt + 1, NUM_ATTEMPTS, told)
    raise RuntimeError(f"the ranks could not connect to each other in {NUM_ATTEMPTS} attempts ({told})")
