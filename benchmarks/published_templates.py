"""The dynamic program of Oobleck 2.4.1.2 as published, against which Braid's search for templates is held."""

from functools import cache
from typing import NamedTuple

from multimodal.plan.planners.templates.chain import StageMapping, StageTables

NEVER = float("inf")


class Part(NamedTuple):
    """The best mapping of some layers to some GPUs, by the published terms."""

    t1: float
    t3: float
    slowest: int
    """The index of the slowest stage: k*."""
    slowest_ticks: float
    ends: tuple[int, ...]
    gpus: tuple[int, ...]

    def step(self, num_microbatches: int) -> float:
        """T1 + T2 + T3."""
        return self.t1 + (num_microbatches - len(self.ends) + self.slowest - 1) * self.slowest_ticks + self.t3


def map_published(
    tables: StageTables, *, num_nodes: int, gpus_per_node: int, is_per_microbatch: bool = False
) -> StageMapping | None:
    """Return the mapping that divide and conquer finds, with T1, T2, T3 and k* as printed and all results kept.

    A part of S' stages is divided after s of them, behind layer k and GPU m, everywhere: nodes between nodes, or one node inside.
    A stage on GPUs of two nodes takes forever. N_b is 4 S'; of the numbers of stages, the one with the least T is taken.
    is_per_microbatch: the one with the least T / N_b instead, since T is of different work.
    """
    num_layers, total = tables.forward.shape[1], num_nodes * gpus_per_node
    row_of_size = {size: row for row, size in enumerate(tables.sizes.tolist())}

    @cache
    def solve(stages: int, first: int, end: int, offset: int, gpus: int) -> Part | None:
        """offset: of the first GPU in its node."""
        if stages == 1:
            if offset + gpus > gpus_per_node or gpus not in row_of_size:
                return None
            row = row_of_size[gpus]
            if tables.capacities[row, first, end] < 1:
                return None
            ticks = float(tables.forward[row, first, end] + tables.backward[row, first, end])
            return Part(ticks, ticks, 0, ticks, (end,), (gpus,))
        best: Part | None = None
        for ahead in range(1, stages):
            for cut in range(first + ahead, end - (stages - ahead) + 1):
                for own in cuts(offset, gpus):
                    left = solve(ahead, first, cut, offset, own)
                    right = left and solve(stages - ahead, cut, end, (offset + own) % gpus_per_node, gpus - own)
                    if left is None or right is None:
                        continue
                    joined = join(left, right)
                    if best is None or joined.step(4 * stages) < best.step(4 * stages):
                        best = joined
        return best

    def cuts(offset: int, gpus: int) -> list[int]:
        if offset + gpus <= gpus_per_node:
            return list(range(1, gpus))
        return [own for own in range(1, gpus) if (offset + own) % gpus_per_node == 0]

    found = [solve(stages, 0, num_layers, 0, total) for stages in range(num_nodes, num_layers + 1)]
    fitting = [part for part in found if part is not None]
    if not fitting:
        return None
    best = min(fitting, key=lambda part: part.step(4 * len(part.ends)) / (len(part.ends) if is_per_microbatch else 1))
    return StageMapping(round(best.step(4 * len(best.ends))), best.ends, best.gpus)


def join(left: Part, right: Part) -> Part:
    """Combine two parts of a pipeline (Eq. 2.1 and 2.3)."""
    is_left = left.slowest_ticks >= right.slowest_ticks
    return Part(
        left.t1 + right.t1,
        left.t3 + right.t1 if is_left else right.t3,
        left.slowest if is_left else len(left.ends) + right.slowest,
        max(left.slowest_ticks, right.slowest_ticks),
        left.ends + right.ends,
        left.gpus + right.gpus,
    )
