"""The sweep behind block summaries, in Python; `csrc/block_summary.cpp` does the same, step by step."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from multimodal.attention.bitfield import ACROSS_ITEMS_BIT, MODALITY_BITS, TEXT_BIT

_Interval = tuple[int, int]
_Strip = tuple[int, int, bool]
"""First and last of consecutive key blocks that are alike; True if they are full."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskRuns:
    """A mask as runs of equal tokens; run r holds tokens starts[r] .. starts[r + 1] - 1."""

    starts: NDArray[np.int64]
    """[num_runs + 1]."""
    bits: NDArray[np.int64]
    """[num_runs], like the next two: the value of every token of the run."""
    sample_ids: NDArray[np.int32]
    item_ids: NDArray[np.int32]
    window: int
    """Keys that a causal token attends to, at most; the number of tokens if nothing bounds them."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockStrips:
    """The blocks with any visible pair, by query block."""

    strips: tuple[_Strip, ...]
    """The strips of all query blocks in turn; ascending in each."""
    row_starts: NDArray[np.int64]
    """[num_query_blocks + 1], counted in blocks."""
    visible_pairs: NDArray[np.int64]
    """[num_query_blocks]."""

    def expand(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the key block of every block, and True where it is full."""
        blocks = np.concatenate([np.empty(0, np.int32), *(np.arange(first, last + 1) for first, last, _ in self.strips)])
        is_full = np.repeat([full for *_, full in self.strips], [last - first + 1 for first, last, _ in self.strips])
        return blocks.astype(np.int32), is_full.astype(np.bool_)


def summarize_runs(runs: MaskRuns, query_block_size: int, key_block_size: int) -> BlockStrips:
    """Summarise a mask without reading single tokens.

    The number of queries of a block that attend to a key is a step function of the key with few steps: every run of the block
    adds the intervals of keys that it attends to. Blocks of keys between two steps are alike.

    O(runs + sum over query blocks of n log n), with n the intervals of keys that the runs in a block attend to.
    """
    num_tokens = int(runs.starts[-1])
    seen_of_run = list(_seen_keys(runs))
    starts = runs.starts.tolist()
    strips: list[_Strip] = []
    row_starts, visible_pairs = [0], []
    run = 0
    for block_begin in range(0, num_tokens, query_block_size):
        block_end = min(block_begin + query_block_size, num_tokens)
        steps: Counter[int] = Counter()
        num_pairs, begin = 0, block_begin
        while begin < block_end:
            end = min(starts[run + 1], block_end)
            if runs.bits[run] < 0:
                num_pairs += _see_causally(steps, seen_of_run[run], begin=begin, end=end, window=runs.window)
            else:
                num_pairs += sum(_see(steps, *keys, num_queries=end - begin) for keys in seen_of_run[run])
            run += end == starts[run + 1]
            begin = end
        row = list(_strips_of_row(steps, block_end - block_begin, key_block_size, num_tokens))
        strips += row
        row_starts.append(row_starts[-1] + sum(last - first + 1 for first, last, _ in row))
        visible_pairs.append(num_pairs)
    return BlockStrips(tuple(strips), np.array(row_starts, dtype=np.int64), np.array(visible_pairs, dtype=np.int64))


def _seen_keys(runs: MaskRuns) -> Iterator[tuple[_Interval, ...]]:
    """Yield per run the intervals of keys in its sample that it may attend to; the caller cuts off a causal run's later ones."""
    bounds = list(zip(runs.starts[:-1].tolist(), runs.starts[1:].tolist(), strict=True))
    bits, items = runs.bits.tolist(), runs.item_ids.tolist()
    kinds = [TEXT_BIT if run_bits < 0 else run_bits & MODALITY_BITS for run_bits in bits]
    runs_of_sample: dict[int, list[int]] = defaultdict(list)
    for run, sample in enumerate(runs.sample_ids.tolist()):
        runs_of_sample[sample].append(run)
    for members in runs_of_sample.values():
        seen: dict[tuple[int, int | None], tuple[_Interval, ...]] = {}
        for run in members:
            item = items[run] if bits[run] >= 0 and not bits[run] & ACROSS_ITEMS_BIT else None
            key = (bits[run] & MODALITY_BITS, item)
            if key not in seen:
                visible = (bounds[other] for other in members if kinds[other] & key[0] and item in (None, items[other]))
                seen[key] = tuple(_merge(visible))
            yield seen[key]


def _merge(intervals: Iterable[_Interval]) -> Iterator[_Interval]:
    """Join ascending intervals that touch."""
    open_begin = open_end = -1
    for begin, end in intervals:
        if begin != open_end:
            if open_end >= 0:
                yield open_begin, open_end
            open_begin = begin
        open_end = end
    if open_end >= 0:
        yield open_begin, open_end


def _see(steps: Counter[int], first: int, last: int, *, num_queries: int) -> int:
    """Add keys first .. last - 1, to which so many queries attend; return the number of pairs."""
    if first >= last:
        return 0
    steps[first] += num_queries
    steps[last] -= num_queries
    return num_queries * (last - first)


def _see_causally(steps: Counter[int], seen: tuple[_Interval, ...], *, begin: int, end: int, window: int) -> int:
    """Add the keys that causal tokens begin .. end - 1 of a run attend to; return the number of visible pairs.

    Only "none", "some" and "all" matter, so one query represents all where some of them attend to a key: to the run's own keys,
    and to those that are inside the window of its first queries but not of its last.
    """
    num_queries, num_pairs = end - begin, 0
    seen_by_all = max(end - window, 0)
    for first, last in seen:
        first, last = max(first, begin - window + 1), min(last, begin)
        middle = min(max(first, seen_by_all), last)
        _see(steps, first, middle, num_queries=1)
        _see(steps, middle, last, num_queries=num_queries)
        if first < last:
            num_pairs += _num_attended(last - begin + window, num_queries) - _num_attended(first - begin + window, num_queries)
    whole = begin + (window >= num_queries)  # the run's first key is seen by all of it, unless the window is shorter
    _see(steps, begin, whole, num_queries=num_queries)
    _see(steps, whole, end, num_queries=1)
    shorter = min(num_queries, window)
    return num_pairs + shorter * (shorter + 1) // 2 + (num_queries - shorter) * window


def _num_attended(stop: int, num_queries: int) -> int:
    """Return the sum of min(i, num_queries) for i below `stop`."""
    rising = min(stop, num_queries + 1)
    return rising * (rising - 1) // 2 + (stop - rising) * num_queries


def _strips_of_row(steps: Counter[int], num_queries: int, key_block_size: int, num_tokens: int) -> Iterator[_Strip]:
    """Yield the key blocks that any query of a block attends to; steps: in the number of queries that attend to each key."""
    num_seeing, open_block, num_full_tokens = 0, -1, 0

    def is_open_full() -> bool:
        return num_full_tokens == min(key_block_size, num_tokens - open_block * key_block_size)

    for begin, end in pairwise(sorted(steps)):
        num_seeing += steps[begin]
        if not num_seeing:
            continue
        is_full = num_seeing == num_queries
        first, last = begin // key_block_size, (end - 1) // key_block_size
        if first != open_block:
            if open_block >= 0:
                yield open_block, open_block, is_open_full()
            open_block, num_full_tokens = first, 0
        num_full_tokens += is_full * (min(end, (first + 1) * key_block_size) - begin)
        if first == last:
            continue
        yield open_block, open_block, is_open_full()
        if first + 1 < last:
            yield first + 1, last - 1, is_full
        open_block, num_full_tokens = last, is_full * (end - last * key_block_size)
    if open_block >= 0:
        yield open_block, open_block, is_open_full()
