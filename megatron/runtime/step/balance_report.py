"""The effect of balancing on a step: the imbalance of work before and after, and the time that ranks waited for balancing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        self._start_anew()

    def _start_anew(self) -> None:
        self._first_step = self._last_step = self._num_steps = 0
        self._wait_ms = 0.0
        self._node_bytes: NDArray[np.float64] | None = None
        self._predicted = np.zeros(2)
        self._sums: dict[str, NDArray[np.float64]] = {}

    def add(self, number: int, report: BalanceReport) -> None:
        """Add a step."""
        if not report.imbalance_after:
            return
        self._first_step, self._last_step = self._first_step or number, number
        self._num_steps += 1
        self._wait_ms += report.assign_wait_ms
        if report.node_bytes is not None:
            self._node_bytes = np.array(report.node_bytes) + (0.0 if self._node_bytes is None else self._node_bytes)
        self._predicted += np.array(report.predicted_seconds or (0.0, 0.0))
        for unit, after in report.imbalance_after.items():
            both = np.array([report.imbalance_before[unit], after])
            self._sums[unit] = self._sums.get(unit, 0.0) + both

    def tell(self) -> str | None:
        """Return one line in words and start again; None if no step was added."""
        if not self._num_steps:
            return None
        steps = "-".join(map(str, dict.fromkeys((self._first_step, self._last_step))))
        wait_ms = self._wait_ms / self._num_steps
        means = {unit: [Imbalance(*each) for each in total / self._num_steps] for unit, total in self._sums.items()}
        units = [f"{unit}: {_describe(before, after)}" for unit, (before, after) in means.items()]
        waited = [f"waited {wait_ms:.0f} ms a step for data"] if wait_ms >= 0.5 else []
        if self._predicted[0]:
            share = self._predicted[1] / self._predicted[0]
            waited = [f"step predicted to take {share:.2f}x as long as without balancing", *waited]
        if self._node_bytes is not None:
            before, after = self._node_bytes / self._num_steps / 1e6
            waited = [f"{after:.3g} MB a step between nodes (before rearrangement {before:.3g} MB)", *waited]
        self._start_anew()
        return f"balance of step {steps}: {'; '.join([*units, *waited])}"


def _describe(before: Imbalance, after: Imbalance) -> str:
    """Describe the busiest replica, if there are several, and the busiest microbatch; before balancing only if different."""
    parts = [("microbatch", before.microbatch, after.microbatch, after.microbatch_of_longest)]
    if not before.replica == after.replica == 1.0:
        parts = [("replica", before.replica, after.replica, after.replica_of_longest), *parts]
    return ", ".join(
        f"busiest {what} {now:.2f}x the mean{_explain(was, now, of_longest)}" for what, was, now, of_longest in parts
    )


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


def report_balance(
    before: Assignment,
    after: Assignment,
    work: BatchWork,
    *,
    balance_seconds: float,
    node_bytes: NodeBytes | None = None,
    predicted_seconds: tuple[float, float] | None = None,
) -> BalanceReport:
    """Compare an assignment with another one, which keeps the data loader's order. O(atoms)."""
    return BalanceReport(
        {name: unit_imbalance(before, work, unit=name) for name in before.placed},
        {name: unit_imbalance(after, work, unit=name) for name in before.placed},
        predicted_seconds,
        balance_ms=1e3 * balance_seconds,
        node_bytes=node_bytes,
    )
