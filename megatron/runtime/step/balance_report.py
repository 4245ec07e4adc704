"""The effect of balancing on a step: the imbalance of work before and after, and the time that ranks waited for balancing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from multimodal.balance.batch_work import BatchWork, Imbalance, unit_imbalance
from multimodal.balance.rearrange_nodes import NodeBytes
from multimodal.values.assignment import Assignment


@dataclass(frozen=True)
class BalanceReport:
    """The effect of balancing on one step."""

    imbalance_before: Mapping[str, Imbalance] = field(default_factory=dict)
    """Unit -> imbalance in the data loader's order (--balance none)."""
    imbalance_after: Mapping[str, Imbalance] = field(default_factory=dict)
    predicted_seconds: tuple[float, float] | None = None
    """The step's predicted seconds in the data loader's order and as balanced; None where balancing predicts nothing."""
    balance_ms: float = 0.0
    """Milliseconds to compute the assignment, in the background."""
    assign_wait_ms: float = 0.0
    """Milliseconds that the step waited for its assignment and data, on the rank that waited longest."""
    node_bytes: NodeBytes | None = None
    """Bytes between nodes that node-wise rearrangement counts; None without it."""
    exchanged_node_bytes: int | None = None
    """Bytes that ranks sent to other nodes when they exchanged raw samples; None if they exchange none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain form, for the log."""
        return {
            "assign_wait_ms": self.assign_wait_ms,
            "balance_ms": self.balance_ms,
            **({"node_bytes": self.node_bytes._asdict()} if self.node_bytes is not None else {}),
            **({"exchanged_node_bytes": self.exchanged_node_bytes} if self.exchanged_node_bytes is not None else {}),
            **({} if self.predicted_seconds is None else {"predicted_seconds": _before_and_after(*self.predicted_seconds)}),
            "imbalance": {
                unit: _before_and_after(_named(self.imbalance_before[unit]), _named(after))
                for unit, after in self.imbalance_after.items()
            },
        }


class BalanceMean:
    """The mean of the steps since the last report, since a single step's balance says little."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, BalanceReport]] = []

    def add(self, number: int, report: BalanceReport) -> None:
        """Add a step."""
        if report.imbalance_after:
            self._steps.append((number, report))

    def tell(self) -> str | None:
        """Return one line in words and start again; None if no step was added."""
        if not self._steps:
            return None
        numbers, reports = zip(*self._steps, strict=True)
        self._steps.clear()
        said = []
        for unit in reports[-1].imbalance_after:
            before, after = np.mean([(each.imbalance_before[unit], each.imbalance_after[unit]) for each in reports], axis=0)
            said.append(f"{unit}: {_describe(Imbalance(*before), Imbalance(*after))}")
        if node_bytes := [each.node_bytes for each in reports if each.node_bytes is not None]:
            before, after = np.sum(node_bytes, axis=0) / len(reports) / 1e6
            said.append(f"{after:.3g} MB a step between nodes (before rearrangement {before:.3g} MB)")
        before, after = np.sum([each.predicted_seconds or (0.0, 0.0) for each in reports], axis=0)
        if before:
            said.append(f"step predicted to take {after / before:.2f}x as long as without balancing")
        if (wait_ms := float(np.mean([each.assign_wait_ms for each in reports]))) >= 0.5:
            said.append(f"waited {wait_ms:.0f} ms a step for data")
        return f"balance of step {'-'.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))}: {'; '.join(said)}"


def _describe(before: Imbalance, after: Imbalance) -> str:
    """Describe the busiest replica, if there are several, and the busiest microbatch; before balancing only if different."""
    parts = [("microbatch", before.microbatch, after.microbatch, after.microbatch_of_longest)]
    if not before.replica == after.replica == 1.0:
        parts = [("replica", before.replica, after.replica, after.replica_of_longest), *parts]
    return ", ".join(f"busiest {what} {now:.2f}x the mean{_explain(was, now, longest)}" for what, was, now, longest in parts)


def _explain(was: float, now: float, of_longest: float) -> str:
    """Return the figure before balancing, if different, and the part that the longest item causes alone, if any."""
    printed_was, printed_now, printed_longest = (f"{value:.2f}x" for value in (was, now, of_longest))
    reasons = [f"before balancing {printed_was}"] if printed_was != printed_now else []
    reasons += [f"longest alone {printed_longest}"] if printed_longest != "1.00x" else []
    return f" ({', '.join(reasons)})" if reasons else ""


def _before_and_after(before: object, after: object) -> dict[str, object]:
    return {"before_balancing": before, "after_balancing": after}


def _named(imbalance: Imbalance) -> dict[str, float]:
    """Return the values under names that are clear to a log's reader."""
    return {
        "busiest_replica_over_mean": imbalance.replica,
        "busiest_microbatch_over_mean": imbalance.microbatch,
        "microbatch_std_over_mean": imbalance.microbatch_std,
        "longest_over_mean_replica": imbalance.replica_of_longest,
        "longest_over_mean_microbatch": imbalance.microbatch_of_longest,
    }


def imbalances(assignment: Assignment, work: BatchWork) -> dict[str, Imbalance]:
    """Return the imbalance of each unit. O(atoms)."""
    return {name: unit_imbalance(assignment, work, unit=name) for name in assignment.placed}
