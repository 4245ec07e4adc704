"""Fits work into the idle time of lanes that run other work in a given order, on a clock of real durations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.kernels import kernels
from multimodal.references.fill_idle_lanes import fill_idle_lanes as reference
from multimodal.values.arrays.rows import Bytes, Integers


class FilledLanes(NamedTuple):
    """The result of `fill_idle_lanes`."""

    order: Integers
    """[num_pieces] all pieces, by their start; pieces inside another one come right before it."""
    carriers: Integers
    """[num_pieces] the piece inside which each piece runs; -1: none."""
    waits: Integers
    """[num_pieces] the index of that piece's wait."""
    end: int
    """The time at which the last piece ends."""


@dataclass(frozen=True)
class LanesToFill:
    """Pieces of work, numbered. Rows are starts into a flat array; times are whole numbers of one unit."""

    durations: Integers
    """[num_pieces]."""
    lane_starts: Integers
    lanes: Integers
    """Per piece: its lanes, in all of which it runs at once."""
    need_starts: Integers
    needs: Integers
    """Per piece: the pieces that it needs."""
    delays: Integers
    """Per need: time from the end of the needed piece to the arrival of its result."""
    line_starts: Integers
    line: Integers
    """Per lane: the pieces that keep this order."""
    queue_starts: Integers
    queues: Integers
    """Per queue: pieces that fill, in the order that they keep."""
    holders: Integers
    releases: Integers
    """Per piece that fills: the holder that keeps one microbatch more, and that of one less, from its start; -1: none."""
    limits: Integers
    """Per holder: the most microbatches that it keeps at a time."""
    wait_starts: Integers
    waits: Integers
    """Per piece that keeps its order: the durations of its waits, in sequence."""
    goes_inside: Bytes
    """[num_pieces] 1 for pieces that may run inside a wait of a piece in all their lanes; 2 for those that also end with a
    collective, which starts when that wait is over: pieces that need them may run in a later wait. All pieces of a queue have the
    same lanes."""
    behind: Integers
    """[num_pieces] the part of their durations that this collective takes."""

    def fill(self, *, tolerances: Sequence[int]) -> FilledLanes:
        """Run all pieces: each lane's own in order, and the filling ones where they fit; return the best of the tolerances.

        That is the one that ends first; of equal ones, the first. tolerances: percentages, ascending; the kernel stops at one for
        which nothing was too long, since larger ones change nothing then.

        A piece starts when its needs have arrived and all its lanes are free. At every moment the ready piece with the longest
        tail goes first: the longest path from its start to the end of all work, over needs and orders. A filler goes before the
        next piece of a lane's order if its tail is longer, or if it fits: all of it but the tolerance (percent) is over by the
        time at which that piece could start; but never while its holder is full. If nothing runs and nothing fits, the filler
        with the longest tail runs; one whose holder is full only if there is no other.

        When a piece that keeps its order begins, ready fillers of its lanes go into its waits as far as these are long, with the
        same tolerance; the piece gets longer by the excess of the fillers, and by the time for which collectives behind a wait
        outlast the interval that is computed there. The needs of such fillers are met, or run before them inside the same piece;
        their results are available when that piece ends. O(tolerances x pieces x (lanes + queues)).
        """
        run = reference if kernels is None else kernels.fill_idle_lanes
        return FilledLanes(*run(**vars(self), tolerances=np.array(tolerances, np.int64)))
