"""The communication broker: carries activations and gradients between stages, whatever TP and DP either side has.

DistTrain 4.1 bridges units by brokers, gcd(DP, DP) many; here every tensor parallel rank is a broker of its own share. Between
units the rows are the same on all tensor parallel ranks of a stage, so rank i of the source sends only what overlaps with its
1/tp of the rows, and the target's ranks gather their shares. Between stages of one unit, where tensor parallel ranks may hold
different rows (sequence parallelism), each passes on what it has.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.message_channel import MessageChannel
from megatron.runtime.receive_watch import ReceiveWatch
from multimodal.values.schedule import Place


class MessageKey(NamedTuple):
    """Which microbatch's tensor goes from where to where; direction is `forward` or `backward`."""

    direction: str
    source: Place
    target: Place
    part: int = -1
    """The sample subset whose gradient it is, between stages of one unit; -1: the whole microbatch."""


@dataclass(frozen=True)
class Link:
    """Shape and route of one message, which both ends derive from plan and lengths."""

    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    shape: tuple[int, ...]
    """Rows first."""
    is_replicated: bool
    """Whether every source rank holds the same rows and every target rank needs them all; else rank i passes its own on to i."""


class Piece(NamedTuple):
    """Rows that travel from one rank to another."""

    source_rank: int
    target_rank: int
    first_row: int
    last_row: int


def share_of_rows(num_rows: int, *, num_shares: int, index: int) -> range:
    """Rows of the index-th of `num_shares` shares: all ceil(num_rows / num_shares) long, but the last ones."""
    size = -(-num_rows // num_shares)
    return range(min(index * size, num_rows), min((index + 1) * size, num_rows))


def pieces_of(link: Link) -> tuple[Piece, ...]:
    """All pieces of a message: the overlaps of source shares with target shares."""
    num_rows = link.shape[0]
    if not link.is_replicated:
        pairs = zip(link.source_ranks, link.target_ranks, strict=True)
        return tuple(Piece(source, target, 0, num_rows) for source, target in pairs)
    found = []
    for i, source in enumerate(link.source_ranks):
        sent = share_of_rows(num_rows, num_shares=len(link.source_ranks), index=i)
        for j, target in enumerate(link.target_ranks):
            wanted = share_of_rows(num_rows, num_shares=len(link.target_ranks), index=j)
            first, last = max(sent.start, wanted.start), min(sent.stop, wanted.stop)
            if first < last:
                found.append(Piece(source, target, first, last))
    return tuple(found)


@dataclass
class _Incoming:
    link: Link
    buffer: Tensor
    first_row: int
    waiting: list[dist.Work]
    watch: ReceiveWatch | None = None


class Broker:
    """Sends and receives of one rank."""

    def __init__(self, *, rank: int, channel: MessageChannel, device: torch.device, dtype: torch.dtype) -> None:
        self._rank, self._channel, self._device, self._dtype = rank, channel, device, dtype
        self._incoming: dict[MessageKey, _Incoming] = {}
        self._kept: dict[MessageKey, list[tuple[Piece, Tensor]]] = {}

    def send(self, key: MessageKey, link: Link, payload: Tensor) -> None:
        """Start sending this rank's pieces of `payload` (`link.shape`); pieces for this rank itself are kept."""
        for piece in pieces_of(link):
            if piece.source_rank != self._rank:
                continue
            rows = payload[piece.first_row : piece.last_row]
            if piece.target_rank == self._rank:
                self._kept.setdefault(key, []).append((piece, rows))
            else:
                self._channel.send(rows, target=piece.target_rank)

    def post_receive(self, key: MessageKey, link: Link) -> int:
        """Start receiving; returns the bytes set aside for it."""
        num_rows, width = link.shape[0], link.shape[1:]
        first_row, size = 0, num_rows
        if link.is_replicated:
            index = link.target_ranks.index(self._rank)
            first_row = share_of_rows(num_rows, num_shares=len(link.target_ranks), index=index).start
            size = -(-num_rows // len(link.target_ranks))
        buffer = torch.zeros((size, *width), device=self._device, dtype=self._dtype)
        waiting = [
            self._channel.post_receive(buffer[piece.first_row - first_row : piece.last_row - first_row], source=piece.source_rank)
            for piece in pieces_of(link)
            if piece.target_rank == self._rank and piece.source_rank != self._rank
        ]
        self._incoming[key] = _Incoming(link, buffer, first_row, waiting)
        return buffer.numel() * buffer.element_size()

    def is_there(self, key: MessageKey) -> bool:
        """Whether this rank's pieces have come."""
        incoming = self._incoming[key]
        if incoming.watch is None:
            incoming.watch = ReceiveWatch(incoming.waiting, device=self._device)
        return incoming.watch.is_complete()

    def wait(self, key: MessageKey) -> Tensor:
        """Wait for this rank's pieces; returns the buffer, to be completed by `complete`."""
        incoming = self._incoming[key]
        if incoming.watch is not None:
            incoming.watch.wait()
        else:
            for work in incoming.waiting:
                work.wait()
        for piece, rows in self._kept.pop(key, ()):
            incoming.buffer[piece.first_row - incoming.first_row : piece.last_row - incoming.first_row] = rows
        return incoming.buffer

    def complete(self, key: MessageKey, group: dist.ProcessGroup) -> Tensor:
        """The whole received tensor (`link.shape`): gathers the shares of the target's tensor parallel ranks where needed."""
        incoming = self._incoming.pop(key)
        if not incoming.link.is_replicated or group.size() == 1:
            return incoming.buffer
        gathered = incoming.buffer.new_empty((incoming.buffer.shape[0] * group.size(), *incoming.buffer.shape[1:]))
        dist.all_gather_into_tensor(gathered, incoming.buffer, group=group)
        return gathered[: incoming.link.shape[0]]

    def finish(self) -> None:
        """Wait until everything sent has left; a step ends with nothing under way."""
        self._channel.finish_sends()
        assert not self._incoming and not self._kept, "messages were left over at the end of a step"
