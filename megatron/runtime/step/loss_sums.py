"""The losses of one or more steps: sums over what counts in them, divided once, by global numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.runtime.step.step import Step, StepResult


@dataclass(frozen=True)
class LossSums:
    """This rank's sums, by unit, and what all ranks know they are to be divided by."""

    backbone: str
    sums: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    """Target tokens of the LLM, pixel values of each generator; of all ranks."""

    @classmethod
    def of_step(cls, step: Step, result: StepResult) -> "LossSums":
        """Those of one step."""
        backbone = step.graph.backbone.name
        return cls(
            backbone,
            {backbone: result.loss_sum, **result.generator_loss_sums},
            {backbone: step.num_target_tokens, **step.num_generated_values},
        )

    def plus(self, other: "LossSums") -> "LossSums":
        """Both together."""
        units = {**self.counts, **other.counts}
        return LossSums(
            self.backbone,
            {unit: self.sums.get(unit, 0.0) + other.sums.get(unit, 0.0) for unit in units},
            {unit: self.counts.get(unit, 0) + other.counts.get(unit, 0) for unit in units},
        )

    def means(self, sum_over_ranks: Callable[[list[float]], list[float]]) -> tuple[float, float]:
        """(the LLM's mean, the sum of the generators' means); a generator that made nothing adds nothing. Collective."""
        units = list(self.counts)
        totals = dict(zip(units, sum_over_ranks([self.sums.get(unit, 0.0) for unit in units]), strict=True))
        means = {unit: totals[unit] / count for unit, count in self.counts.items() if count}
        return means.pop(self.backbone), sum(means.values(), 0.0)
