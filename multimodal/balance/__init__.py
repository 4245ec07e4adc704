"""Which sample goes where: balancers turn lengths into an Assignment, every rank the same one."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from multimodal.balance.auto import balance_auto
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.disttrain import balance_disttrain
from multimodal.balance.entrain import balance_entrain
from multimodal.balance.in_order import balance_in_order, balance_sorted
from multimodal.balance.post_balancing import balance_every_unit, balance_llm_only, balance_whole_samples
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


class Balancer(Protocol):
    """A deterministic function from the lengths of a global batch to its placement."""

    def __call__(self, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
        """Place every sample and every item; raises AssignmentError when the request is out of range."""
        ...


BALANCERS: Mapping[str, Balancer] = {
    "none": balance_in_order,
    "sorted": balance_sorted,
    "llm-only": balance_llm_only,
    "whole-sample": balance_whole_samples,
    "orchmllm": balance_every_unit,
    "disttrain": balance_disttrain,
    "entrain": balance_entrain,
    "auto": balance_auto,
}
"""Every balancer by the name that `--balance` chooses it by."""
