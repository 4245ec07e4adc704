"""Who is told of an action's end: the list scheduler's input, from a step's dependencies and a builder's orders."""

from typing import NamedTuple

import numpy as np

from multimodal.kernels import kernels
from multimodal.references.list_schedule import HAS_GRADIENT, IS_FORWARD, IS_GRADIENT
from multimodal.values.arrays.rows import Integers, group_rows, row_numbers
from multimodal.values.work.step_work import Bytes


class Links(NamedTuple):
    """Rows, one for each action: starts, and numbers of actions."""

    follower_starts: Integers
    followers: Integers
    """The actions that wait for it, in the order in which they are told."""
    release_starts: Integers
    releases: Integers
    """The forwards whose activations it no longer needs."""


def link_actions(
    *,
    listed: Integers,
    need_starts: Integers,
    needs: Integers,
    flags: Bytes,
    microbatches: Integers,
    before: Integers,
    after: Integers,
) -> Links:
    """Return the links between some of a step's pieces, which are numbered by their position in `listed`.

    listed: [num_actions] pieces; need_starts, needs: what each piece of the step needs; flags, microbatches: [num_actions];
    before, after: pairs of pieces, the first of which ends before the second begins. Forwards of one stage, whose pieces follow
    each other, go in the order of microbatches. An action that follows a forward and uses its activations releases it.

    Runs as a C++ kernel, with the same result, if the kernels are built. O(pieces + needs).
    """
    run = link_actions_reference if kernels is None else kernels.link_actions
    return Links(*run(listed, need_starts, needs, flags, microbatches, before, after))


def link_actions_reference(
    listed: Integers,
    need_starts: Integers,
    needs: Integers,
    flags: Bytes,
    microbatches: Integers,
    before: Integers,
    after: Integers,
) -> Links:
    """Compute the kernel's result with numpy."""
    position = np.full(len(need_starts) - 1, -1)
    position[listed] = np.arange(len(listed))
    owners = position[row_numbers(need_starts)]
    needed, owners = position[needs[owners >= 0]], owners[owners >= 0]
    # Forwards of one stage go in microbatch order; they have consecutive numbers.
    later = np.flatnonzero((flags & IS_FORWARD > 0) & (microbatches > 0))
    firsts, thens = np.concatenate((needed, position[listed[later] - 1])), np.concatenate((owners, later))
    starts, told = group_rows(thens, np.arange(len(thens)), len(listed))
    firsts, thens = firsts[told], row_numbers(starts)
    before, after = position[before], position[after]
    if min(column.min(initial=0) for column in (firsts, before, after)) < 0:
        raise IndexError("what is waited for is not scheduled")
    of_first, of_then = flags[firsts], flags[thens]
    is_released = (of_first & IS_FORWARD > 0) & ((of_then & IS_GRADIENT > 0) | (of_first & HAS_GRADIENT == 0))
    is_released &= told < len(needed)
    followers = group_rows(np.concatenate((firsts, before)), np.concatenate((thens, after)), len(listed))
    return Links(*followers, *group_rows(thens[is_released], firsts[is_released], len(listed)))
