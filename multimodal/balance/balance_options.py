"""What a balancer is told beside the lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from types import MappingProxyType
from typing import Protocol

from multimodal.balance.unit_cost import UnitCost
from multimodal.values.assignment import Assignment
from multimodal.values.sample_lengths import SampleLengths


class Prediction(Protocol):
    """Of one step under one assignment."""

    @property
    def seconds(self) -> float:
        """Seconds that it would take."""

    @property
    def least_seconds(self) -> float:
        """A number that `seconds` is not below, found quickly."""


class Predictor(Protocol):
    """Predicts steps, deterministically."""

    def predict(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> Prediction:
        """Predict a step of these samples."""


class Granularity(StrEnum):
    """What an encoder's balancing moves as one."""

    ITEM = "item"
    """Every image and every clip by itself."""
    SAMPLE = "sample"
    """All items of a sample together, as the papers do."""


@dataclass(frozen=True, kw_only=True)
class BalanceOptions:
    """Sizes, costs and what else shapes an assignment."""

    micro_batch_size: int = 1
    """Samples in one microbatch of the LLM. Balancers that equalise work take it as the mean: it sets their number."""
    num_microbatches: int | None = None
    """Microbatches of every LLM replica, in place of their size; with fewer samples a replica has fewer."""
    encoder_micro_batch_sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Encoder -> most items in one of its microbatches; an encoder that is not named follows the LLM's microbatches."""
    granularity: Granularity = Granularity.ITEM
    unit_costs: Mapping[str, UnitCost] = field(default_factory=lambda: MappingProxyType({}))
    """Unit -> its cost as a function of lengths in tokens; a unit that is not named costs its FLOPs (see `BatchWork`)."""
    ranks_per_node: int = 8
    vocab_size: int = 32768
    """Of the LLM's head, whose work counts."""
    predictor: Predictor | None = None
    """What `auto` compares; without it, the largest work of a replica."""

    def count_microbatches(self, num_samples: int, *, num_replicas: int) -> int:
        """Microbatches that every LLM replica is to have: `num_microbatches`, or as many as `micro_batch_size` makes."""
        return self.num_microbatches or ceil(num_samples / (num_replicas * self.micro_batch_size))
