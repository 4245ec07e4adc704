"""Which data-parallel group gets which sample, whole samples by their size (DistTrain 5.1, Alg. 2)."""

from collections.abc import Sequence
from heapq import heapreplace

from multimodal.balance.longest_first_partition import Partition, partition_longest_first
from multimodal.values.errors import AssignmentError


def reorder_samples(sizes: Sequence[float], *, num_groups: int, ascending: bool = False) -> Partition:
    """Distribute samples over data-parallel groups so that the heaviest group is light: each sample to the lightest group so far.

    The paper's listing goes through the samples by ascending size, and its bound of 4/3 (Graham's) is that of descending size:
    ascending, the largest samples come when nothing small is left to even them out. Descending is the default, since its heaviest
    group was lighter on every length distribution measured (`benchmarks/microbatch_assignment.py`).

    sizes: one per sample, at least one, finite and not negative, in any unit. Returns per group the indices of its samples in
    the order of placement; the paper's reordered batch is the groups one after the other. Equal sizes go by sample index, equal
    groups by group index. Raises AssignmentError when an argument is out of range. O(n log n + n log num_groups).
    """
    if not len(sizes):
        raise AssignmentError("the global batch has no samples; give at least one")
    descending = partition_longest_first(sizes, num_bins=num_groups)
    return _partition_shortest_first(sizes, num_groups=num_groups) if ascending else descending


def _partition_shortest_first(sizes: Sequence[float], *, num_groups: int) -> Partition:
    loads: list[tuple[float, int]] = [(0, group) for group in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for sample in sorted(range(len(sizes)), key=sizes.__getitem__):
        load, group = loads[0]
        groups[group].append(sample)
        heapreplace(loads, (load + sizes[sample], group))
    return tuple(map(tuple, groups))
