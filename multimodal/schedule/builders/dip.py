"""DIP: colocated units one after another: encoder forwards, then the LLM, then encoder backwards (Entrain, figure 4.2c)."""

from functools import partial

import numpy as np

from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.arrays.microbatches import MicrobatchCounts
from multimodal.values.arrays.routes import RouteEnds
from multimodal.values.arrays.rows import Integers
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import FORWARD, StepWork

PHASES = 3
"""Phases of a round: encoder forwards; the LLM and the generators; encoder backwards."""


def build_dip(shape: StepShape, *, num_rounds: int = 1) -> Schedule:
    """Build the DIP schedule, in the compute dialect.

    Every lane finishes the forwards of all its encoders, then runs the 1F1B of the LLM (and of the units behind it), then the
    encoders' backwards. Modalities never wait for each other inside a phase, but all activations of an encoder are kept during
    the LLM's phase. Meant for plans whose encoders share the LLM's lanes; an encoder on lanes of its own runs as in GPipe.

    num_rounds: rounds into which the step is cut by the LLM's microbatches, each with the three phases; an encoder then keeps the
    activations of one round only, at least 1. OrchMLLM's iterations (of one mini-batch) are such rounds, accumulated.
    """
    encoders = frozenset(unit.name for unit in shape.graph.encoders)
    limits = forward_limits(shape)
    limits = {stage: limit for stage, limit in limits.items() if stage[0] not in encoders}
    phase = partial(_phases, routes=shape.routes, num_rounds=num_rounds)
    return list_schedule(shape, Policy(forward_limits=limits, forward_floors=forward_floors(shape.plan, limits), phase=phase))


def _phases(work: StepWork, *, routes: RouteEnds, num_rounds: int) -> Integers:
    """Return the phase of every computation, [num_computed].

    Microbatch k of the LLM belongs to round floor(k rounds / K), with K the most microbatches of any replica. An upstream
    microbatch runs its forward in the first round that uses it, and its backward in the last; downstream units run once their
    sources are done.
    """
    graph, units = work.graph, work.pieces.units
    encoders, backbone = {unit.name for unit in graph.encoders}, graph.backbone.name
    of_llm = units[backbone].counted
    count = int(of_llm.counts.max(initial=1))
    own = PHASES * (of_llm.index_in_replica * num_rounds // count) + 1
    forward: dict[str, Integers] = {}
    backward: dict[str, Integers] = {}
    others = [unit for unit in graph.unit_names if unit not in encoders]
    for unit in others:  # upstream units stand first; a unit's forwards go in the order of its microbatches
        phases = own.copy() if unit == backbone else np.ones(units[unit].counted.num_microbatches, np.int64)
        if unit != backbone:
            given, taken = routes.of_edge(backbone, unit)
            np.maximum.at(phases, taken, forward[backbone][given])
        forward[unit] = _rising(phases, units[unit].counted)
    for unit in reversed(others):
        backward[unit] = forward[unit].copy()
        for target in graph.downstream(unit):
            given, taken = routes.of_edge(unit, target)
            np.maximum.at(backward[unit], given, backward[target][taken])
    last = PHASES * num_rounds - 1
    for unit in (unit for unit in reversed(graph.unit_names) if unit in encoders):
        num_microbatches = units[unit].counted.num_microbatches
        before, after = np.full(num_microbatches, last), np.full(num_microbatches, -1)
        for target in graph.downstream(unit):
            given, taken = routes.of_edge(unit, target)
            np.minimum.at(before, given, forward[target][taken] - 1)
            np.maximum.at(after, given, backward[target][taken])
        forward[unit] = -_rising(-before[::-1], units[unit].counted, is_reversed=True)[::-1]
        backward[unit] = np.where(after < 0, last - 1, after) + 1
    of_pieces = map(work.pieces.of_microbatches, (forward, backward))
    return np.where(work.kinds == FORWARD, *of_pieces).astype(np.int64)


def _rising(phases: Integers, counted: MicrobatchCounts, *, is_reversed: bool = False) -> Integers:
    """Return the running maximum of the phases of each replica's microbatches; is_reversed: from the last to the first."""
    replicas = counted.replica_of_microbatch
    apart = (counted.num_replicas - replicas[::-1] if is_reversed else replicas) * (1 + 2 * int(np.abs(phases).max(initial=0)))
    return np.maximum.accumulate(phases + apart) - apart
