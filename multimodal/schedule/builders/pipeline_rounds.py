"""How often a microbatch comes back to lanes where it has been, before a stage and after it."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from multimodal.schedule.list_schedule import StageKey
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica

_ReplicaKey = tuple[str, int]
"""(unit, replica)."""


class PipelineRounds(NamedTuple):
    """Rounds through the lanes, on the longest way that leads through a stage."""

    before: Mapping[StageKey, int]
    """From the beginning of the graph to the stage, not counting its own."""
    after: Mapping[StageKey, int]
    """From the stage to the end of the graph, not counting its own."""


def pipeline_rounds(graph: ModelGraph, plan: Plan, assignment: Assignment) -> PipelineRounds:
    """Count the rounds of every virtual stage.

    Stages of a unit are one round until one of them comes up a second time; so with ranges dealt in turn, range c of every stage
    is round c. Units are rounds of their own, except where a replica ends in the lanes in which the next one begins, and neither
    has other partners: then these two rounds are one, and a microbatch goes on at once. O(stages + routes).
    """
    flows = _Flows(graph, plan, assignment)
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
    """Which replicas route to which, by replica and the other end's unit."""

    def __init__(self, graph: ModelGraph, plan: Plan, assignment: Assignment) -> None:
        self.plan = plan
        self.targets: dict[tuple[_ReplicaKey, str], set[_ReplicaKey]] = defaultdict(set)
        self.sources: dict[tuple[_ReplicaKey, str], set[_ReplicaKey]] = defaultdict(set)
        for routes in assignment.routes(graph).from_source.values():
            for route in routes:
                source, target = route.source[:2], route.target[:2]
                self.targets[source, target[0]].add(target)
                self.sources[target, source[0]].add(source)

    def is_joined(self, source: _ReplicaKey, target: _ReplicaKey) -> bool:
        """Whether one begins where the other ends, and neither has anything to do with other replicas of the other's unit."""
        last = self.plan.units[source[0]].num_virtual_stages - 1
        is_alone = self.targets[source, target[0]] == {target} and self.sources[target, source[0]] == {source}
        return is_alone and self.plan.lanes_of_stage(*source, last) == self.plan.lanes_of_stage(*target, 0)
