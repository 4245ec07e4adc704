"""Finds ranks that compute longer than others with the same layers: because of slow devices rather than long batches."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from multimodal.values.plan import Plan


class Stragglers:
    """Sums each rank's seconds over the steps of a report; batches even out over steps, slow devices do not."""

    def __init__(self, plan: Plan) -> None:
        stages: dict[int, set[tuple[str, int]]] = defaultdict(set)  # rank -> its stages: unit, index in a replica
        for name, unit in plan.units.items():
            for replica in unit.replicas:
                for index, stage in enumerate(replica.stages):
                    for rank in stage.ranks:
                        stages[rank].add((name, index))
        peers: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for rank, own in stages.items():
            peers[tuple(sorted(own))].append(rank)
        self._peers = list(peers.values())
        self._seconds: list[float] = []

    def add(self, seconds: Sequence[float]) -> None:
        """Add a step; seconds: computing time of each rank."""
        self._seconds = [total + new for total, new in zip(self._seconds or [0.0] * len(seconds), seconds, strict=True)]

    def tell(self) -> str:
        """Return one line about the steps since the last call, and forget them."""
        seconds = self._seconds
        medians = [statistics.median(seconds[rank] for rank in peers) if seconds else 0.0 for peers in self._peers]
        ratios = [
            (seconds[rank] / median, rank) for peers, median in zip(self._peers, medians, strict=True) if median for rank in peers
        ]
        self._seconds = []
        ratio, rank = max(ratios, default=(1.0, 0))
        return f"stragglers: rank {rank} computes longest, {ratio:.2f} times the median of the ranks with the same layers"
