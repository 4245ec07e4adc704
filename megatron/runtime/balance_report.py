"""What balancing did to a step: work spread before and after, and whether anybody had to wait for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.imbalance import Imbalance, unit_imbalance
from multimodal.balance.in_order import balance_in_order
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


@dataclass(frozen=True)
class BalanceReport:
    """Of one step."""

    imbalance_before: Mapping[str, Imbalance] = field(default_factory=dict)
    """Per unit, as the data loader's order would have it (--balance none)."""
    imbalance_after: Mapping[str, Imbalance] = field(default_factory=dict)
    balance_ms: float = 0.0
    """Computing the assignment took, in the background."""
    assign_wait_ms: float = 0.0
    """The step waited for its assignment and its data: the rank that waited longest."""

    def to_dict(self) -> dict[str, Any]:
        """Plain form, for the log."""
        return {
            "assign_wait_ms": self.assign_wait_ms,
            "balance_ms": self.balance_ms,
            "imbalance": {
                unit: {"before": self.imbalance_before[unit]._asdict(), "after": after._asdict()}
                for unit, after in self.imbalance_after.items()
            },
        }

    def describe(self) -> str:
        """Largest over mean replica (and microbatch) of every unit, before and after, in one line."""
        units = [
            f"{unit} {before.replica:.2f} -> {after.replica:.2f} ({before.microbatch:.2f} -> {after.microbatch:.2f})"
            for unit, after in self.imbalance_after.items()
            for before in [self.imbalance_before[unit]]
        ]
        return f"imbalance of replicas (microbatches): {', '.join(units)}; waited {self.assign_wait_ms:.0f} ms for it"


def report_balance(
    assignment: Assignment,
    lengths: Sequence[SampleLengths],
    *,
    graph: ModelGraph,
    plan: Plan,
    options: BalanceOptions,
    balance_seconds: float,
) -> BalanceReport:
    """Hold an assignment against the data loader's order. O(atoms)."""
    work = BatchWork(graph, lengths, options)
    before = balance_in_order(lengths, graph=graph, plan=plan, options=options)
    return BalanceReport(
        {name: unit_imbalance(before, work, unit=name) for name in graph.unit_names},
        {name: unit_imbalance(assignment, work, unit=name) for name in graph.unit_names},
        balance_ms=1e3 * balance_seconds,
    )
