"""Point-to-point messages between ranks: asynchronous, without shape exchange, first in first out per direction of a pair."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor


class MessageChannel:
    """Two groups over all ranks, one for messages to higher ranks and one for messages to lower ranks.

    NCCL runs the messages of one pair and group one after another, so opposite directions need groups of their own, or two ranks
    that send to each other before they receive would wait for ever. Within one direction the schedule's communication pass keeps
    the order of sends and receives alike.
    """

    def __init__(self, *, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank = rank
        self._to_higher = dist.new_group(list(range(world_size)), timeout=timeout)
        self._to_lower = dist.new_group(list(range(world_size)), timeout=timeout)
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, *, target: int) -> None:
        """Start sending; the tensor is kept until it has left and must not be changed."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, target, group=self._group(self._rank, target))
        self._sent = [(other, kept) for other, kept in self._sent if not other.is_completed()]
        if work is not None:
            self._sent.append((work, tensor))

    def post_receive(self, buffer: Tensor, *, source: int) -> dist.Work:
        """Start receiving into a contiguous buffer of the shape that is sent."""
        work = dist.irecv(buffer, source, group=self._group(source, self._rank))
        assert work is not None
        return work

    def finish_sends(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def close(self) -> None:
        """Give the groups up; collective, when no message is under way."""
        for group in (self._to_higher, self._to_lower):
            dist.destroy_process_group(group)

    def connect(self, pairs: Iterable[tuple[int, int]], *, device: torch.device) -> None:
        """Exchange one byte over each (source, target) pair, in the same order everywhere.

        NCCL sets up a pair at its first message and holds both hosts until then; done here, no step can get stuck in it.
        """
        for source, target in sorted(set(pairs)):
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            if source == target:
                continue
            if source == self._rank:
                self.send(byte, target=target)
            elif target == self._rank:
                self.post_receive(byte, source=source).wait()
        self.finish_sends()

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._to_higher if source < target else self._to_lower


class ReceiveWatch:
    """Receives of one message, watched from the moment somebody asks.

    NCCL says whether a receive is complete. gloo says so only to a waiting thread, so there a thread waits, which costs no core.
    """

    def __init__(self, receives: Sequence[dist.Work], *, device: torch.device) -> None:
        self._receives = receives
        self._problem: BaseException | None = None
        self._thread: Thread | None = None
        if device.type == "cpu" and receives:
            self._thread = Thread(target=self._wait_in_thread, daemon=True)
            self._thread.start()

    def is_complete(self) -> bool:
        """True if all have come (or failed, which `wait` raises)."""
        if self._thread is not None:
            return not self._thread.is_alive()
        return all(receive.is_completed() for receive in self._receives)

    def wait(self) -> None:
        """Wait for all; raises what a receive raised."""
        if self._thread is None:
            for receive in self._receives:
                receive.wait()
            return
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _wait_in_thread(self) -> None:
        try:
            for receive in self._receives:
                receive.wait()
        except Exception as problem:
            self._problem = problem
