"""GPipe, and breadth-first: all microbatches pass every stage's first layer range, then its second (Lamy-Poirier, 2022)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from multimodal.schedule.list_schedule import Policy, forwards_first, list_schedule
from multimodal.values.arrays.rows import Integers, integers
from multimodal.values.parts.cuts import ReplicaKey, StageKey
from multimodal.values.plan import Replica
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import FORWARD, StepWork


def build_gpipe(shape: StepShape) -> Schedule:
    """Build the GPipe schedule, in the compute dialect: every lane runs all its forwards, then all its backwards.

    The simplest schedule and the baseline of all: it keeps the activations of every microbatch at once.
    """
    return list_schedule(shape, Policy(phase=forwards_first))


def build_breadth_first(shape: StepShape) -> Schedule:
    """Build the breadth-first schedule over the unit graph, in the compute dialect (Lamy-Poirier, arXiv 2211.05953).

    Every lane runs all its forwards, then all its backwards, and both in rounds: all microbatches pass a stage's first layer
    range before any passes its second, and a lane's encoders before its share of the LLM (`pipeline_rounds`); backwards run in
    the reverse order of rounds. So the gradients of late ranges are complete long before the step ends, and their reduction hides
    behind backwards of early ranges; likewise gathering late parameters hides behind early forwards (`gather-parameters`). The
    price is the memory of `gpipe`: activations of all microbatches.

    Inside a round, microbatches go in the LLM's order, and within a microbatch the most advanced action goes first. A lane never
    waits only to keep this order: if nothing of a round is ready, the next round begins. With P stages of v ranges and m >= P
    microbatches the bubble is (P - 1) / (v m) of the work, as in interleaved 1F1B. One unit without such ranges runs GPipe.
    """
    return list_schedule(shape, Policy(phase=forwards_first, rank=partial(_rank, shape=shape)))


def _rank(work: StepWork, *, shape: StepShape) -> tuple[Integers, ...]:
    """Order by most remaining rounds, then by the LLM's microbatch that the action serves, then by progress."""
    (before, after), served = pipeline_rounds(shape), served_microbatches(shape)
    # The first and the last of the LLM's microbatches that each piece's microbatch is linked to.
    first, last = (work.pieces.of_microbatches({unit: ends[end] for unit, ends in served.items()}) for end in (0, 1))
    unit = work.pieces.unit_of_stage[work.computed_stages]
    stage = work.pieces.index_of_stage[work.computed_stages]
    is_forward = work.kinds == FORWARD
    is_upstream = unit < shape.graph.unit_names.index(shape.graph.backbone.name)
    of_rounds = np.where(
        is_forward, *(integers(rounds.get(key, 0) for key in work.stages)[work.computed_stages] for rounds in (after, before))
    )
    serves, progress = np.where(is_forward == is_upstream, first, last), np.where(is_forward, -1, 1)
    return -of_rounds, serves, progress * unit, progress * stage


def pipeline_rounds(shape: StepShape) -> tuple[Mapping[StageKey, int], Mapping[StageKey, int]]:
    """Count the rounds before every virtual stage and behind it, along the longest path through it and without its own.

    Consecutive stages of a unit form one round until a physical stage comes up a second time; so with ranges dealt in turn, range
    c of every stage is round c. Different units are different rounds, unless a replica ends in the lanes in which the next one
    begins and neither has other partners: then the two rounds are one, as a microbatch goes on at once. O(stages + routes).
    """
    plan, units = shape.plan, shape.graph.unit_names
    own = {(unit, index): _rounds_of_stages(each) for unit in units for index, each in enumerate(plan.units[unit].replicas)}
    num_rounds = {replica: rounds[-1] + 1 for replica, rounds in own.items()}
    routes = shape.linked_replicas
    partners = Counter(end for source, target in routes for end in ((source, target[0]), (target, source[0])))

    def joins(source: ReplicaKey, target: ReplicaKey) -> bool:
        """Return True if `target` begins on the lanes where `source` ends, and both route to no other replica of their units."""
        last = plan.units[source[0]].num_stages_of(source[1]) - 1
        is_alone = partners[source, target[0]] == partners[target, source[0]] == 1
        return is_alone and plan.lanes_of_stage(*source, last) == plan.lanes_of_stage(*target, 0)

    before, after = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
    for source, target in sorted(routes, key=lambda route: units.index(route[0][0])):
        before[target] = max(before[target], before[source] + num_rounds[source] - joins(source, target))
    for source, target in sorted(routes, key=lambda route: -units.index(route[1][0])):
        after[source] = max(after[source], after[target] + num_rounds[target] - joins(source, target))
    stages = [(replica, stage, index) for replica, rounds in own.items() for stage, index in enumerate(rounds)]
    return (
        {(*replica, stage): before[replica] + index for replica, stage, index in stages},
        {(*replica, stage): after[replica] + num_rounds[replica] - 1 - index for replica, stage, index in stages},
    )


def _rounds_of_stages(replica: Replica) -> tuple[int, ...]:
    """Return each virtual stage's round within its unit: a new round begins whenever a physical stage comes up again."""
    rounds: list[int] = []
    seen: set[int] = set()
    for stage in replica.virtual_stages:
        if stage.stage_index in seen:
            seen.clear()
            rounds.append(rounds[-1] + 1)
        else:
            rounds.append(rounds[-1] if rounds else 0)
        seen.add(stage.stage_index)
    return tuple(rounds)


Served = Mapping[str, tuple[Integers, Integers]]
"""unit -> the first and the last of the LLM's microbatches, of any replica, that each of its microbatches is linked to."""


def served_microbatches(shape: StepShape) -> Served:
    """Follow the routes between every unit and the LLM; microbatches without routes count as their own number. O(routes)."""
    graph, backbone = shape.graph, shape.graph.backbone.name
    position = graph.unit_names.index(backbone)
    served: dict[str, tuple[Integers, Integers]] = {}
    for unit in graph.unit_names[position::-1]:
        others = graph.downstream(unit) if unit != backbone else ()
        routes = [(served[other], *shape.routes.of_edge(unit, other)) for other in others if other in served]
        served[unit] = _span(shape, unit, routes)
    for unit in graph.unit_names[position + 1 :]:
        routes = [(served[other], *shape.routes.of_edge(other, unit)[::-1]) for other in graph.upstream(unit)]
        served[unit] = _span(shape, unit, routes)
    return served


def _span(
    shape: StepShape, unit: str, linked: Sequence[tuple[tuple[Integers, Integers], Integers, Integers]]
) -> tuple[Integers, Integers]:
    """Return a unit's span; linked: spans of other units, and the two ends of routes, this unit's and the other unit's."""
    own = shape.counts[unit].index_in_replica
    firsts, lasts = np.full(len(own), np.iinfo(np.int64).max), np.full(len(own), -1)
    for (first, last), here, there in linked:
        np.minimum.at(firsts, here, first[there])
        np.maximum.at(lasts, here, last[there])
    return np.where(lasts < 0, own, firsts), np.where(lasts < 0, own, lasts)
