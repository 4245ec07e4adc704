"""Which sample goes where: balancers turn lengths into an Assignment, every rank the same one; and what others ask about each."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from multimodal.balance.auto import balance_auto
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.disttrain import balance_disttrain
from multimodal.balance.entrain import balance_entrain
from multimodal.balance.in_order import balance_in_order, balance_sorted
from multimodal.balance.orchmllm import balance_every_unit, balance_llm_only, balance_whole_samples
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


class Balancer(Protocol):
    """A deterministic function from the lengths of a global batch to its placement."""

    def __call__(self, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
        """Place every sample and every item; raises AssignmentError when the request is out of range."""
        ...


class Placement(Enum):
    """How a plan places its units, as far as balancers differ in it."""

    OWN_RANKS = "units on ranks of their own"
    CHAIN = "stages of several layer ranges"
    SHARED_RANKS = "units that share ranks, equally many replicas of one stage each"
    SHARED_PIPELINE = "units that share ranks, equally many replicas of several stages"
    PHASES = "units that share ranks and run in phases"


@dataclass(frozen=True, kw_only=True)
class BalancerRow:
    """One balancer: its function, and all that flags, `auto`, planners and pages ask about it."""

    balance: Balancer
    meaning: str
    """What it does, in one line."""
    source: str = ""
    """The paper that it comes from."""
    keeps_samples_whole: bool = False
    """True if a microbatch of an encoder holds the items of one of the LLM's; chains of layers over all lanes need that."""
    places_items: bool = False
    """True if it may encode the items of a sample in different places."""
    needs_costs: bool = False
    """True if it predicts steps, and so needs a description of the machine."""
    tried_first_on: frozenset[Placement] = frozenset()
    """Plans on which a search tries it at once; it tries all others on the best plans."""

    def __call__(self, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
        """Place every sample and every item: a row is a `Balancer`."""
        return self.balance(lengths, graph=graph, plan=plan, options=options)


def _balance_auto(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    tried = [row.balance for row in BALANCERS.values() if not row.needs_costs]
    return balance_auto(lengths, graph=graph, plan=plan, options=options, balancers=tried)


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
        keeps_samples_whole=True,
    ),
    "whole-sample": BalancerRow(
        balance=balance_whole_samples,
        meaning="the work of all units together balanced over replicas, then over microbatches",
        keeps_samples_whole=True,
        tried_first_on=frozenset({Placement.CHAIN, Placement.SHARED_RANKS, Placement.SHARED_PIPELINE}),
    ),
    "orchmllm": BalancerRow(
        balance=balance_every_unit,
        meaning="every unit balanced by itself",
        source="OrchMLLM, Alg. 2",
        places_items=True,
        tried_first_on=frozenset({Placement.OWN_RANKS, Placement.PHASES}),
    ),
    "disttrain": BalancerRow(
        balance=balance_disttrain,
        meaning="samples balanced over replicas, and microbatches in an order that keeps pipelines full",
        source="DistTrain, Alg. 2 and 3",
        keeps_samples_whole=True,
        tried_first_on=frozenset({Placement.OWN_RANKS, Placement.CHAIN, Placement.SHARED_RANKS, Placement.SHARED_PIPELINE}),
    ),
    "entrain": BalancerRow(
        balance=balance_entrain,
        meaning="microbatches even for encoders and LLM apart: some samples run one microbatch later in the LLM",
        source="Entrain, Alg. 4",
        tried_first_on=frozenset({Placement.SHARED_RANKS}),
    ),
    "auto": BalancerRow(
        balance=_balance_auto,
        meaning="whichever of the others is predicted to take shortest for the batch at hand",
        places_items=True,
        needs_costs=True,
    ),
}
"""Every balancer by the name that `--balance` chooses it by. What reads it reads it when called."""
