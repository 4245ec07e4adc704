"""The one rule of what needs what, evaluated for all pieces of a step at once."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from multimodal.values.arrays.routes import RouteEnds
from multimodal.values.arrays.rows import Bools, Integers, group_rows, row_numbers, take_rows
from multimodal.values.model_graph import ModelGraph
from multimodal.values.work.pieces import Pieces, UnitPieces

_Needs = tuple[Integers, Integers]
"""Pieces, and for each of them one piece that it needs."""


def piece_needs(pieces: Pieces, graph: ModelGraph, routes: RouteEnds) -> tuple[Integers, Integers]:
    """Return the pieces that must be complete before each piece may run, as rows (starts, pieces). O(pieces + needs).

    A forward needs the forward of the stage before it; at a unit's first stage, the last-stage forwards of every upstream
    microbatch that routes to it. A backward needs its own forward and the backward of the stage after it; at a unit's last
    stage, the first-stage backwards of every downstream microbatch that it routes to. Reducing a stage's gradients needs all
    its backwards on that replica; where that is done by layer, all pieces but the last begin with the last microbatch's
    backward: they need all others, and what that backward needs. A piece needs the one before it.

    In a split backward the input gradient takes the backward's place, and the weight gradient needs it. Where a microbatch's
    backward is cut into sample subsets, a subset's backward needs the same subset at the stage after it; at the last stage, the
    backward of the one downstream microbatch that the subset routes to.

    Where a place is cut into segments, a forward's first range has the needs of a whole forward, and every other range needs the
    range before it; an action that needs the forward needs its last range. Its backward runs from the last segments to the first:
    the first range to run needs the forward's last range and the gradient from downstream, every other one the range before it.
    An action that needs the backward needs the last range to run, which yields the input gradient.
    """
    found = [needs for unit in pieces.units.values() for needs in _of_computations(unit, pieces, graph, routes)]
    rows = cache(lambda: _rows(found, pieces.num_pieces))
    reductions = [needs for unit in pieces.units.values() for needs in _of_reductions(unit, rows)]
    return _rows([*found, *reductions], pieces.num_pieces) if reductions else rows()


def _rows(found: list[_Needs], num_pieces: int) -> tuple[Integers, Integers]:
    empty = np.zeros(0, np.int64)
    owners, needs = (np.concatenate([empty, *column]) for column in (zip(*found, strict=True) if found else ((), ())))
    return group_rows(owners, needs, num_pieces)


def _of_computations(unit: UnitPieces, pieces: Pieces, graph: ModelGraph, routes: RouteEnds) -> Iterator[_Needs]:
    """Yield the needs of forwards, gradients and weight gradients; those of one piece in their order."""
    if unit.num_gathers:
        stages, microbatches = np.nonzero(unit.trains[:, unit.counted.replica_of_microbatch])
        replicas = unit.counted.replica_of_microbatch[microbatches]
        yield unit.forward[stages, microbatches], unit.collective[stages, replicas]
    yield unit.forward[1:][unit.is_there[1:]], unit.last_forward[:-1][unit.is_there[1:]]
    for source in sorted(graph.upstream(unit.unit)):
        given, taken = routes.of_edge(source, unit.unit)
        in_order = np.argsort(taken, kind="stable")
        yield unit.forward[0][taken[in_order]], pieces.units[source].outputs[given[in_order]]
    found = unit.gradients
    if unit.is_cut:
        # Ranges of segments that do not run first at their place need the range that runs before them.
        first = np.repeat(unit.forward.ravel(), unit.num_forwards.ravel() - 1)
        before: Integers = first + np.arange(len(first)) - np.searchsorted(first, first)
        yield before + 1, before
        later = found.pieces[~found.is_first]
        yield later, later - 1
        found = found.where(found.is_first)
    yield found.pieces, unit.last_forward[found.stages, found.microbatches]
    is_inner = found.stages < unit.last_stages[found.microbatches]
    after, microbatches = found.stages[is_inner] + 1, found.microbatches[is_inner]
    subsets: Integers = np.where(unit.num_subsets[microbatches] > 0, found.parts[is_inner], 0)
    yield found.pieces[is_inner], unit.input_gradient[after, microbatches] + subsets * unit.width[after, microbatches]
    yield _of_consumers(unit, pieces, graph, routes)
    weights = found.last_pieces[found.last_pieces != found.pieces]
    yield weights, weights - 1


def _of_consumers(unit: UnitPieces, pieces: Pieces, graph: ModelGraph, routes: RouteEnds) -> _Needs:
    """Return the gradients that a unit's last stage needs from other units; a sample subset needs those of one consumer."""
    columns = []
    for number, target in enumerate(sorted(graph.downstream(unit.unit))):
        given, taken = routes.of_edge(unit.unit, target)
        counted = pieces.units[target].counted
        place = counted.index_in_replica[taken], counted.replica_of_microbatch[taken], np.full(len(taken), number)
        columns.append((given, pieces.units[target].input_gradient[0][taken], *place))
    empty = np.zeros(0, np.int64)
    given, gradients, indices, replicas, numbers = (
        np.concatenate([empty, *column]) for column in (zip(*columns, strict=True) if columns else ((),) * 5)
    )
    has_backward = unit.width[unit.last_stages[given], given] > 0
    given, gradients, indices, replicas, numbers = (each[has_backward] for each in (given, gradients, indices, replicas, numbers))
    is_cut = unit.num_subsets[given] > 0
    # Consumers of a cut microbatch come by microbatch, then replica, as its subsets do; others by unit, replica, microbatch.
    keys = [np.where(is_cut, first, then) for first, then in ((indices, numbers), (replicas, replicas), (numbers, indices))]
    order = np.lexsort((keys[2], keys[1], keys[0], given))
    given, gradients, is_cut = given[order], gradients[order], is_cut[order]
    index = np.arange(len(given)) - np.searchsorted(given, given)
    last = unit.last_stages[given]
    return unit.backward[last, given] + np.where(is_cut, index * unit.width[last, given], 0), gradients


