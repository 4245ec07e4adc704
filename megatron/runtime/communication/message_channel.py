"""Point-to-point messages between ranks: asynchronous, without shape exchange, first in first out per track."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.communication.create_groups import create_groups
from multimodal.plan.communicators import BETWEEN_UNITS, Partners, Track

MOST_CONNECTED_RANKS = 64
"""The largest world in which all ranks of neighbouring units are connected at the start."""

MOST_BLOCKS = 8
"""Multiprocessors that a message may hold, mostly while it waits for its other end, beside computations."""


Wait = Callable[[], object]
"""Lets later work on this stream, or without streams this thread, wait for a receive."""


def finish_staged(work: dist.Work, *, landing: Tensor, buffer: Tensor) -> None:
    """Wait for a receive into host memory, and start the copy to the buffer of a device, on the stream that waits for it."""
    work.wait()
    buffer.copy_(landing, non_blocking=True)


def needs_staging(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return True for a device's tensor with gloo, which reduces and gathers such tensors, but only sends host memory."""
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


class MessageChannel:
    """One group over all ranks for each track of messages; with gloo that of the world for all, which tags distinguish.

    The messages of a track follow each other on a rank, on a stream of their own; both ends reach them in the schedule's single
    order. Every call is a group of sends and receives: NCCL runs these at once, on the track's communicator, while single ones
    would create another communicator for each pair of ranks. With gloo, messages of GPUs travel through host memory, which is
    slow, but lets several ranks share a GPU, as NCCL does not.
    """

    def __init__(self, *, tracks: Iterable[Track], timeout: timedelta) -> None:
        """tracks: in the same order on all ranks; collective."""
        listed, ranks = list(tracks), list(range(dist.get_world_size()))
        self._own: list[dist.ProcessGroup] = []
        if dist.get_backend() != "gloo":  # with which a group of its own would only connect all pairs of ranks once more
            self._own = create_groups([ranks] * len(listed), timeout=timeout, most_blocks=MOST_BLOCKS)
        world = dist.distributed_c10d._get_default_group()
        self._groups = dict(zip(listed, self._own or [world] * len(listed), strict=True))
        self._tags = {track: index for index, track in enumerate(listed)}
        self._sent: list[tuple[dist.Work, Sequence[Tensor]]] = []

    def start(
        self, track: Track, *, sends: Sequence[tuple[Tensor, int]] = (), receives: Sequence[tuple[Tensor, int]] = ()
    ) -> Sequence[Wait]:
        """Start a message: sent tensors, unchanged until they have left, with target ranks; contiguous buffers with sources."""
        group, tag = self._groups[track], self._tags[track]
        kept = [(tensor.cpu() if needs_staging(tensor, group) else tensor.contiguous(), target) for tensor, target in sends]
        in_host = partial(torch.empty_like, device="cpu", pin_memory=torch.cuda.is_available())
        landings = [in_host(buffer) if needs_staging(buffer, group) else buffer for buffer, _ in receives]
        calls = [dist.P2POp(dist.isend, tensor, target, group=group, tag=tag) for tensor, target in kept]
        landed = zip(landings, receives, strict=True)
        calls += [dist.P2POp(dist.irecv, landing, source, group=group, tag=tag) for landing, (_, source) in landed]
        if not calls:
            return []
        works = dist.batch_isend_irecv(calls)
        is_one_work = len(works) < len(calls)
        self._sent = [(work, tensors) for work, tensors in self._sent if not work.is_completed()]
        self._sent += [(work, [tensor for tensor, _ in kept]) for work in (works if is_one_work else works[: len(kept)])]
        if is_one_work:
            return [work.wait for work in works]
        return [
            work.wait if landing is buffer else partial(finish_staged, work, landing=landing, buffer=buffer)
            for work, landing, (buffer, _) in zip(works[len(kept) :], landings, receives, strict=True)
        ]

    def finish_sends(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def close(self) -> None:
        """Destroy the groups that are only the channel's; collective, when no message is under way."""
        for group in self._own:
            dist.destroy_process_group(group)

    def connect(self, partners: Mapping[Track, Partners], *, device: torch.device) -> None:
        """Create all communicators, and exchange a byte with partners, track by track; collective.

        NCCL sets up a communicator at the first collective and a pair of ranks at its first message, and blocks the hosts until
        then; done here, no step has to wait for it. In large worlds pairs between units are left to their first message: any rank
        may send to any other there, few do, and each pair takes memory.
        """
        for track, group in self._groups.items():
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            if track.parity == BETWEEN_UNITS and group.size() > MOST_CONNECTED_RANKS:
                continue
            targets, sources = map(sorted, partners[track])
            bytes_of = torch.zeros(len(targets) + len(sources), 1, dtype=torch.uint8, device=device).unbind()
            sends = list(zip(bytes_of, targets, strict=False))
            for wait in self.start(track, sends=sends, receives=list(zip(bytes_of[len(targets) :], sources, strict=True))):
                wait()
        self.finish_sends()
