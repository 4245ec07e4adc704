"""The communication broker: carries activations and gradients between stages with any TP and DP sizes on either side.

DistTrain 4.1 connects units by gcd(DP, DP) brokers; here every tensor parallel rank is a broker of its own share. Between units
the rows are the same on all tensor parallel ranks of a stage, so rank i of the source sends only the rows that overlap with its
1/tp of them, and the target's ranks gather their shares. If a unit spreads tokens over context parallel ranks, each of these
sends and receives its own rows (`RowShares`), and so do its tensor parallel ranks. Between stages of one unit, where all ranks
may hold different rows, each rank passes on its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron.runtime.communication.message_channel import MessageChannel, Wait
from multimodal.attention.context_parallel import all_gather_single
from multimodal.attention.device_values import CPU, DerivedValues, map_tensors
from multimodal.plan.communicators import track_of
from multimodal.values.action import MessageKey

Rows = NDArray[np.int64]


class RowShares:
    """Rows of one route, by context parallel rank of either end; all of them ascending.

    Every row that an encoder hands to the LLM is sent by one rank and received by one. A row that the LLM hands to a generator
    may be received by several, whose gradients add up on the sending rank. A rank is sent only the rows that it needs.
    """

    def __init__(self, *, given: tuple[Rows, ...], taken: tuple[Rows, ...]) -> None:
        self.given, self.taken = given, taken
        self._derived = DerivedValues()

    @cached_property
    def reversed(self) -> "RowShares":
        """The shares of the gradients, which travel in the other direction."""
        return RowShares(given=self.taken, taken=self.given)

    def prepare(self, *, giver: int | None, taker: int | None) -> None:
        """Derive, on the CPU, the rows that context parallel ranks send and receive; None: only of the other end."""
        if giver is not None:
            for target in range(len(self.taken)):
                self.positions_given(giver, target, CPU)
            self.reversed.positions_taken(giver, CPU)
        if taker is not None:
            for source in range(len(self.given)):
                self.reversed.positions_given(taker, source, CPU)
            self.positions_taken(taker, CPU)

    def map_tensors(self, change: Callable[[Any], Any]) -> "RowShares":
        """Return the same with the tensors of derived rows changed."""
        changed = RowShares(given=self.given, taken=self.taken)
        changed.reversed = RowShares(given=self.taken, taken=self.given)
        for new, old in ((changed, self), (changed.reversed, self.reversed)):
            new._derived = map_tensors(old._derived, change)
        return changed

    @cached_property
    def common(self) -> tuple[tuple[Rows, ...], ...]:
        """[receiving rank][sending rank]: rows that travel between the two."""
        return tuple(tuple(np.intersect1d(own, other, assume_unique=True) for other in self.given) for own in self.taken)

    def first_row(self, source: int, target: int) -> int:
        """Return the first row of `source` among all rows that `target` receives, ordered by sending rank."""
        return sum(map(len, self.common[target][:source]))

    def num_received(self, target: int) -> int:
        """Return the number of rows that a rank receives; more than it needs if gradients add up."""
        return sum(map(len, self.common[target]))

    def positions_given(self, source: int, target: int, device: torch.device) -> Tensor:
        """Return the positions, among all rows that `source` sends, of the rows that travel to `target`."""

        def derive() -> Tensor:
            return torch.from_numpy(np.searchsorted(self.given[source], self.common[target][source]))

        return self._derived.on(device, ("given", source, target), derive)

    def positions_taken(self, target: int, device: torch.device) -> Tensor | None:
        """Return the position of each received row among the rows that the rank needs; None if they are in order."""

        def derive() -> Tensor | None:
            positions = np.searchsorted(self.taken[target], np.concatenate(self.common[target]))
            is_in_order = len(positions) == len(self.taken[target]) and bool((np.diff(positions) > 0).all())
            return None if is_in_order else torch.from_numpy(positions)

        return self._derived.on(device, ("taken", target), derive)


@dataclass(frozen=True)
class Link:
    """Shape and route of one message, which both ends derive from plan and lengths."""

    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    shape: tuple[int, ...]
    """Rows first: all that travel for a message between units, else those of this rank."""
    is_replicated: bool
    """True (between units) if tensor parallel ranks hold and need the same rows; else rank i sends its own rows to rank i."""
    rows: RowShares | None = None
    """The rows of each rank if a unit at either end spreads tokens over context parallel ranks; None: all ranks have all rows."""

    @property
    def source_groups(self) -> tuple[tuple[int, ...], ...]:
        """Tensor parallel groups of the source, by context parallel rank."""
        return _groups(self.source_ranks, 1 if self.rows is None else len(self.rows.given))

    @property
    def target_groups(self) -> tuple[tuple[int, ...], ...]:
        """Tensor parallel groups of the target, by context parallel rank."""
        return _groups(self.target_ranks, 1 if self.rows is None else len(self.rows.taken))

    def num_received(self, target: int) -> int:
        """Number of rows that a context parallel rank of the target receives."""
        return self.shape[0] if self.rows is None else self.rows.num_received(target)


class Piece(NamedTuple):
    """Rows that travel from one rank to another, numbered among those that the target's context parallel rank receives."""

    source_rank: int
    target_rank: int
    first_row: int
    last_row: int


