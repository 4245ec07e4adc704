"""What one rank has for all its steps: its stages, its groups, the broker and the clock."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.runtime.communication.broker import Broker
from megatron.runtime.execution.activation_store import storage_identity
from megatron.runtime.execution.step_clock import StepClock
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Place


class RankResources:
    """Holds what outlives a step: this rank's stages, the broker, the clock.

    stages: (unit, virtual stage) -> module; groups: unit -> this rank's groups there (tp, cp and tp_cp); gradients: by unit.
    """

    def __init__(
        self,
        *,
        graph: ModelGraph,
        plan: Plan,
        rank: int,
        stages: Mapping[tuple[str, int], UnitStage],
        groups: Mapping[str, ProcessGroupCollection],
        broker: Broker,
        device: torch.device,
        gradients: Mapping[str, UnitGradients | ShardedUnit],
    ) -> None:
        self.graph, self.plan, self.rank, self.stages, self.device = graph, plan, rank, stages, device
        self.broker, self.gradients, self.lane = broker, gradients, plan.lane_of_rank[rank]
        self.sharded = {
            (name, index): stage
            for name, unit in gradients.items()
            if isinstance(unit, ShardedUnit)
            for index, stage in unit.sharded.items()
        }
        """Those of the stages whose weights are."""
        self._shares_stages = any(
            len(plan.lanes_of_stage(name, index, stage.index)) > 1
            for name, unit in plan.units.items()
            for index, replica in enumerate(unit.replicas)
            for stage in replica.virtual_stages
            if rank in stage.ranks
        )
        self.clock = StepClock(lane=self.lane)
        self.parameter_storages = frozenset(
            storage_identity(parameter) for stage in stages.values() for parameter in stage.parameters()
        )
        self._groups = groups

    def ranks_of(self, place: Place) -> tuple[int, ...]:
        """Ranks of a virtual stage."""
        return self.plan.virtual_stage(place.unit, place.replica, place.stage).ranks

    def any_stage(self, unit: str) -> UnitStage:
        """Some stage of this rank in a unit (they share configuration)."""
        return next(stage for (name, _), stage in self.stages.items() if name == unit)

    def tensor_parallel_group(self, unit: str) -> dist.ProcessGroup:
        """This rank's tensor parallel group in a unit."""
        group: dist.ProcessGroup = self._groups[unit].tp
        return group

    def stage_group(self, unit: str) -> dist.ProcessGroup:
        """All ranks of this rank's stage of a unit: its tensor and context parallel peers."""
        group: dist.ProcessGroup = self._groups[unit].tp_cp
        return group

    def context_parallel_rank(self, unit: str) -> int:
        """Which share of the tokens this rank holds in a unit."""
        rank: int = self._groups[unit].cp.rank()
        return rank
