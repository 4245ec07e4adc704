"""Costs of a step from a table of published seconds."""

from dataclasses import dataclass

from multimodal.cost.communication import TransferCost
from multimodal.cost.cost_table import CostTable, StageSeconds
from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.values.action import Action, ActionKind, Place, SegmentRange, action_to_text
from multimodal.values.errors import ConfigError


@dataclass(frozen=True)
class TableCosts(ActionCosts):
    """The seconds of a cost table as `StepCosts`; sizes, FLOPs and reductions, which a table does not have, are 0.

    A backward takes its input gradient's seconds plus its weight gradient's. A message takes `send_seconds` and occupies nothing;
    gradients for a stage without a listed backward arrive at once, since no stage would send them.
    """

    table: CostTable
    model_flops: float = 0.0
    peak_flops_per_second: float = 0.0

    def compute(self, action: Action) -> ComputeCost:
        """Seconds of one computation."""
        if isinstance(action.covers, SegmentRange):
            raise ConfigError(
                f"costs of {action_to_text(action)}: a cost table lists seconds of whole stages, not of segments; "
                "describe a cluster instead, or use a --schedule that runs whole stages"
            )
        stage, microbatch = self._stage(action.place), action.microbatch
        if action.kind is ActionKind.FORWARD:
            return ComputeCost(stage.forward[microbatch])
        if action.kind is ActionKind.INPUT_GRADIENT:
            return ComputeCost(stage.input_gradient[microbatch])
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            return ComputeCost(stage.weight_gradient[microbatch])
        return ComputeCost(stage.input_gradient[microbatch] + stage.weight_gradient[microbatch])

    def transfer(self, send: Action) -> TransferCost:
        """Seconds of one message."""
        assert send.peer is not None, f"{send} has no peer"
        is_listed = send.kind is ActionKind.SEND_FORWARD or self._stage(send.peer).has_backward
        return TransferCost(self.table.send_seconds if is_listed else 0.0, 0.0)

    def collective_seconds(self, action: Action) -> float:
        """0: there is one replica per unit."""
        return 0.0

    def activation_bytes(self, place: Place) -> int:
        """0: unknown."""
        return 0

    def static_bytes(self, lane: int) -> int:
        """0: unknown."""
        return 0

    def _stage(self, place: Place) -> StageSeconds:
        return self.table.units[place.unit].stages[place.stage]