def share_of_rows(num_rows: int, *, num_shares: int, index: int) -> range:
    """Return the rows of the index-th share: all shares have ceil(num_rows / num_shares) rows, except the last ones."""
    size = -(-num_rows // num_shares)
    return range(min(index * size, num_rows), min((index + 1) * size, num_rows))


def pieces_of(link: Link) -> tuple[Piece, ...]:
    """Return all pieces of a message: the overlaps of source shares with target shares."""
    num_rows = link.shape[0]
    if not link.is_replicated:
        pairs = zip(link.source_ranks, link.target_ranks, strict=True)
        return tuple(Piece(source, target, 0, num_rows) for source, target in pairs)
    found = []
    for group, other in product(range(len(link.source_groups)), range(len(link.target_groups))):
        start, size = 0, num_rows
        if link.rows is not None:
            start, size = link.rows.first_row(group, other), len(link.rows.common[other][group])
        sources, targets = link.source_groups[group], link.target_groups[other]
        for (i, source), (j, target) in product(enumerate(sources), enumerate(targets)):
            sent = share_of_rows(size, num_shares=len(sources), index=i)
            wanted = share_of_rows(link.num_received(other), num_shares=len(targets), index=j)
            first, last = max(start + sent.start, wanted.start), min(start + sent.stop, wanted.stop)
            if first < last:
                found.append(Piece(source, target, first, last))
    return tuple(found)


def _payload_of(piece: Piece, link: Link, payload: Tensor) -> Tensor:
    """Return the rows of a piece among those that its source rank sends."""
    if link.rows is None:
        return payload[piece.first_row : piece.last_row]
    source, target = _index_of(piece.source_rank, link.source_groups), _index_of(piece.target_rank, link.target_groups)
    start = link.rows.first_row(source, target)
    positions = link.rows.positions_given(source, target, payload.device)
    return payload.index_select(0, positions[piece.first_row - start : piece.last_row - start])


def _groups(ranks: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    size = len(ranks) // count
    return tuple(ranks[index * size : (index + 1) * size] for index in range(count))


def _index_of(rank: int, groups: tuple[tuple[int, ...], ...]) -> int:
    return next(index for index, ranks in enumerate(groups) if rank in ranks)


def _in_order(received: Tensor, rows: RowShares | None, target: int) -> Tensor:
    """Put received rows into their places, and add up rows that came from several ranks."""
    if rows is None:
        return received
    positions = rows.positions_taken(target, received.device)
    if positions is None:
        return received
    return received.new_zeros(len(rows.taken[target]), *received.shape[1:]).index_add_(0, positions, received)


@dataclass
class _Incoming:
    link: Link
    buffer: Tensor
    first_row: int
    waits: Sequence[Wait]


class Broker:
    """Sends and receives of one rank."""

    def __init__(self, *, rank: int, channel: MessageChannel | None, device: torch.device, dtype: torch.dtype) -> None:
        """channel: None on a rank that sends nothing to others; dtype: of all messages."""
        self._rank, self._channel, self._device, self._dtype = rank, channel, device, dtype
        self._incoming: dict[MessageKey, _Incoming] = {}
        self._kept: dict[MessageKey, list[tuple[Piece, Tensor]]] = {}
        self._unsent: dict[MessageKey, list[tuple[Tensor, int]]] = {}

    def send(self, key: MessageKey, link: Link, payload: Tensor) -> None:
        """Send this rank's rows at once, or, if it receives a part of the message itself, when it posts that receive."""
        sends: list[tuple[Tensor, int]] = []
        for piece in pieces_of(link):
            if piece.source_rank != self._rank:
                continue
            rows = _payload_of(piece, link, payload) if link.is_replicated else payload
            if piece.target_rank == self._rank:
                self._kept.setdefault(key, []).append((piece, rows))
            else:
                sends.append((rows, piece.target_rank))
        if self._rank in link.target_ranks:
            self._unsent[key] = sends
        elif sends:
            self._start(key, sends=sends)

    def post_receive(self, key: MessageKey, link: Link) -> int:
        """Start receiving; returns the number of bytes allocated for it."""
        num_rows, width = link.shape[0], link.shape[1:]
        first_row, size = 0, num_rows
        if link.is_replicated:
            target = _index_of(self._rank, link.target_groups)
            group = link.target_groups[target]
            num_rows = link.num_received(target)
            first_row = share_of_rows(num_rows, num_shares=len(group), index=group.index(self._rank)).start
            size = -(-num_rows // len(group))
        buffer = torch.empty((size, *width), device=self._device, dtype=self._dtype)
        pieces = (piece for piece in pieces_of(link) if piece.target_rank == self._rank != piece.source_rank)
        receives = [(buffer[piece.first_row - first_row : piece.last_row - first_row], piece.source_rank) for piece in pieces]
        sends = self._unsent.pop(key, [])
        waits = self._start(key, sends=sends, receives=receives) if sends or receives else []
        self._incoming[key] = _Incoming(link, buffer, first_row, waits)
        return buffer.numel() * buffer.element_size()

    def _start(
        self, key: MessageKey, *, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]] = ()
    ) -> Sequence[Wait]:
        assert self._channel is not None, "a rank alone sends no messages"
        return self._channel.start(track_of(key.direction, key.source, key.target), sends=sends, receives=receives)

    def wait(self, key: MessageKey) -> Tensor:
        """Wait for this rank's pieces; returns the buffer, to be completed by `complete`."""
        incoming = self._incoming[key]
        for wait in incoming.waits:
            wait()
        for piece, rows in self._kept.pop(key, ()):
            incoming.buffer[piece.first_row - incoming.first_row : piece.last_row - incoming.first_row] = rows
        return incoming.buffer

    def complete(self, key: MessageKey, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the rows that this rank needs, in the route's order; group: its tensor parallel peers, which gather shares."""
        incoming = self._incoming.pop(key)
        link, received = incoming.link, incoming.buffer
        if not link.is_replicated:
            return received
        target = _index_of(self._rank, link.target_groups)
        if group is not None and len(link.target_groups[target]) > 1 and len(received):
            received = received.new_empty((len(received) * group.size(), *received.shape[1:]))
            all_gather_single(received, incoming.buffer, group=group)
        return _in_order(received[: link.num_received(target)], link.rows, target)

    def finish(self) -> None:
        """Wait until everything is sent; a step ends with no message under way."""
        if self._channel is not None:
            self._channel.finish_sends()
        assert not self._incoming and not self._kept and not self._unsent, "messages were left over at the end of a step"
