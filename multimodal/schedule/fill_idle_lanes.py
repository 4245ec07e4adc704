"""Fit work into the idle time of lanes that run other work in a given order, on a clock of real durations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.kernels import kernels
from multimodal.schedule.fill_idle_lanes_reference import fill_idle_lanes_reference
from multimodal.values.step_work import Bytes, Integers


class FilledLanes(NamedTuple):
    """The result of `fill_idle_lanes`."""

    order: Integers
    """[num_pieces] all pieces, by their start; those inside a piece right before it."""
    carriers: Integers
    """[num_pieces] the piece inside of which each runs; -1: none."""
    waits: Integers
    """[num_pieces] the wait of that piece."""
    end: int
    """The moment at which the last one ends."""


@dataclass(frozen=True)
class LanesToFill:
    """Pieces of work, numbered; rows are starts into a flat array, times whole numbers of one unit."""

    durations: Integers
    """[num_pieces]."""
    lane_starts: Integers
    lanes: Integers
    """Per piece: it runs in all of them at once."""
    need_starts: Integers
    needs: Integers
    """Per piece."""
    delays: Integers
    """Per need: from the end of what is needed to its arrival."""
    line_starts: Integers
    line: Integers
    """Per lane: the pieces that keep this order."""
    queue_starts: Integers
    queues: Integers
    """The pieces that fill; those of one queue keep its order."""
    holders: Integers
    releases: Integers
    """Per piece that fills: the holder that keeps one more, and one less, from its start on; -1: none."""
    limits: Integers
    """Per holder: the most that it keeps at a time."""
    wait_starts: Integers
    waits: Integers
    """Per piece that keeps its order: times in which it only waits, one after another."""
    goes_inside: Bytes
    """[num_pieces] 1 for pieces that may run in such times of a piece in all their lanes; 2 for those that end with a collective,
    which starts when that time is over: what needs them may run in a later one. All pieces of a queue have the same lanes."""
    behind: Integers
    """[num_pieces] the part of their durations that is this collective."""

    def fill(self, *, tolerances: Sequence[int]) -> FilledLanes:
        """Run all pieces, each lane's own in their order and the filling ones where they fit; with the best of some tolerances.

        That is the first of those with which all is over first.

        A piece starts when its needs have arrived and all its lanes are free. At every moment the ready piece with the longest
        tail goes first: the longest way from its start to the end of all, over needs and orders. A filler goes before the next
        piece of a lane's order if its tail is longer, or if it fits: all but the tolerance (percent) of it is over by the time at
        which that piece could start; but not while its holder is full. Where nothing runs and nothing fits, the filler with the
        longest tail goes on, and one whose holder is full only if there is no other.

        When a piece that keeps its order begins, ready fillers of its lanes go into its waits as far as these are long, with the
        same tolerance; the piece gets longer by what sticks out, and by what collectives behind a wait take beyond the interval
        that is computed there. What they need is there, or runs before them inside the same piece; what they give is there when
        that piece ends.
        O(tolerances x pieces x (lanes + queues)).
        """
        run = fill_idle_lanes_reference if kernels is None else kernels.fill_idle_lanes
        return FilledLanes(*run(**vars(self), tolerances=np.array(tolerances, np.int64)))
