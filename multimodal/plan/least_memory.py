"""The bytes that a rank certainly needs under a plan and a schedule, without simulating a step."""

from typing import NamedTuple

import numpy as np

from multimodal.cost.step_memory import StepMemory
from multimodal.schedule.builders import ScheduleRow


class LeastMemory(NamedTuple):
    """Bytes of one rank."""

    state_bytes: float
    """Weights, gradients and optimizer state, with the work on one layer and messages."""
    activation_bytes: float
    """Activations of the microbatches that are in flight together under every schedule."""

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.state_bytes + self.activation_bytes


def least_memory(memory: StepMemory, *, rank: int, schedule: ScheduleRow) -> LeastMemory:
    """Return a lower bound of the simulated peak of a rank for the step whose loads `memory` has.

    Stage s of P keeps at least P - s microbatches before its first backward, as in 1F1B; where units take turns in rounds
    (DIP), no more than a round has. Here they are the smallest ones. O(n log n) in the microbatches of the rank's stages.
    """
    kept = 0.0
    for unit, replica, index in memory.layers.of_rank[rank]:
        starts, held = memory.loads.assignment.placed[unit].microbatch_starts, memory.layers.plan.units[unit].replicas[replica]
        of_microbatches = memory.kept_bytes(unit)[index, starts[replica] : starts[replica + 1]]
        most = -(-len(of_microbatches) // max(1, schedule.num_rounds))
        in_flight = min(most, len(held.stages) - held.virtual_stages[index].stage_index)
        kept += float(np.sort(of_microbatches)[:in_flight].sum())
    return LeastMemory(memory.static_bytes(rank), kept)
