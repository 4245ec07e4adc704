"""Replays what hosts issue to GPUs with NCCL: streams in hardware queues, and kernels that wait for their peers.

A rank's host issues kernels in its order and waits only where it says so. A kernel belongs to a stream; streams share hardware
queues. The kernel at the head of a queue starts once its stream's kernel before it, and what it waits for by events, have ended,
and its blocks find room; until then nothing behind it in that queue starts, of whatever stream (CUDA_DEVICE_MAX_CONNECTIONS=1 is
one queue for all). A message is one grouped call at either end, and ends when the kernels of all peers run; so does a collective.
Until then both hold their blocks. Nothing is buffered.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from benchmarks.recorded_calls import Call, EventKind, Recorded

COMPUTE_STREAM = "compute"
POOL_SIZE = 32
"""Streams that torch has for communicators; further ones share them."""


@dataclass(eq=False, repr=False)
class Kernel:
    """Work on one rank's GPU."""

    label: str
    stream: Hashable
    waits_for: list["Kernel"]
    peers: list["Kernel"] = field(default_factory=list)
    """Kernels of other ranks that must run for this one to end."""
    seconds: float = 0.0
    """From when all peers run."""
    num_blocks: int = 0
    """Multiprocessors that it holds."""
    before: "Kernel | None" = None
    """The kernel before it in its stream."""
    runs: bool = False
    ended: bool = False
    started_at: float = math.nan
    met_at: float = math.nan
    """When all peers run; until then it spins."""

    def __repr__(self) -> str:
        return self.label

    def may_start(self) -> bool:
        """True once everything that it waits for has ended."""
        return (self.before is None or self.before.ended) and all(each.ended for each in self.waits_for)


class HostWait(NamedTuple):
    """The host issues nothing before a kernel has ended."""

    kernel: Kernel


class Meeting(NamedTuple):
    """The host issues nothing before those of these ranks are here: the first use of a communicator, which is then created."""

    communicator: Hashable
    ranks: tuple[int, ...]


HostStep = Kernel | HostWait | Meeting


class Replayed(NamedTuple):
    """The end of a replay."""

    stuck: dict[int, str]
    """Rank -> what its host or a queue of it stands at for ever. Empty: it finished."""
    seconds: float


def run_kernels(hosts: Mapping[int, Sequence[HostStep]], *, num_queues: int, num_blocks: float = math.inf) -> Replayed:
    """Run what every rank's host does, in order; num_blocks: multiprocessors of a GPU."""
    queues: dict[tuple[int, int], deque[Kernel]] = defaultdict(deque)
    steps = {rank: deque(given) for rank, given in hosts.items()}
    streams: dict[int, dict[Hashable, int]] = {rank: {COMPUTE_STREAM: 0} for rank in hosts}
    last: dict[tuple[int, Hashable], Kernel] = {}
    met: dict[Hashable, set[int]] = defaultdict(set)
    free = dict.fromkeys(hosts, num_blocks)
    started: list[tuple[int, Kernel]] = []
    ends: list[tuple[float, int, int, Kernel]] = []
    numbers, now = count(), 0.0
    while True:
        moved = True
        while moved:
            moved = False
            for rank, left in steps.items():
                while left and _goes_on(left[0], rank, met):
                    step, moved = left.popleft(), True
                    if isinstance(step, Kernel):
                        known = streams[rank]
                        number = known.setdefault(step.stream, 1 + (len(known) - 1) % POOL_SIZE)
                        step.before, last[rank, step.stream] = last.get((rank, step.stream)), step
                        queues[rank, number % num_queues].append(step)
            for (rank, _), queue in queues.items():
                while queue and free[rank] >= queue[0].num_blocks and queue[0].may_start():
                    kernel = queue.popleft()
                    kernel.runs = moved = True
                    kernel.started_at = now
                    free[rank] -= kernel.num_blocks
                    started.append((rank, kernel))
            waiting = []
            for rank, kernel in started:
                if all(peer.runs for peer in kernel.peers):
                    kernel.met_at = now
                    heapq.heappush(ends, (now + kernel.seconds, next(numbers), rank, kernel))
                else:
                    waiting.append((rank, kernel))
            started = waiting
        if not ends:
            break
        now = ends[0][0]
        while ends and ends[0][0] == now:
            *_, rank, kernel = heapq.heappop(ends)
            kernel.ended = True
            free[rank] += kernel.num_blocks
    stuck = {rank: f"the host: {left[0]}" for rank, left in steps.items() if left}
    spinning = {rank: f"{kernel.label}, which waits for its peers" for rank, kernel in started}
    return Replayed(stuck | spinning | {rank: queue[0].label for (rank, _), queue in queues.items() if queue}, now)


