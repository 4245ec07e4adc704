"""The mapping of a chain of layers to stages and GPUs with the shortest 1F1B step, for many numbers of GPUs at once."""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from multimodal.kernels import kernels
from multimodal.values.arrays.rows import Integers

SLACK = 16
"""Share by which the limit grows if nothing is found."""


class StageTables(NamedTuple):
    """A chain of pieces, and the costs of a stage of pieces [first, end) on a number of GPUs.

    The tables are [num_sizes, num_pieces, num_pieces + 1], by size, first and end.
    """

    forward: Integers
    """Ticks of one microbatch: whole numbers, so that sums do not depend on their order."""
    backward: Integers
    capacities: Integers
    """Microbatches in flight that fit into the memory; 0: not even one. Stages of more pieces have no larger capacity."""
    sizes: Integers
    """Number of GPUs of each size, ascending."""


class StageMapping(NamedTuple):
    """Stages in pipeline order."""

    ticks: int
    """Length of a step."""
    ends: tuple[int, ...]
    """For each stage, the piece after its last one."""
    gpus: tuple[int, ...]


def map_stages(
    tables: StageTables, *, num_gpus: Sequence[int], num_microbatches: Sequence[int]
) -> tuple[StageMapping | None, ...]:
    """Return, for each number of GPUs, the mapping of all pieces to stages on exactly that many with the shortest step.

    A step is that of 1F1B (`step_ticks`), with the given number of microbatches for each number of GPUs; stage s of S keeps S - s
    of them. None if no mapping fits. The result is exact. Suffixes of the pipeline with the same first piece, number of GPUs and
    number of stages differ only in two figures, the ticks of their step and of one microbatch through them, and a step grows with
    both; so a suffix is dropped if another one beats it in both, or if its step with the fastest possible first stages exceeds a
    limit. The limit is the step of a mapping from a search that keeps one suffix of each kind. Runs as a C++ kernel, with the
    same result, if the kernels are built.
    """
    if kernels is None:
        return map_stages_reference(tables, num_gpus=num_gpus, num_microbatches=num_microbatches)
    counts = np.array(num_gpus, np.int64), np.array(num_microbatches, np.int64)
    ticks, *rows = kernels.map_stages(*tables, num_gpus=counts[0], num_microbatches=counts[1])
    ends, gpus = ([tuple(row.tolist()) for row in np.split(values, starts[1:-1])] for starts, values in rows)
    return tuple(StageMapping(*each) if each[0] >= 0 else None for each in zip(ticks.tolist(), ends, gpus, strict=True))


def idle_ticks(through: int, *, behind: int, forward: int, backward: int, num_microbatches: int) -> int:
    """Return the waiting time of a 1F1B stage between its first forward and its last backward; whole numbers in and out.

    through: ticks of one microbatch through the `behind` stages after it, there and back. Before the first microbatch is back,
    the stage runs `behind` more forwards; after the last one has left, as many backwards. The rest of `through` is idle time.
    With too few microbatches for a steady phase both waits are the same, and the longer one counts.
    """
    ahead = min(behind, num_microbatches - 1)
    before, after = max(0, through - ahead * forward), max(0, through - ahead * backward)
    return before + after if behind < num_microbatches - 1 else max(before, after)


def step_ticks(forward: Sequence[int], backward: Sequence[int], *, num_microbatches: int) -> int:
    """Return the ticks of a step of 1F1B: T1 + T2 + T3 of Oobleck 2.4.1.2, but never less than the slowest stage works.

    The path through stage k takes one microbatch through the stages before it, there and back, all microbatches in stage k
    itself, and its idle time (`idle_ticks`); the longest of these paths counts. If later stages are nearly as slow as stage k
    this is the formula of the paper, sum(t) + (N - S + k - 1) t_k + sum(t_k ...); if they are much faster, that formula counts
    less than the work of stage k. forward, backward: of each stage.
    """
    step = through = 0
    for behind, (ahead, back) in enumerate(zip(reversed(forward), reversed(backward), strict=True)):
        idle = idle_ticks(through, behind=behind, forward=ahead, backward=back, num_microbatches=num_microbatches)
        step = max(step + ahead + back, num_microbatches * (ahead + back) + idle)
        through += ahead + back
    return step


def map_stages_reference(
    tables: StageTables, *, num_gpus: Sequence[int], num_microbatches: Sequence[int]
) -> tuple[StageMapping | None, ...]:
    """Compute the kernel's result in Python."""
    mapper = _StageMapper(tables, most_gpus=max(num_gpus, default=0))
    return tuple(mapper.map(*each) for each in zip(num_gpus, num_microbatches, strict=True))


class _Suffix(NamedTuple):
    """The last stages of a pipeline."""

    step: int
    """Ticks of a step of these stages alone."""
    through: int
    """Ticks of one microbatch through them, there and back."""
    rest: "_Suffix | None" = None
    """The suffix without its first stage."""
    end: int = 0
    """The piece after the last one of the suffix's first stage."""
    gpus: int = 0


_State = tuple[int, int]
"""The first piece of a suffix, and its GPUs."""
_NEVER = 2**61


