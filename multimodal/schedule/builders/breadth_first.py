"""Breadth-first: all microbatches through every stage's first layer range, then through its second (Lamy-Poirier, 2022)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.plan import Replica
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StageKey, StepGraph


def build_breadth_first(step: StepGraph) -> Schedule:
    """Build the breadth-first schedule over the unit graph, in the compute dialect (Lamy-Poirier, arXiv 2211.05953).

    Every lane runs all its forwards, then all its backwards, and both round by round: all microbatches through a stage's first
    layer range before any goes through its second, and through what a lane holds of encoders before the LLM's share
    (`pipeline_rounds`); backwards the other way round. So the gradients of late ranges are complete long before the step ends,
    and their reduction hides behind backwards of early ones, as gathering late parameters does behind early forwards
    (`gather-parameters`). The price is the memory of `gpipe`: activations of all microbatches.

    Inside a round, microbatches go in the order in which the LLM takes them, and within one the most advanced action. No
    lane waits for the order's sake: where nothing of a round is ready, the next one begins. With P stages of v ranges and m >= P
    microbatches the bubble is (P - 1) / (v m) of the work, as of interleaved 1F1B. One unit without such ranges runs GPipe.
    """
    order = _BreadthFirst(step)
    return list_schedule(step, Policy(phase=_phase, rank=order.rank))


def _phase(action: Action) -> int:
    return 0 if action.kind is ActionKind.FORWARD else 1


class _BreadthFirst:
    """Ranks actions of one phase."""

    def __init__(self, step: StepGraph) -> None:
        self.rounds = pipeline_rounds(step)
        self.served = served_microbatches(step)
        self.position = {unit: index for index, unit in enumerate(step.graph.unit_names)}
        self.backbone = self.position[step.graph.backbone.name]

    def rank(self, action: Action) -> tuple[int, ...]:
        """Order by most remaining rounds, then by the LLM's microbatch that the action serves, then by progress."""
        first, last = self.served[MicrobatchPlace(action.unit, action.replica, action.microbatch)]
        is_upstream = self.position[action.unit] < self.backbone
        if action.kind is ActionKind.FORWARD:
            rounds_to_come, served = self.rounds.after[action[1:4]], first if is_upstream else last
            return (-rounds_to_come, served, -self.position[action.unit], -action.stage)
        rounds_to_come, served = self.rounds.before[action[1:4]], last if is_upstream else first
        return (-rounds_to_come, served, self.position[action.unit], action.stage)


_ReplicaKey = tuple[str, int]
"""(unit, replica)."""


class PipelineRounds(NamedTuple):
    """Rounds through the lanes, on the longest way that leads through a stage."""

    before: Mapping[StageKey, int]
    """Rounds from the beginning of the graph to the stage, without its own."""
    after: Mapping[StageKey, int]
    """Rounds from the stage to the end of the graph, without its own."""


def pipeline_rounds(step: StepGraph) -> PipelineRounds:
    """Count the rounds of every virtual stage.

    Stages of a unit are one round until one of them comes up a second time; so with ranges dealt in turn, range c of every stage
    is round c. Units are rounds of their own, except where a replica ends in the lanes in which the next one begins, and neither
    has other partners: then these two rounds are one, and a microbatch goes on at once. O(stages + routes).
    """
    graph, plan = step.graph, step.plan
    flows = _Flows(step)
    own = {
        (unit, index): _rounds_of_stages(replica)
        for unit in graph.unit_names
        for index, replica in enumerate(plan.units[unit].replicas)
    }
    num_rounds = {replica: rounds[-1] + 1 for replica, rounds in own.items()}
    before: dict[_ReplicaKey, int] = {}
    after: dict[_ReplicaKey, int] = {}
    for unit in graph.unit_names:
        for target in (replica for replica in own if replica[0] == unit):
            sources = [source for other in graph.upstream(unit) for source in flows.sources[target, other]]
            before[target] = max((before[of] + num_rounds[of] - flows.is_joined(of, target) for of in sources), default=0)
    for unit in reversed(graph.unit_names):
        for source in (replica for replica in own if replica[0] == unit):
            targets = [target for other in graph.downstream(unit) for target in flows.targets[source, other]]
            after[source] = max((after[to] + num_rounds[to] - flows.is_joined(source, to) for to in targets), default=0)
    stages = [(replica, stage, index) for replica, rounds in own.items() for stage, index in enumerate(rounds)]
    return PipelineRounds(
        before={(*replica, stage): before[replica] + index for replica, stage, index in stages},
        after={(*replica, stage): after[replica] + num_rounds[replica] - 1 - index for replica, stage, index in stages},
    )


def _rounds_of_stages(replica: Replica) -> tuple[int, ...]:
    """Per virtual stage its round among its unit's: the next one begins whenever a physical stage comes up again."""
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


class _Flows:
    """The replicas that each replica routes to and from, by replica and the other end's unit."""

    def __init__(self, step: StepGraph) -> None:
        self.plan = step.plan
        self.targets: dict[tuple[_ReplicaKey, str], set[_ReplicaKey]] = defaultdict(set)
        self.sources: dict[tuple[_ReplicaKey, str], set[_ReplicaKey]] = defaultdict(set)
        for routes in step.routes.from_source.values():
            for route in routes:
                source, target = route.source[:2], route.target[:2]
                self.targets[source, target[0]].add(target)
                self.sources[target, source[0]].add(source)

    def is_joined(self, source: _ReplicaKey, target: _ReplicaKey) -> bool:
        """Return True if `target` begins on the lanes where `source` ends, and both route to no other replica of their units."""
        last = self.plan.units[source[0]].num_virtual_stages - 1
        is_alone = self.targets[source, target[0]] == {target} and self.sources[target, source[0]] == {source}
        return is_alone and self.plan.lanes_of_stage(*source, last) == self.plan.lanes_of_stage(*target, 0)


Served = Mapping[MicrobatchPlace, tuple[int, int]]
"""The first and the last of the LLM's microbatches, of any replica, that a microbatch is linked to."""


def served_microbatches(step: StepGraph) -> Served:
    """Follow the routes from every unit to the LLM, or back to it; what no route leads to counts as its own number. O(routes)."""
    graph, routes = step.graph, step.routes
    backbone = graph.unit_names.index(graph.backbone.name)
    served: dict[MicrobatchPlace, tuple[int, int]] = {}
    for unit in graph.unit_names[backbone::-1]:
        for place in _places(unit, step.assignment):
            linked = [route.target for route in routes.from_source.get(place, ())] if unit != graph.backbone.name else []
            served[place] = _span(place, [served[target] for target in linked if target in served])
    for unit in graph.unit_names[backbone + 1 :]:
        for place in _places(unit, step.assignment):
            linked = [route.source for route in routes.to_target.get(place, ())]
            served[place] = _span(place, [served[source] for source in linked if source in served])
    return served


def _places(unit: str, assignment: Assignment) -> list[MicrobatchPlace]:
    replicas = enumerate(assignment.units[unit])
    return [MicrobatchPlace(unit, replica, index) for replica, microbatches in replicas for index in range(len(microbatches))]


def _span(place: MicrobatchPlace, linked: Sequence[tuple[int, int]]) -> tuple[int, int]:
    firsts, lasts = [first for first, _ in linked], [last for _, last in linked]
    return min(firsts, default=place.microbatch), max(lasts, default=place.microbatch)
