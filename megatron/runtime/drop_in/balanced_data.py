"""Balances a loop's microbatches over its data parallel replicas: they move whole, and each replica keeps their number."""

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.runtime import platform
from megatron.runtime.communication.gather_objects import gather_objects
from multimodal.balance.exchange.module_exchange import DrawnItems, plan_exchange
from multimodal.values.errors import ConfigError

Length = Callable[[Any], int]
"""The work of what a loop's data iterator gives at once, in any unit; alike wherever the same samples are read."""


def count_numbers(batch: Any) -> int:
    """Return the numbers in all tensors of a batch, in lists, tuples and dictionaries of any depth; -1 if there are none."""
    sizes = [leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return sum(sizes) if sizes else -1


def deal_microbatches(
    iterator: Iterator[Any] | None, *, count: int, length: Length, group: dist.ProcessGroup
) -> Iterator[Any] | None:
    """Take a step's microbatches from a loop's iterator, and return an iterator of those that fall to this rank.

    Collective over the world. iterator: None where a rank reads nothing; count: microbatches of the step; group: this rank's data
    parallel group. Losses stay as they are: means do not ask where they were computed. Raises ConfigError on all ranks alike.
    """
    drawn = None if iterator is None else [next(iterator) for _ in range(count)]
    lengths = None if drawn is None else [int(length(each)) for each in drawn]
    rows = []
    for batch in drawn if drawn is not None and group.size() > 1 else ():
        torch.save(batch, buffer := io.BytesIO())
        rows.append(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in rows)).digest() if rows else None
    told = gather_objects((dist.get_process_group_ranks(group), lengths, digest))
    if problem := find_problem(told):
        raise ConfigError(f"patches.apply(balance=...): {problem}")
    if drawn is None or lengths is None or group.size() == 1:
        return None if drawn is None else iter(drawn)
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else platform.device()
    items = DrawnItems(lengths=lengths, rows={"bytes": list(map(len, rows))})
    exchange = plan_exchange({"samples": items}, group=group, keeps_counts=True)["samples"]
    arrived = exchange.send_inputs(torch.cat(rows).to(device), "bytes").wait().cpu()
    return map(_from_bytes, arrived.split(exchange.rows_here("bytes")))


def find_problem(told: Sequence[tuple[list[int], list[int] | None, bytes | None]]) -> str | None:
    """Return why replicas cannot exchange microbatches; told: each rank's data parallel group, lengths and digest of its data."""
    found: dict[int, list[int]] = {}
    if len({len(ranks) for ranks, lengths, _ in told if lengths is not None}) > 1:
        return "modules have data parallel groups of unlike sizes; give all modules as many replicas"
    for rank, (ranks, lengths, digest) in enumerate(told):
        if any((told[each][1] is None) != (lengths is None) for each in ranks):
            return f"of the data parallel ranks {ranks} only some read data; let all or none have a data iterator"
        if lengths is not None and min(lengths, default=0) < 0:
            return "a batch has no tensors to count, or a negative length; say how long it is by patches.apply(length=...)"
        if digest is not None and (same := [each for each in ranks if told[each][2] == digest])[1:]:
            return (
                f"the data parallel ranks {same} read the same microbatches, as where each takes its part of them; leave balance "
                "out, and exchange single images (multimodal.balance.exchange), or let each rank read its own"
            )
        if lengths is not None and found.setdefault(ranks.index(rank), lengths) != lengths:
            other = found[ranks.index(rank)]
            return (
                f"rank {rank} reads microbatches of lengths {lengths}, but another rank of its replica {other}; let "
                "patches.apply(length=...) return the same for the same samples, whatever part of them a rank reads"
            )
    return None


def _from_bytes(rows: Tensor) -> Any:
    """Read a batch; what lay on the sender's GPU goes to this rank's."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.cuda()

    return torch.load(io.BytesIO(rows.numpy().tobytes()), map_location=place, weights_only=False)
