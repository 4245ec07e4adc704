"""Which sample goes where: balancers turn lengths into an Assignment, every rank the same one."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from multimodal.balance.in_order import balance_in_order
from multimodal.balance.longest_first import balance_longest_first
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


class Balancer(Protocol):
    """A deterministic function from the lengths of a global batch to its placement."""

    def __call__(
        self,
        lengths: Sequence[SampleLengths],
        *,
        graph: ModelGraph,
        plan: Plan,
        micro_batch_size: int,
        encoder_micro_batch_sizes: Mapping[str, int],
    ) -> Assignment:
        """Place every sample and every item; raises AssignmentError when the request is out of range."""
        ...


BALANCERS: Mapping[str, Balancer] = {
    "in-order": balance_in_order,
    "longest-first": balance_longest_first,
}
"""Every balancer by the name that `--balancer` chooses it by."""
