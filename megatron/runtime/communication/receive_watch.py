"""Tells whether posted receives have come, without waiting for them."""

from collections.abc import Sequence
from threading import Thread

import torch
import torch.distributed as dist


class ReceiveWatch:
    """Receives of one message, watched from the moment somebody asks.

    NCCL says whether a receive is complete. gloo says so only to who waits, so there a thread waits, which costs no core.
    """

    def __init__(self, receives: Sequence[dist.Work], *, device: torch.device) -> None:
        self._receives = receives
        self._problem: BaseException | None = None
        self._thread: Thread | None = None
        if device.type == "cpu" and receives:
            self._thread = Thread(target=self._wait_in_thread, daemon=True)
            self._thread.start()

    def is_complete(self) -> bool:
        """Whether all have come (or failed, which `wait` raises)."""
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
