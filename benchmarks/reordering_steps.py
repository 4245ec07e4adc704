"""The order of microbatches in Python, step by step: what the C++ kernel of `reorder_microbatches` is held against."""

from collections.abc import Iterable, Sequence

import numpy.typing as npt

from multimodal.balance.algorithms.reorder_microbatches import PipelineStep, pipeline_steps, with_mean

Seconds = Sequence[Sequence[float]]
"""[num_virtual_stages][num_microbatches + 1]: the duration of each microbatch; the last column is for unknown microbatches."""


def step_ends(
    order: Sequence[int], *, steps: Sequence[PipelineStep], num_stages: int, forward: Seconds, backward: Seconds
) -> dict[PipelineStep | None, float]:
    """Return the ends of the `pipeline_steps` of microbatches in this order if the pipeline starts at 0; None ends at 0."""
    free_at = [0.0] * num_stages
    ends: dict[PipelineStep | None, float] = {None: 0.0}
    for step in steps:
        seconds = (forward if step.is_forward else backward)[step.virtual_stage][order[step.position]]
        stage = step.virtual_stage % num_stages
        free_at[stage] = ends[step] = max(free_at[stage], ends[step.needed(len(forward))]) + seconds
    return ends


def pipeline_seconds(
    order: Sequence[int], *, forward_seconds: npt.ArrayLike, backward_seconds: npt.ArrayLike, num_stages: int
) -> float:
    """Return the duration of a pipeline with microbatches in this order; arguments as in `reorder_microbatches`."""
    forward, backward = map(with_mean, (forward_seconds, backward_seconds))
    steps = pipeline_steps(num_stages, len(forward) // num_stages, len(order))
    shape = {"steps": steps, "num_stages": num_stages, "forward": forward.tolist(), "backward": backward.tolist()}
    return max(step_ends(order, **shape).values())


def interval_to_fill(
    order: Sequence[int], *, steps: Sequence[PipelineStep], num_stages: int, forward: Seconds, backward: Seconds
) -> float:
    """Return the time of stage 0 that the forwards of the next microbatch should fill (DistTrain 5.2, GETINTERVAL). O(steps).

    Per chunk: the time from the end of the step before its forward to the moment at which the next backward can start, divided by
    the forwards up to that backward; negative if the backward is ready earlier. If chunks wait for the same backward, the time of
    the later ones starts at the end of the step before that backward. order: of the microbatches before it, at least one; others
    take the time of the last column.
    """
    unknown, total = len(forward[0]) - 1, 0.0
    assumed = [*order, *[unknown] * (unknown - len(order))]
    ends = step_ends(assumed, steps=steps, num_stages=num_stages, forward=forward, backward=backward)
    of_first_stage = [step for step in steps if step.virtual_stage % num_stages == 0]
    reached = 0
    for virtual_stage in range(0, len(forward), num_stages):
        index = after = of_first_stage.index(PipelineStep(True, virtual_stage, len(order)))
        while of_first_stage[after].is_forward:
            after += 1
        free_at = ends[of_first_stage[max(reached, index) - 1]]
        total += (ends[of_first_stage[after].needed(len(forward))] - free_at) / (after - index)
        reached = max(reached, after)
    return total


def fill_intervals(
    steps: Sequence[PipelineStep], *, num_stages: int, forward: Seconds, backward: Seconds, totals: Sequence[float]
) -> list[int]:
    """Return DistTrain's order of microbatches (Alg. 3).

    The smallest microbatch comes first, to reach all stages soon; the next `num_stages` - 1 smallest come last, in descending
    order, because nothing fills the waits for the last backwards. Each position between them gets the microbatch whose forwards
    on stage 0 take the time closest to the wait that they fill (`interval_to_fill`); unlike in the listing, those of the first
    interval are picked one by one. totals: each microbatch's size, the sum of all its seconds.
    """
    by_size = sorted(range(len(totals)), key=totals.__getitem__)
    first, last, pending = by_size[0], by_size[num_stages - 1 : 0 : -1], sorted(by_size[num_stages:])
    first_stage = range(0, len(forward), num_stages)
    order = [first]
    while pending:
        interval = interval_to_fill(order, steps=steps, num_stages=num_stages, forward=forward, backward=backward)
        closest = min(pending, key=lambda index: abs(_sum(forward[stage][index] for stage in first_stage) - interval))
        pending.remove(closest)
        order.append(closest)
    return order + last


def reorder_step_by_step(
    forward_seconds: npt.ArrayLike, *, backward_seconds: npt.ArrayLike, num_stages: int, num_swaps: int
) -> tuple[int, ...]:
    """Return the result of `reorder_microbatches`, which has these arguments."""
    forward, backward = (with_mean(seconds).tolist() for seconds in (forward_seconds, backward_seconds))
    num_microbatches = len(forward[0]) - 1
    steps = pipeline_steps(num_stages, len(forward) // num_stages, num_microbatches)

    def end_of(order: Sequence[int]) -> float:
        return max(step_ends(order, steps=steps, num_stages=num_stages, forward=forward, backward=backward).values())

    given = list(range(num_microbatches))
    totals = [_sum(row[index] for rows in zip(forward, backward, strict=True) for row in rows) for index in given]
    given_end = end_of(given)
    best, best_end = given, given_end
    for order in (
        fill_intervals(steps, num_stages=num_stages, forward=forward, backward=backward, totals=totals),
        sorted(given, key=totals.__getitem__),
        sorted(given, key=totals.__getitem__, reverse=True),
    ):
        if (end := end_of(order)) < best_end:
            best, best_end = order, end
    improved = best.copy()
    for first, then in _swaps(num_microbatches, num_swaps):
        improved[first], improved[then] = improved[then], improved[first]
        if (end := end_of(improved)) <= best_end:
            best_end = end
        else:
            improved[first], improved[then] = improved[then], improved[first]
    return tuple(improved if best_end < given_end else given)


def _swaps(num_microbatches: int, num_swaps: int) -> Sequence[tuple[int, int]]:
    """Return pairs of positions from Knuth's MMIX linear congruential generator, the same on every machine."""
    state, positions = 0, []
    for _ in range(2 * num_swaps):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        positions.append((state >> 33) % num_microbatches)
    return list(zip(positions[::2], positions[1::2], strict=True))


def _sum(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