@dataclass(frozen=True)
class _StageMapper:
    tables: StageTables
    most_gpus: int
    _relaxed: dict[tuple[int, bool], dict[_State, int]] = field(default_factory=dict)

    @property
    def num_pieces(self) -> int:
        return len(self.tables.forward[0])

    def map(self, num_gpus: int, num_microbatches: int) -> StageMapping | None:
        everything = self.num_pieces, num_gpus
        slowest, through = (self._relax(_NEVER, is_slowest).get(everything, _NEVER) for is_slowest in (True, False))
        if slowest >= _NEVER or not self._is_possible(num_gpus, num_microbatches):
            return None
        limit, found = max(slowest * num_microbatches, through, 1), None
        while found is None:
            limit += limit // SLACK + 1
            found = self._search(num_gpus, num_microbatches, limit, keeps_all=False)
        return self._search(num_gpus, num_microbatches, found.ticks - 1, keeps_all=True) or found

    def _stages(self, end: int, *, in_flight: int, longest: int) -> list[tuple[int, int, int, int]]:
        """List the stages that may end before a piece: GPUs, first piece, ticks of a forward, of a backward."""
        found = []
        for size, gpus in enumerate(self.tables.sizes.tolist()):
            for first in range(end - 1, -1, -1):
                forward, backward, capacity = (int(table[size, first, end]) for table in self.tables[:3])
                if capacity < in_flight or forward + backward > longest:
                    break
                found.append((gpus, first, forward, backward))
        return found

    def _relax(self, longest: int, is_slowest: bool) -> dict[_State, int]:
        """Return the ticks of one microbatch through the best first stages, or in the slowest of them, by pieces and GPUs.

        No stage takes longer than `longest`; memory limits on microbatches in flight are ignored.
        """
        if (longest, is_slowest) in self._relaxed:
            return self._relaxed[longest, is_slowest]
        best: dict[_State, int] = {(0, 0): 0}
        for end in range(1, self.num_pieces + 1):
            for gpus, first, forward, backward in self._stages(end, in_flight=1, longest=longest):
                for used in range(gpus, self.most_gpus + 1):
                    before = best.get((first, used - gpus))
                    if before is not None:
                        ticks = max(before, forward + backward) if is_slowest else before + forward + backward
                        best[end, used] = min(best.get((end, used), _NEVER), ticks)
        self._relaxed[longest, is_slowest] = best
        return best

    def _is_possible(self, num_gpus: int, num_microbatches: int) -> bool:
        """Return True if some mapping fits the memory."""
        held: set[_State] = {(self.num_pieces, 0)}
        for behind in range(self.num_pieces):
            in_flight = min(behind + 1, num_microbatches)
            held = {
                (first, used + gpus)
                for end, used in held
                for gpus, first, _, _ in self._stages(end, in_flight=in_flight, longest=_NEVER)
                if used + gpus <= num_gpus
            }
            if (0, num_gpus) in held:
                return True
        return False

    def _search(self, num_gpus: int, num_microbatches: int, limit: int, *, keeps_all: bool) -> StageMapping | None:
        """Return the best mapping whose step takes at most `limit`.

        Of suffixes with the same number of stages, first piece and GPUs, all are kept that no other beats, or only the one with
        the shortest step. A row of suffixes is in ascending order of steps, and so in descending order of `through`.
        """
        longest = limit // num_microbatches
        rest = self._relax(longest, False)
        kept: dict[_State, list[_Suffix]] = {(self.num_pieces, 0): [_Suffix(0, 0)]}
        best: _Suffix | None = None
        behind = 0
        while kept:
            added: dict[_State, list[_Suffix]] = {}
            for (end, used), suffixes in kept.items():
                for gpus, first, *stage in self._stages(end, in_flight=min(behind + 1, num_microbatches), longest=longest):
                    before = rest.get((first, num_gpus - used - gpus))
                    if before is None:
                        continue
                    for step, suffix in _in_front(suffixes, *stage, behind=behind, num_microbatches=num_microbatches):
                        if suffix.step + sum(stage) + before > limit:
                            break
                        longer = _Suffix(step, suffix.through + sum(stage), suffix, end, gpus)
                        if step + before > limit:
                            continue
                        if first == 0:
                            best, limit = longer, step - 1
                        else:
                            _keep(added.setdefault((first, used + gpus), []), longer, keeps_all=keeps_all)
            kept, behind = added, behind + 1
        return None if best is None else _trace(best)


def _in_front(
    suffixes: Sequence[_Suffix], forward: int, backward: int, *, behind: int, num_microbatches: int
) -> Iterator[tuple[int, _Suffix]]:
    """Yield the ticks of a step with one more stage in front of each suffix.

    If the new stage determines the step, the last such suffix beats those before it, which are left out.
    """
    ticks = forward + backward
    idle = partial(idle_ticks, behind=behind, forward=forward, backward=backward, num_microbatches=num_microbatches)
    own = [num_microbatches * ticks + idle(suffix.through) for suffix in suffixes]
    chosen = 0
    while chosen + 1 < len(suffixes) and own[chosen + 1] >= suffixes[chosen + 1].step + ticks:
        chosen += 1
    for seconds, suffix in zip(own[chosen:], suffixes[chosen:], strict=True):
        yield max(suffix.step + ticks, seconds), suffix


def _keep(row: list[_Suffix], suffix: _Suffix, *, keeps_all: bool) -> None:
    """Add a suffix to a row, unless another one beats it, and drop those that it beats."""
    if not keeps_all and row:
        row[:] = [min(row[0], suffix, key=lambda each: each.step)]
    elif not any(other.step <= suffix.step and other.through <= suffix.through for other in row):
        row[:] = [other for other in row if other.step < suffix.step or other.through < suffix.through]
        insort(row, suffix, key=lambda each: each.step)


def _trace(suffix: _Suffix) -> StageMapping:
    step, ends, gpus = suffix.step, [], []
    while suffix.rest is not None:
        ends.append(suffix.end)
        gpus.append(suffix.gpus)
        suffix = suffix.rest
    return StageMapping(step, tuple(ends), tuple(gpus))
