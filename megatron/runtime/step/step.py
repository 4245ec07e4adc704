"""One step as input of the executor, its results, and the losses of one or more steps."""

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """The effect of balancing."""
    sharing: ContextSharing = DEFAULT_SHARING
    """The rule that deals tokens to context parallel ranks."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Sample id -> why this rank could not read it; it has empty items."""
    dropped: frozenset[int] = frozenset()
    """Samples that add nothing to any loss, the same on every rank."""

    @cached_property
    def placement(self) -> TokenPlacement:
        """The place of every token."""
        sizes = {name: self.plan.units[name].context_parallel_size for name in self.graph.unit_names}
        return TokenPlacement(self, sizes=sizes, sharing=self.sharing)

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
        for place in self.inputs:
            for route in (*self.routes.from_source.get(place, ()), *self.routes.to_target.get(place, ())):
                own |= {atom.sample_id for atom in route.atoms}
        lengths = FoldedLengths(self.lengths, own=own)
        return self.changed(inputs={}, route_rows={}, parcels=Parcels.pack(contents), lengths=lengths)

    def pin_memory(self) -> "Step":
        """Return a packed step in pinned memory, for copies to a device while the host continues; called by torch's loaders."""
        return self.changed(parcels=self.parcels.pin_memory())


@dataclass(frozen=True)
class StepResult:
    """One rank's results of a step; callers sum them over ranks."""

    loss_sum: float
    """Weighted sum of the losses of target tokens on this rank (tensor parallel rank 0 of the last stage only)."""
    generator_loss_sums: Mapping[str, float]
    """Generator -> sum of the squared errors of all its values."""
    data_set_loss_sums: Sequence[float]
    """The parts of `loss_sum` by data set, where a mixture has several: as many as `Step.data_set_divisors`."""
    num_correct_tokens: int
    correct_samples: Mapping[int, bool]
    """Sample id -> True if greedy decoding gives the whole answer; evaluation only."""
    events: tuple[TimelineEvent, ...]
    peak_activation_bytes: int


@dataclass(frozen=True)
class LossSums:
    """This rank's sums by unit, and their divisors, which all ranks know."""

    backbone: str
    sums: Mapping[str | int, float] = field(default_factory=dict)
    """Sums of units, and by the numbers of the data sets if there are several."""
    counts: Mapping[str | int, float] = field(default_factory=dict)
    """The weights of the LLM's target tokens, in all and by data set, and pixel values of each generator, over all ranks."""

    @classmethod
    def of_step(cls, step: Step, result: StepResult) -> "LossSums":
        """Return the sums of one step."""
        backbone, divisors = step.graph.backbone.name, step.data_set_divisors
        sums: dict[str | int, float] = {backbone: result.loss_sum}
        counts: dict[str | int, float] = {backbone: step.loss_divisor}
        sums.update(result.generator_loss_sums)
        counts.update(step.num_generated_values)
        if len(divisors) > 1:
            sums.update(enumerate(result.data_set_loss_sums))
            counts.update(enumerate(divisors))
        return cls(backbone, sums, counts)

    def plus(self, other: "LossSums") -> "LossSums":
        """Return the sums of both."""
        units = {**self.counts, **other.counts}
        return LossSums(
            self.backbone,
            {unit: self.sums.get(unit, 0.0) + other.sums.get(unit, 0.0) for unit in units},
            {unit: self.counts.get(unit, 0) + other.counts.get(unit, 0) for unit in units},
        )

    def means(self, sum_over_ranks: Callable[[list[float]], list[float]]) -> "LossMeans":
        """Return the means; a generator without values adds nothing. Collective."""
        units = list(self.counts)
        totals = dict(zip(units, sum_over_ranks([self.sums.get(unit, 0.0) for unit in units]), strict=True))
        means = {unit: totals[unit] / count for unit, count in self.counts.items() if count}
        by_data_set = {unit: mean for unit, mean in means.items() if isinstance(unit, int)}
        generated = (mean for unit, mean in means.items() if unit != self.backbone and unit not in by_data_set)
        return LossMeans(means[self.backbone], sum(generated, 0.0), by_data_set)


class LossMeans(NamedTuple):
    """The means of one or more steps over all ranks."""

    backbone: float
    generators: float
    """The sum of the generators' means."""
    by_data_set: Mapping[int, float]
    """The parts of `backbone` by data set, those without target tokens left out; empty: a single data set."""

    @property
    def total(self) -> float:
        """The loss that is trained."""
        return self.backbone + self.generators
