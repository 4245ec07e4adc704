"""How long the computations of an emulated run take, and what the simulator says to them."""

from dataclasses import dataclass, field
from pathlib import Path

from megatron.runtime.step.step import Step
from multimodal.cost.cost_table import CostTable
from multimodal.cost.step_costs import ComputeCost
from multimodal.cost.table_costs import TableCosts
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.errors import ConfigError
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action


@dataclass(frozen=True)
class _RepeatedCosts(TableCosts):
    """A table for a run of any number of microbatches: beyond its last one it starts over."""

    def compute(self, action: Action) -> ComputeCost:
        """Seconds of one computation."""
        return super().compute(action._replace(microbatch=action.microbatch % self.table.num_microbatches))


@dataclass(frozen=True)
class EmulationTable:
    """A cost table that fits a run's plan, and the measured seconds of its steps."""

    costs: TableCosts
    measured_seconds: list[float] = field(default_factory=list)

    @classmethod
    def from_file(cls, path: Path, *, plan: Plan) -> "EmulationTable":
        """Read a table; raises ConfigError when it does not list every virtual stage of every unit of the plan."""
        table = CostTable.from_file(path)
        expected = {name: unit.num_virtual_stages for name, unit in plan.units.items()}
        found = {name: len(unit.stages) for name, unit in table.units.items()}
        if found != expected:
            raise ConfigError(
                f"--emulate {path}: the table has stages {_shown(found)} but the run has {_shown(expected)}; list every "
                "(virtual) stage of every unit, or change the units' pipeline sizes"
            )
        return cls(_RepeatedCosts(table))

    def seconds(self, action: Action) -> float:
        """How long to wait in place of a computation."""
        return self.costs.compute(action).seconds

    def simulated_seconds(self, step: Step, plan: Plan) -> float:
        """What the simulator says to a step."""
        return simulate_schedule(
            step.schedule, graph=step.graph, plan=plan, assignment=step.assignment, costs=self.costs
        ).iteration_seconds


def _shown(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
