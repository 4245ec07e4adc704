"""Finds ranks that compute longer than others with the same layers: because of slow devices rather than long batches."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from multimodal.values.plan import Plan


class Stragglers:
    """Sums each rank's seconds over the steps of a report; batches even out over steps, slow devices do not."""

    def __init__(self, plan: Plan) -> None:
        peers: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for rank, stages in _stages_of_ranks(plan).items():
            peers[tuple(sorted(stages))].append(rank)
        self._peers = list(peers.values())
        self._seconds: list[float] = []

    def add(self, seconds: Sequence[float]) -> None:
        """Add a step; seconds: computing time of each rank."""
        self._seconds = [total + new for total, new in zip(self._seconds or [0.0] * len(seconds), seconds, strict=True)]

    def tell(self) -> str:
        """Return one line about the steps since the last call, and forget them."""
        found = [
            (self._seconds[rank] / median, rank) for peers in self._peers if (median := self._median(peers)) for rank in peers
        ]
        self._seconds = []
        ratio, rank = max(found, default=(1.0, 0))
        return f"stragglers: rank {rank} computes longest, {ratio:.2f} times the median of the ranks with the same layers"

    def _median(self, ranks: Sequence[int]) -> float:
        return statistics.median(self._seconds[rank] for rank in ranks) if self._seconds else 0.0


def _stages_of_ranks(plan: Plan) -> dict[int, set[tuple[str, int]]]:
    """Return the stages of each rank, as (unit, index in a replica)."""
    found: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for name, unit in plan.units.items():
        for replica in unit.replicas:
            for index, stage in enumerate(replica.stages):
                for rank in stage.ranks:
                    found[rank].add((name, index))
    return found
