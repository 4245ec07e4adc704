"""One step as input of the executor, its results, and the mean losses of one or more steps."""

import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatron.runtime.step.balance_report import BalanceReport
from megatron.runtime.step.decision import StepDecision
from megatron.runtime.step.token_placement import DEFAULT_SHARING, ContextSharing, RouteKey, RouteRows, TokenPlacement
from multimodal.attention.device_values import Parcels
from multimodal.model.stage_input import PackedInput
from multimodal.schedule.align_replicas import Joins
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.timeline import TimelineEvent

TOTALS = ("num_target_tokens", "loss_divisor", "data_set_divisors", "num_generated_values", "num_tokens")
"""Facts of a whole global batch, which a training process should not compute again."""
NO_PARCELS = Parcels.pack({})
ROUTES = "routes"
"""The parcel of `Step.route_rows`."""


class FoldedLengths(Mapping[int, SampleLengths]):
    """Sample id -> lengths. A process that receives it from a loader unpickles thousands of samples only if it reads them."""

    def __init__(self, lengths: Mapping[int, SampleLengths], *, own: Collection[int]) -> None:
        """own: the samples that this rank computes with."""
        self._size = len(lengths)
        self._own = {sample: lengths[sample] for sample in own}
        self._folded = pickle.dumps(dict(lengths), protocol=pickle.HIGHEST_PROTOCOL)
        self._all: Mapping[int, SampleLengths] | None = None

    def __getitem__(self, sample: int) -> SampleLengths:
        return self._own[sample] if sample in self._own else self._unfold()[sample]

    def __iter__(self) -> Iterator[int]:
        return iter(self._unfold())

    def __len__(self) -> int:
        return self._size

    def _unfold(self) -> Mapping[int, SampleLengths]:
        if self._all is None:
            self._all = pickle.loads(self._folded)
        return self._all


@dataclass(frozen=True)
class Step(StepDecision):
    """One global batch, the same on every rank except for `inputs`, which hold the samples that this rank loaded."""

    inputs: Mapping[MicrobatchPlace, tuple[PackedInput, ...]]
    """This rank's inputs, one per sample subset of each microbatch."""
    target_samples: Mapping[MicrobatchPlace, tuple[int, ...]] = field(default_factory=dict)
    """Sample id of every target token, per LLM microbatch of this rank."""
    route_rows: Mapping[RouteKey, RouteRows] = field(default_factory=dict)
    """The rows that this rank sends and receives on its routes."""
    parcels: Parcels = field(default_factory=lambda: NO_PARCELS)
    """The inputs of a packed step by microbatch, and ROUTES; `inputs` and `route_rows` are then empty."""
    joins: Joins = ()
    """Computations of other replicas that each lane joins; empty if weights are not sharded."""
    digest: int = 0
    """The digest of the assignment; ranks compare it before they run the step."""
    flops: float = 0.0
    """FLOPs of the model in the whole step; 0: not counted."""
    balance: BalanceReport = field(default_factory=BalanceReport)
    sharing: ContextSharing = DEFAULT_SHARING
    problems: Mapping[int, str] = field(default_factory=dict)
    """Sample id -> why this rank could not read it; it has empty items."""
    dropped: frozenset[int] = frozenset()
    """Samples that add nothing to any loss, the same on every rank."""

    @cached_property
    def placement(self) -> TokenPlacement:
        """The place of every token."""
        return TokenPlacement(self, sharing=self.sharing)

    def changed(self, **changes: Any) -> "Step":
        """Return the same step with other inputs or reports; keeps `placement`, and totals."""
        other = replace(self, **changes)
        kept = {name: self.__dict__[name] for name in TOTALS if name in self.__dict__}
        other.__dict__.update(kept, placement=self.placement)
        self.placement.belongs_to(other)
        return other

    def without(self, dropped: Collection[int]) -> "Step":
        """Return the same step in which these samples add nothing to any loss, nor to what it is divided by."""
        lengths = {key: replace(each, num_target_tokens=0) if key in dropped else each for key, each in self.lengths.items()}
        kept = {key: each for key, each in lengths.items() if key not in dropped}
        other = replace(self, lengths=lengths, dropped=frozenset(dropped))
        of_kept = {"num_generated_values": replace(self, lengths=kept).num_generated_values}
        other.__dict__.update(of_kept, placement=self.placement, num_tokens=self.num_tokens)
        self.placement.belongs_to(other)
        return other

    def packed(self) -> "Step":
        """Return the same step with the tensors of each microbatch in one buffer."""
        contents: Mapping[Any, Any] = {ROUTES: self.route_rows, **self.inputs}
        self.placement.forget_routes()
        for total in TOTALS:
            getattr(self, total)
        own = {atom.sample_id for place in self.inputs for atom in self.assignment.atoms(place)}
        lengths = FoldedLengths(self.lengths, own=own)
        return self.changed(inputs={}, route_rows={}, parcels=Parcels.pack(contents), lengths=lengths)

    def pin_memory(self) -> "Step":
        """Return a packed step in pinned memory, for copies to a device while the host continues; called by torch's loaders."""
        return self.changed(parcels=self.parcels.pin_memory())


@dataclass(frozen=True)
class StepResult:
    """One rank's results of a step; callers sum them over ranks."""

    loss_sums: Mapping[str | int, float]
    """Sums by unit, on tensor parallel rank 0 of last stages only: weighted losses of the LLM's target tokens, also by the
    numbers of data sets if there are several, and squared errors of all of a generator's values."""
    num_correct_tokens: int
    correct_samples: Mapping[int, bool]
    """Sample id -> True if greedy decoding gives the whole answer; evaluation only."""
    events: tuple[TimelineEvent, ...]
    peak_activation_bytes: int


class LossMeans(NamedTuple):
    """The means of one or more steps over all ranks."""

    backbone: float
    generators: float
    """The sum of the generators' means."""
    by_data_set: Mapping[int, float]
    """The parts of `backbone` by data set, those without target tokens left out; empty: a single data set."""

    @classmethod
    def of(cls, sums: Mapping[str | int, float], counts: Mapping[str | int, float], *, backbone: str) -> "LossMeans":
        """Divide sums (`StepResult.loss_sums`) of all ranks by `loss_counts`; generators without values add nothing."""
        means = {key: sums[key] / count for key, count in counts.items() if count}
        by_data_set = {key: mean for key, mean in means.items() if isinstance(key, int)}
        generated = (mean for key, mean in means.items() if key != backbone and key not in by_data_set)
        return cls(means[backbone], sum(generated, 0.0), by_data_set)

    @property
    def total(self) -> float:
        """The loss that is trained."""
        return self.backbone + self.generators
