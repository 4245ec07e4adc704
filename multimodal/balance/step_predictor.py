"""How long a step would take under an assignment, for a plan and a schedule: what balancing is for."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import Builder
from multimodal.schedule.passes import Pass
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.schedule import Action, ActionKind

MOST_SIMULATED_COMPUTATIONS = 20_000
"""Forwards and backwards of a step, over all lanes, up to which it is simulated: about a second."""


@dataclass(frozen=True)
class StepPredictor:
    """Predicts steps of one plan under one schedule; deterministic, as all ranks must choose alike."""

    graph: ModelGraph
    plan: Plan
    builder: Builder
    passes: Sequence[Pass]
    cluster: Cluster
    vocab_size: int

    def seconds(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> float:
        """Seconds of a step: simulated, or where that would take long, at least. Raises ScheduleError."""
        num_computations = sum(
            2 * sum(map(len, replicas)) * self.plan.units[unit].num_virtual_stages for unit, replicas in assignment.units.items()
        )
        if num_computations > MOST_SIMULATED_COMPUTATIONS:
            return self.seconds_at_least(assignment, lengths)
        schedule = build_schedule(self.builder, self.graph, self.plan, assignment, passes=self.passes, validates=False)
        return simulate_schedule(
            schedule, graph=self.graph, plan=self.plan, assignment=assignment, costs=self._costs(assignment, lengths)
        ).iteration_seconds

    def seconds_at_least(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> float:
        """What no schedule can be faster than: the computations of the busiest lane. O(microbatches x stages)."""
        costs = self._costs(assignment, lengths)
        work_of_lane: dict[int, float] = defaultdict(float)
        for unit, replicas in assignment.units.items():
            for replica, microbatches in enumerate(replicas):
                for stage in range(self.plan.units[unit].num_virtual_stages):
                    has_backward = stage_backward_need(self.graph, self.plan, unit, replica, stage).has_backward
                    kinds = (ActionKind.FORWARD, *((ActionKind.BACKWARD,) if has_backward else ()))
                    work = sum(
                        costs.compute(Action(kind, unit, replica, stage, microbatch)).seconds
                        for microbatch in range(len(microbatches))
                        for kind in kinds
                    )
                    for lane in self.plan.lanes_of_stage(unit, replica, stage):
                        work_of_lane[lane] += work
        return max(work_of_lane.values(), default=0.0)

    def _costs(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> ModelCosts:
        return ModelCosts(self.graph, self.plan, assignment, lengths, self.cluster, self.vocab_size)