def _of_reductions(unit: UnitPieces, rows: Callable[[], tuple[Integers, Integers]]) -> Iterator[_Needs]:
    """Yield the needs of reductions: the piece before, and a stage's last gradients; by layer, most begin with the last backward.

    rows: what computations need.
    """
    found, replicas = unit.gradients, unit.counted.replica_of_microbatch[unit.gradients.microbatches]
    owners = unit.collective[found.stages, replicas] + unit.num_gathers
    counts = unit.trains * unit.num_reductions
    num_early = np.where(unit.is_by_layer, counts - 1, 0)[found.stages, replicas]
    is_last = found.is_last if unit.is_cut else np.ones(len(replicas), bool)
    for part in range(int(counts.max(initial=0))):
        later = unit.collective[counts > part] + unit.num_gathers + part if part else np.zeros(0, np.int64)
        yield later, later - 1
        whole = (counts[found.stages, replicas] > part) & (num_early <= part) & is_last
        yield owners[whole] + part, found.last_pieces[whole]
        if (is_early := num_early > part).any():
            yield from _of_early_reductions(unit, rows(), is_early, owners + part)


def _of_early_reductions(
    unit: UnitPieces, rows: tuple[Integers, Integers], is_early: Bools, owners: Integers
) -> Iterator[_Needs]:
    """Yield the needs of reductions that begin with their stage's last backward.

    is_early: the gradients of their stages; owners: the reduction that each belongs to.
    """
    found, replicas = unit.gradients, unit.counted.replica_of_microbatch[unit.gradients.microbatches]
    in_last = is_early & (unit.counted.index_in_replica[found.microbatches] == unit.counted.counts[replicas] - 1)
    ends = np.append((found.microbatches[1:] != found.microbatches[:-1]) | (np.diff(found.stages) != 0), True)
    begins = in_last & np.where(found.num_ranges > 1, found.is_first, ends)
    before = is_early & ~in_last & found.is_last
    yield owners[before], found.last_pieces[before]
    starts, needs = take_rows(*rows, found.pieces[begins])
    yield owners[begins][row_numbers(starts)], needs
    earlier = in_last & ~ends & (found.num_ranges == 1)
    yield owners[earlier], found.last_pieces[earlier]