def _goes_on(step: HostStep, rank: int, met: dict[Hashable, set[int]]) -> bool:
    if isinstance(step, HostWait):
        return step.kernel.ended
    if isinstance(step, Meeting):
        met[step.communicator].add(rank)
        return met[step.communicator] >= set(step.ranks)
    return True


def hosts_of(
    recorded: Sequence[Recorded], *, creates_lazily: bool, blocks_of_call: int = 0, bytes_per_second: float = math.inf
) -> dict[int, list[HostStep]]:
    """Return what hosts would do with NCCL that made the calls of a run, which may have had another backend.

    Computations are as long as those between the calls were. creates_lazily: communicators are created at their first call, and
    pairs of ranks connected at their first message; else before. blocks_of_call: multiprocessors that a call holds.
    Raises ValueError if ranks of a group made other calls of it.
    """
    hosts = {rank: list[HostStep]() for rank in range(len(recorded))}
    kernels: dict[tuple[int, int], Kernel] = {}
    for rank, events in enumerate(recorded):
        seen: set[Hashable] = set()
        computed: dict[int, Kernel] = {}
        for event in events:
            stream = (COMPUTE_STREAM, event.stream) if event.stream else COMPUTE_STREAM
            before = [computed[event.stream]] if event.stream in computed else []
            if event.seconds:
                computed[event.stream] = Kernel(f"before {event.call}", stream, before, seconds=event.seconds, num_blocks=1)
                hosts[rank].append(computed[event.stream])
                before = [computed[event.stream]]
            if event.kind is EventKind.CALL:
                for key, ranks in _first_uses(event.call, rank) if creates_lazily else ():
                    if key not in seen:
                        seen.add(key)
                        hosts[rank].append(Meeting(key, ranks))
                kernel = Kernel(str(event.call), event.call.communicator, before, num_blocks=blocks_of_call)
                kernel.seconds = event.call.size_bytes / bytes_per_second
                kernels[rank, event.number] = kernel
                hosts[rank].append(kernel)
            elif event.kind is EventKind.WAIT:
                computed[event.stream] = Kernel(f"behind {event.call}", stream, [kernels[rank, event.number], *before])
                hosts[rank].append(computed[event.stream])
            elif event.kind is EventKind.READ and before:
                hosts[rank].append(HostWait(before[0]))
    for (rank, number), others in _matched(recorded).items():
        kernels[rank, number].peers += [kernels[other] for other in others]
    return hosts


def _first_uses(call: Call, rank: int) -> list[tuple[Hashable, tuple[int, ...]]]:
    if not call.messages:
        return [(call.communicator, call.ranks)]
    pairs = sorted({tuple(sorted((rank, peer))) for peer, _ in call.messages})
    return [((call.communicator, pair), pair) for pair in pairs]


def _matched(recorded: Sequence[Recorded]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the calls of other ranks that each call, a rank's and its number, ends with.

    Calls of aborted communicators that others did not come to end by themselves.
    """
    aborted = tuple({event.call.communicator for events in recorded for event in events if event.kind is EventKind.ABORT})
    collectives: dict[Hashable, list[tuple[int, int, Call]]] = defaultdict(list)
    messages: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for rank, events in enumerate(recorded):
        counts: Counter[Hashable] = Counter()
        for event in events:
            if event.kind is not EventKind.CALL:
                continue
            call = event.call
            for key in [("to", *sorted((rank, peer)), rank if is_sent else peer) for peer, is_sent in call.messages] or ["all"]:
                place = (call.communicator, key, counts[call.communicator, key])
                counts[call.communicator, key] += 1
                if call.messages:
                    messages[place].append((rank, event.number))
                else:
                    collectives[place].append((rank, event.number, call))
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for calls in collectives.values():
        (rank, _, first), ranks = calls[0], {rank for rank, *_ in calls}
        if first.communicator.startswith(aborted) and ranks != set(first.ranks):
            continue
        for other, _, call in calls:
            if not call.is_alike(first) or ranks != set(first.ranks):
                raise ValueError(f"rank {rank}: {first}; rank {other}: {call}; of {first.ranks}, {sorted(ranks)} called")
            found[other, _] += [(each, number) for each, number, _ in calls if each != other]
    for (communicator, *_), ends in messages.items():
        if len(ends) == 1 and communicator.startswith(aborted):
            continue
        if len(ends) != 2:
            raise ValueError(f"a message has one end: {ends}")
        found[ends[0]].append(ends[1])
        found[ends[1]].append(ends[0])
    return found
