"""Records every collective and message that a rank starts through torch, and every wait for one, in order, with its stream.

Whoever imports functions of torch.distributed by name is heard, too, as methods of process groups are what is replaced.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "send", "recv"),
)
"""Names of methods of process groups that communicate, in all versions of torch."""
READS = ("item", "tolist")
"""Methods of a tensor for which the host waits."""
SAME_SIZES = ("allreduce", "broadcast", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single")


class EventKind(Enum):
    """The three things that a host does."""

    CALL = "call"
    WAIT = "wait"
    """Its stream waits for a call."""
    READ = "read"
    """It waits for its stream itself."""
    ABORT = "abort"
    """Its communicators are aborted, since ranks are lost: no call of theirs waits for anyone."""


class Call(NamedTuple):
    """A collective, or messages that are started together."""

    name: str
    communicator: str
    """Name of the group, and the tag of messages."""
    ranks: tuple[int, ...]
    """The ranks of the group."""
    messages: tuple[tuple[int, bool], ...] = ()
    """The other end of each message, and whether it is sent there."""
    size_bytes: int = 0

    def is_alike(self, other: "Call") -> bool:
        """True if both are calls of one collective."""
        return self.name == other.name and (self.name not in SAME_SIZES or self.size_bytes == other.size_bytes)

    def __str__(self) -> str:
        ends = "".join(f" {'to' if is_sent else 'from'} {peer}" for peer, is_sent in self.messages)
        return f"{self.name}{ends} ({self.size_bytes} bytes, group {self.communicator} of {list(self.ranks)})"


class Event(NamedTuple):
    """One thing that a host does."""

    kind: EventKind
    call: Call
    number: int
    """The number of the call among the rank's."""
    stream: int = 0
    seconds: float = 0.0
    """Computing since the event before it."""


Recorded = list[Event]
"""The events of one rank."""
_READ = Call("read", "", ())


class Recorder:
    """Keeps the calls of this rank's host, in their order."""

    def __init__(self) -> None:
        self.events: Recorded = []
        self.world: Sequence[int] | None = None
        """Of an elastic run: the number that each rank keeps in all worlds; calls then name those."""
        self.prefix = ""
        """Of the names of groups, which come again in other worlds."""
        self.is_batched = False
        self.calls: list[Call] = []
        self.numbers: dict[int, int] = {}
        self.works: list[Any] = []
        """Kept, so that no other has the id of one of them."""
        self.thread, self.last = threading.get_ident(), time.perf_counter()

    def is_heard(self) -> bool:
        """True in the thread that records, and in autograd's; others have groups of their own on the CPU."""
        return threading.get_ident() == self.thread or isinstance(threading.current_thread(), threading._DummyThread)

    def enter(self, prefix: str, world: Sequence[int]) -> None:
        """Go on in another world, in this thread."""
        self.prefix, self.world, self.thread = prefix, world, threading.get_ident()

    def abort(self) -> None:
        """Note that this world's communicators are aborted."""
        self.add(EventKind.ABORT, Call("abort", self.prefix, ()), -1)

    def named(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ranks by the numbers that they keep."""
        return tuple(ranks if self.world is None else (self.world[rank] for rank in ranks))

    def add(self, kind: EventKind, call: Call, number: int) -> None:
        """Note an event, with the seconds since the one before."""
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        self.events.append(Event(kind, call, number, stream, time.perf_counter() - self.last))

    def start(self, call: Call, run: Callable[[], Any]) -> Any:
        """Note a call, and run it; what it returns is waited for."""
        number = len(self.calls)
        self.add(EventKind.CALL, call, number)
        self.calls.append(call)
        works = run()
        for work in works if isinstance(works, list) else [works]:
            self.numbers[id(work)] = number
            self.works.append(work)
        self.last = time.perf_counter()
        return works


@contextmanager
def recording_calls() -> Iterator[Recorded]:
    """Yield the list of what this rank's host does inside."""
    with recording() as recorder:
        yield recorder.events


@contextmanager
def recording() -> Iterator[Recorder]:
    """Yield what records inside."""
    recorder = Recorder()
    work = torch._C._distributed_c10d.Work
    with ExitStack() as patches:
        for name in METHODS:
            if hasattr(dist.ProcessGroup, name):
                called = partial(_call, recorder, name, getattr(dist.ProcessGroup, name))
                patches.enter_context(patch.object(dist.ProcessGroup, name, _method(called)))
        patches.enter_context(patch.object(work, "wait", _method(partial(_wait, recorder, work.wait))))
        for name in READS:
            read = partial(_read, recorder, getattr(Tensor, name))
            patches.enter_context(patch.object(Tensor, name, _method(read)))
        for owner in (dist, dist.distributed_c10d):
            patches.enter_context(patch.object(owner, "batch_isend_irecv", partial(_batch, recorder, dist.batch_isend_irecv)))
        yield recorder


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **options: function(self, *args, **options)


def _call(recorder: Recorder, name: str, original: Callable[..., Any], group: Any, *args: Any, **options: Any) -> Any:
    run = partial(original, group, *args, **options)
    return (
        recorder.start(_described(recorder, name, group, args), run) if recorder.is_heard() and not recorder.is_batched else run()
    )


def _described(recorder: Recorder, name: str, group: Any, args: tuple[Any, ...]) -> Call:
    ranks, group_name = recorder.named(dist.get_process_group_ranks(group)), recorder.prefix + group.group_name
    size = sum(each.numel() * each.element_size() for each in _tensors(args[:1]))
    if name not in ("send", "recv"):
        return Call(name, group_name, ranks, size_bytes=size)
    _, peer, tag = args
    return Call("messages", f"{group_name}:{tag}", ranks, ((ranks[peer], name == "send"),), size)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)


def _batch(recorder: Recorder, original: Callable[..., Any], operations: list[Any]) -> Any:
    if not recorder.is_heard():
        return original(operations)
    group = operations[0].group or dist.group.WORLD
    messages = tuple((*recorder.named([each.peer]), each.op is dist.isend) for each in operations)
    size = sum(each.tensor.numel() * each.tensor.element_size() for each in operations)
    ranks, name = recorder.named(dist.get_process_group_ranks(group)), f"{recorder.prefix}{group.group_name}:{operations[0].tag}"
    recorder.is_batched = True
    try:
        return recorder.start(Call("messages", name, ranks, messages, size), partial(original, operations))
    finally:
        recorder.is_batched = False


def _wait(recorder: Recorder, original: Callable[..., Any], work: Any, *args: Any) -> Any:
    number = recorder.numbers.get(id(work)) if recorder.is_heard() else None
    if number is not None:
        recorder.add(EventKind.WAIT, recorder.calls[number], number)
    result = original(work, *args)
    if number is not None:
        recorder.last = time.perf_counter()
    return result


def _read(recorder: Recorder, original: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
    if recorder.is_heard():
        recorder.add(EventKind.READ, _READ, -1)
        recorder.last = time.perf_counter()
    return original(tensor, *args)
