"""Balancers, which turn lengths into an Assignment that is the same on every rank. Each has a row of facts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Protocol

import numpy as np

from multimodal.balance.auto import balance_auto
from multimodal.balance.balance_options import BalanceOptions, validate_inputs
from multimodal.balance.batch_work import BatchWork, sum_by
from multimodal.balance.disttrain import balance_disttrain
from multimodal.balance.entrain import balance_entrain
from multimodal.balance.in_order import balance_in_order, balance_sorted
from multimodal.balance.orchmllm import balance_every_unit, balance_llm_only, balance_whole_samples
from multimodal.balance.placement import balance_unlike, has_unequal_shares
from multimodal.kernels import kernels
from multimodal.values.assignment import Assignment
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, UnitPlan
from multimodal.values.sample_lengths import LengthBatch, SampleLengths


class Balancer(Protocol):
    """A deterministic function from the work of a global batch to its placement."""

    def __call__(self, work: BatchWork, *, plan: Plan) -> Assignment:
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

    def __call__(self, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
        """Place a global batch, in more microbatches if `tokens_per_microbatch` asks for it; raises AssignmentError."""
        balance: Callable[..., Assignment] = self.balance
        if has_unequal_shares(graph, plan) and not self.deals_shares:
            if not self.keeps_samples_whole:
                raise AssignmentError("replicas that are not alike need a --balance that keeps samples whole; choose another one")
            balance = partial(balance_unlike, balance=self.balance)
        batch = LengthBatch.of(lengths)
        validate_inputs(batch, graph=graph, options=options)
        return _fit_tokens(BatchWork(graph, batch, options), partial(balance, plan=plan))

    def suits(self, placements: Collection[Placement]) -> bool:
        """Return True if `auto` and searches try it on such plans."""
        if self.needs_costs or (self.needs_kernels and kernels is None):
            return False
        return not self.is_for_these_alone or not self.tried_first_on.isdisjoint(placements)


def _fit_tokens(work: BatchWork, balance: Callable[[BatchWork], Assignment]) -> Assignment:
    """Return an assignment whose microbatches of several samples have at most `tokens_per_microbatch`, if that is set.

    Balancers equalise work, not tokens, so the number that suffices on average may be too small. It grows by an eighth, or one,
    at a time, up to a replica's number of samples.
    """
    assignment, most = balance(work), work.options.tokens_per_microbatch
    if most is None:
        return assignment
    arrays, count = work.arrays, 0
    while True:
        placed = assignment.placed[work.graph.backbone.name]
        samples = np.searchsorted(arrays.sample_ids, placed.sample_ids)
        tokens = sum_by(placed.microbatch_of_atom, arrays.num_tokens[samples], placed.num_microbatches)
        too_full = (tokens > most) & (np.diff(placed.atom_starts) > 1)
        count = max(count, int(placed.counts.max(initial=1)))
        if not too_full.any() or count >= len(arrays):
            return assignment
        count += max(1, count // 8)
        assignment = balance(replace(work, options=replace(work.options, num_microbatches=count)))


def placements_of(units: Sequence[UnitPlan]) -> tuple[Placement, ...]:
    """Return the placements of the units that have work; units that share all ranks may meet late, or run in phases."""
    ranks = [frozenset(unit.ranks) for unit in units]
    if len(units) == 1 or any(each != ranks[0] for each in ranks):
        return (Placement.CHAIN,) if any(unit.has_virtual_stages for unit in units) else (Placement.OWN_RANKS,)
    if len({unit.data_parallel_size for unit in units}) > 1:
        return (Placement.PHASES,)
    is_pipeline = any(unit.num_virtual_stages > 1 for unit in units)
    return (Placement.SHARED_PIPELINE,) if is_pipeline else (Placement.SHARED_RANKS, Placement.PHASES)


def _balance_auto(work: BatchWork, *, plan: Plan) -> Assignment:
    placements = placements_of(tuple(plan.units.values()))
    tried = [row.balance for row in BALANCERS.values() if row.suits(placements)]
    if has_unequal_shares(work.graph, plan):
        tried = [partial(balance_unlike, balance=row.balance) for row in BALANCERS.values() if row.keeps_samples_whole]
    return balance_auto(work, plan=plan, balancers=tried)


UNBALANCED = "none"
"""The name of the balancer that changes nothing."""

BALANCERS: dict[str, BalancerRow] = {
    UNBALANCED: BalancerRow(
        balance=balance_in_order,
        meaning="microbatches of samples as they come, dealt to the replicas in turn",
        keeps_samples_whole=True,
    ),
    "sorted": BalancerRow(balance=balance_sorted, meaning="the same, longest samples first", keeps_samples_whole=True),
    "llm-only": BalancerRow(
        balance=balance_llm_only,
        meaning="the LLM's work balanced over replicas, then over microbatches",
        source="OrchMLLM 3.2",
        weighs_units=True,
        keeps_samples_whole=True,
    ),
    "whole-sample": BalancerRow(
        balance=balance_whole_samples,
        meaning="the work of all units together balanced over replicas, then over microbatches",
        keeps_samples_whole=True,
        serves_loops=True,
        tried_first_on=frozenset({Placement.CHAIN, Placement.SHARED_RANKS, Placement.SHARED_PIPELINE}),
        is_for_these_alone=True,
    ),
    "orchmllm": BalancerRow(
        balance=balance_every_unit,
        meaning="every unit balanced by itself",
        source="OrchMLLM, Alg. 2, 4 and 5",
        weighs_units=True,
        places_items=True,
        tried_first_on=frozenset({Placement.OWN_RANKS, Placement.PHASES}),
    ),
    "disttrain": BalancerRow(
        balance=balance_disttrain,
        meaning="samples balanced over replicas, and microbatches in an order that keeps pipelines full",
        source="DistTrain, Alg. 2 and 3",
        judges=True,
        keeps_samples_whole=True,
        tried_first_on=frozenset({Placement.OWN_RANKS, Placement.CHAIN, Placement.SHARED_RANKS, Placement.SHARED_PIPELINE}),
    ),
    "entrain": BalancerRow(
        balance=balance_entrain,
        meaning="microbatches even for encoders and LLM apart: some samples run one microbatch later in the LLM",
        source="Entrain, Alg. 4",
        defers=True,
        needs_kernels=True,
        tried_first_on=frozenset({Placement.SHARED_RANKS}),
    ),
    "auto": BalancerRow(
        balance=_balance_auto,
        meaning="whichever of the others is predicted to take shortest for the batch at hand",
        places_items=True,
        deals_shares=True,
        weighs_units=True,
        defers=True,
        needs_costs=True,
    ),
}
"""Every balancer by its name for `--balance`. Rows can be added at any time."""
