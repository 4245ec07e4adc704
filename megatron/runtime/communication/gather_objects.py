"""Gathers small values of any type, pickled, from the ranks of a group."""

from typing import Any

import torch.distributed as dist


def gather_objects(mine: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks of a group (None: all of the run), in the order of the ranks; collective over them."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
