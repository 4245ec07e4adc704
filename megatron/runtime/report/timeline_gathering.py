"""The measured timeline of a whole step, from the events of every lane's first rank."""

import socket
import time
from typing import NamedTuple

import torch.distributed as dist

from multimodal.values.plan import Plan
from multimodal.values.timeline import Timeline, TimelineEvent


class _LaneEvents(NamedTuple):
    """One rank's share of a timeline, with what aligns its clock."""

    events: tuple[TimelineEvent, ...]
    host: str
    origin_seconds: float
    barrier_seconds: float


def gather_timeline(events: tuple[TimelineEvent, ...], *, origin_seconds: float, plan: Plan, rank: int) -> Timeline | None:
    """Collective; the timeline on rank 0, None elsewhere.

    events: this rank's, in seconds from `origin_seconds` on its host clock. Ranks of one host share that clock; the clocks of
    other hosts are aligned to rank 0's at a barrier, to about a network round trip. The first rank to start is at 0 seconds.
    """
    dist.barrier()
    mine = _LaneEvents(
        events if plan.lanes[plan.lane_of_rank[rank]][0] == rank else (),
        socket.gethostname(),
        origin_seconds,
        time.perf_counter(),
    )
    gathered: list[_LaneEvents] | None = [mine] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, gathered)
    if gathered is None:
        return None
    starts = [_start_on_first_clock(lane, gathered[0]) for lane in gathered]
    earliest = min(starts)
    return Timeline(
        plan.lanes,
        tuple(
            event._replace(start_seconds=event.start_seconds + start - earliest, end_seconds=event.end_seconds + start - earliest)
            for lane, start in zip(gathered, starts, strict=True)
            for event in lane.events
        ),
    )


def _start_on_first_clock(lane: _LaneEvents, first: _LaneEvents) -> float:
    if lane.host == first.host:
        return lane.origin_seconds
    return lane.origin_seconds + first.barrier_seconds - lane.barrier_seconds
