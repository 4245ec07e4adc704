"""How long a step would take under an assignment, for a plan and a schedule: what balancing is for."""

from collections.abc import Sequence
from dataclasses import dataclass

from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.step_costs import ComputeCost
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

    def __call__(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> float:
        """Seconds of a step: simulated, or where that would take long, estimated. Raises ScheduleError."""
        costs = ModelCosts(self.graph, self.plan, assignment, lengths, self.cluster, self.vocab_size)
        num_computations = sum(
            2 * sum(map(len, replicas)) * self.plan.units[unit].num_virtual_stages for unit, replicas in assignment.units.items()
        )
        if num_computations > MOST_SIMULATED_COMPUTATIONS:
            return self._estimate(assignment, costs)
        schedule = build_schedule(self.builder, self.graph, self.plan, assignment, passes=self.passes)
        return simulate_schedule(schedule, graph=self.graph, plan=self.plan, assignment=assignment, costs=costs).iteration_seconds

    def _estimate(self, assignment: Assignment, costs: ModelCosts) -> float:
        """The busiest stage's computations, or the longest way of one microbatch through its unit where that is more."""
        slowest = 0.0
        for unit, replicas in assignment.units.items():
            num_stages = self.plan.units[unit].num_virtual_stages
            for replica, microbatches in enumerate(replicas):
                work_of_stage = [0.0] * len(self.plan.units[unit].replicas[replica].stages)
                for microbatch in range(len(microbatches)):
                    seconds = [self._seconds(costs, unit, replica, stage, microbatch) for stage in range(num_stages)]
                    for stage, amount in enumerate(seconds):
                        work_of_stage[self.plan.virtual_stage(unit, replica, stage).stage_index] += amount
                    slowest = max(slowest, sum(seconds))
                slowest = max(slowest, *work_of_stage)
        return slowest

    def _seconds(self, costs: ModelCosts, unit: str, replica: int, stage: int, microbatch: int) -> float:
        has_backward = stage_backward_need(self.graph, self.plan, unit, replica, stage).has_backward
        kinds = (ActionKind.FORWARD, *((ActionKind.BACKWARD,) if has_backward else ()))
        found: list[ComputeCost] = [costs.compute(Action(kind, unit, replica, stage, microbatch)) for kind in kinds]
        return sum(cost.seconds for cost in found)
