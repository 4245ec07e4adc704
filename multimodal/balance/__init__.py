"""Balancers, which turn lengths into an Assignment that is the same on every rank. Each has a row of facts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from multimodal.kernels import kernels
from multimodal.values.deferred import Deferred
from multimodal.values.errors import AssignmentError
from multimodal.values.file_form import read_table

if TYPE_CHECKING:
    from multimodal.balance.balance_options import BalanceOptions
    from multimodal.balance.batch_work import BatchWork
    from multimodal.values.assignment import Assignment
    from multimodal.values.model_graph import ModelGraph
    from multimodal.values.plan import Plan, UnitPlan
    from multimodal.values.sample_lengths import SampleLengths


class Balancer(Protocol):
    """A deterministic function from the work of a global batch to its placement."""

    def __call__(self, work: "BatchWork", *, plan: "Plan") -> "Assignment":
        """Place every sample and every item."""
        ...


class Placement(Enum):
    """The placement of a plan's units, as far as it matters to the choice of a balancer."""

    OWN_RANKS = "units on ranks of their own"
    CHAIN = "stages of several layer ranges"
    SHARED_RANKS = "units that share ranks, equally many replicas of one stage each"
    SHARED_PIPELINE = "units that share ranks, equally many replicas of several stages"
    PHASES = "units that share ranks and run in phases"


@dataclass(frozen=True, kw_only=True)
class BalancerRow:
    """One balancer: its function, and the facts about it for flags, `auto`, planners and documentation."""

    balance: Balancer
    meaning: str
    source: str = ""
    keeps_samples_whole: bool = False
    """True if a microbatch of an encoder holds the items of one LLM microbatch; chains of layers over all lanes need that."""
    deals_shares: bool = False
    """True if it deals unequal shares of a batch, too; for balancers that keep samples whole, `balance_unlike` does."""
    serves_loops: bool = False
    """True if loops of others can have it by `plan_exchange(keeps_counts=True)`: one length per sample, whole samples."""
    places_items: bool = False
    """True if it may encode the items of a sample in different places."""
    weighs_units: bool = False
    """True if it equalises the costs that a run declares for units, padding included; others use FLOPs or tokens only."""
    defers: bool = False
    """True if the LLM may run a sample later than encoders do, and there may be fewer microbatches than requested (Entrain)."""
    judges: bool = False
    """True if it predicts steps, where possible, to choose among assignments of its own."""
    needs_costs: bool = False
    """True if it predicts steps, and so needs a description of the machine."""
    tried_first_on: frozenset[Placement] = frozenset()
    """Placements on which a search tries it first; on others it is tried on the best plans only."""
    is_for_these_alone: bool = False
    """True if neither a search nor `auto` should try it on other placements."""
    needs_kernels: bool = False
    """True if it has no form without the C++ kernels."""

    def __call__(
        self, lengths: "Sequence[SampleLengths]", *, graph: "ModelGraph", plan: "Plan", options: "BalanceOptions"
    ) -> "Assignment":
        """Place a global batch, in more microbatches if `tokens_per_microbatch` asks for it; raises AssignmentError."""
        from multimodal.balance.balance_options import validate_inputs  # behind what lists the facts
        from multimodal.balance.batch_work import BatchWork, fit_tokens
        from multimodal.balance.placement import balance_unlike, has_unequal_shares
        from multimodal.values.sample_lengths import LengthBatch

        balance: Callable[..., Assignment] = self.balance
        if has_unequal_shares(graph, plan) and not self.deals_shares:
            if not self.keeps_samples_whole:
                raise AssignmentError("replicas that are not alike need a --balance that keeps samples whole; choose another one")
            balance = partial(balance_unlike, balance=self.balance)
        batch = LengthBatch.of(lengths)
        validate_inputs(batch, graph=graph, options=options)
        return fit_tokens(BatchWork(graph, batch, options), partial(balance, plan=plan))

    def suits(self, placements: Collection[Placement]) -> bool:
        """Return True if `auto` and searches try it on such plans."""
        if self.needs_costs or (self.needs_kernels and kernels is None):
            return False
        return not self.is_for_these_alone or not self.tried_first_on.isdisjoint(placements)


def placements_of(units: "Sequence[UnitPlan]") -> tuple[Placement, ...]:
    """Return the placements of the units that have work; units that share all ranks may meet late, or run in phases."""
    ranks = [frozenset(unit.ranks) for unit in units]
    if len(units) == 1 or any(each != ranks[0] for each in ranks):
        return (Placement.CHAIN,) if any(unit.has_virtual_stages for unit in units) else (Placement.OWN_RANKS,)
    if len({unit.data_parallel_size for unit in units}) > 1:
        return (Placement.PHASES,)
    is_pipeline = any(unit.num_virtual_stages > 1 for unit in units)
    return (Placement.SHARED_PIPELINE,) if is_pipeline else (Placement.SHARED_RANKS, Placement.PHASES)


def _read_row(facts: dict[str, Any]) -> BalancerRow:
    balance = Deferred(f"{__name__}.{facts.pop('balance')}")
    placements = frozenset(Placement[name.upper()] for name in facts.pop("tried_first_on", ()))
    return BalancerRow(balance=balance, tried_first_on=placements, **facts)


UNBALANCED = "none"
"""The name of the balancer that changes nothing."""
_TABLE = read_table(Path(__file__).with_name("balancers.yaml"))
BALANCERS: dict[str, BalancerRow] = {name: _read_row(facts) for name, facts in _TABLE.items()}
"""Every balancer by its name for `--balance`. Rows can be added at any time."""
