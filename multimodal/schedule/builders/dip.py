"""DIP: colocated units one after another: encoder forwards, then the LLM, then encoder backwards (Entrain, figure 4.2c)."""

from collections.abc import Callable, Mapping

from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StepGraph

PHASES = 3
"""Phases of a round: encoder forwards; the LLM and the generators; encoder backwards."""


def build_dip(step: StepGraph, *, num_rounds: int = 1) -> Schedule:
    """Build the DIP schedule, in the compute dialect.

    Every lane ends the forwards of all encoders in it, then runs the 1F1B of the LLM (and of what follows it), then the encoders'
    backwards. Modalities never wait for each other inside a phase, but all of an encoder's activations are kept over the LLM's
    phase. Meant for plans whose encoders share the LLM's lanes; an encoder on lanes of its own just runs as in GPipe.

    num_rounds: rounds into which the step is cut by the LLM's microbatches, each with the three phases; so an encoder keeps the
    activations of one round. OrchMLLM's iterations, which are a mini-batch each, are such rounds with gradients accumulated.
    Raises ScheduleError for less than one.
    """
    if num_rounds < 1:
        raise ScheduleError(f"dip: num_rounds must be at least 1, found {num_rounds}")
    encoders = frozenset(unit.name for unit in step.graph.encoders)
    limits = forward_limits(step)
    limits = {stage: limit for stage, limit in limits.items() if stage[0] not in encoders}
    phase = _phases(step, num_rounds=num_rounds)
    return list_schedule(step, Policy(forward_limits=limits, forward_floors=forward_floors(step.plan, limits), phase=phase))


def _phases(step: StepGraph, *, num_rounds: int) -> Callable[[Action], int]:
    """Return the phase of every computation.

    Microbatch k of the LLM belongs to round floor(k rounds / K) with K the most of any replica. Units upstream run forwards in
    the first round, and backwards in the last one, that they have a part in; units downstream once their sources are there.
    """
    graph, routes, places = step.graph, step.routes, step.microbatches
    count = max(map(len, step.assignment.units[graph.backbone.name]), default=1)
    forward: dict[MicrobatchPlace, int] = {}
    backward: dict[MicrobatchPlace, int] = {}
    own = {place: PHASES * (place.microbatch * num_rounds // count) + 1 for place in places if place.unit == graph.backbone.name}
    sources: Mapping[MicrobatchPlace, list[MicrobatchPlace]] = {place: [] for place in places}
    targets: Mapping[MicrobatchPlace, list[MicrobatchPlace]] = {place: [] for place in places}
    for place in places:
        for route in routes.from_source.get(place, ()):
            targets[place].append(route.target)
            sources[route.target].append(place)
    encoders = {unit.name for unit in graph.encoders}
    for place in places:  # upstream units stand first; a unit's forwards go in the order of its microbatches
        if place.unit not in encoders:
            before = (place._replace(microbatch=place.microbatch - 1),) if place.microbatch else ()
            earlier = (*before, *(source for source in sources[place] if source in own))
            forward[place] = max([own.get(place, 1), *(forward[each] for each in earlier)])
    for place in reversed(places):
        if place.unit not in encoders:
            backward[place] = max([forward[place], *(backward[target] for target in targets[place])])
    last = PHASES * num_rounds - 1
    for place in reversed(places):
        if place.unit in encoders:
            after = forward.get(place._replace(microbatch=place.microbatch + 1), last)
            forward[place] = min([after, *(forward[target] - 1 for target in targets[place])])
            backward[place] = max((backward[target] for target in targets[place]), default=last - 1) + 1

    def phase(action: Action) -> int:
        phases = forward if action.kind is ActionKind.FORWARD else backward
        return phases[MicrobatchPlace(action.unit, action.replica, action.microbatch)]

    return phase
