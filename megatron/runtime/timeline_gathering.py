"""The measured timeline of a whole step, from the events of every lane's first rank."""

import torch.distributed as dist

from multimodal.values.plan import Plan
from multimodal.values.timeline import Timeline, TimelineEvent


def gather_timeline(events: tuple[TimelineEvent, ...], *, plan: Plan, rank: int) -> Timeline | None:
    """Collective; the timeline on rank 0, None elsewhere. Each rank counts from its own start of the step."""
    mine = events if plan.lanes[plan.lane_of_rank[rank]][0] == rank else ()
    gathered: list[tuple[TimelineEvent, ...]] | None = [()] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, gathered)
    return None if gathered is None else Timeline(plan.lanes, tuple(event for lane in gathered for event in lane))
