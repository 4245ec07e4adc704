"""One step as the executor takes it, and as it gives it back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megatron.runtime.balance_report import BalanceReport
from megatron.runtime.sample_subsets import sample_subsets
from multimodal.model.stage_input import PackedInput
from multimodal.values.assignment import Assignment, Microbatch, MicrobatchPlace, Route, Routes
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.schedule import Schedule
from multimodal.values.schedule_form import ScheduleForm, form_of
from multimodal.values.timeline import TimelineEvent


@dataclass(frozen=True)
class Step:
    """What one global batch is: decided alike on every rank, but for `inputs`, which hold what this rank loaded."""

    graph: ModelGraph
    assignment: Assignment
    schedule: Schedule
    """Lowered."""
    routes: Routes
    lengths: Mapping[int, SampleLengths]
    """By sample id."""
    inputs: Mapping[MicrobatchPlace, PackedInput]
    """Of microbatches that run whole."""
    target_samples: Mapping[MicrobatchPlace, tuple[int, ...]] = field(default_factory=dict)
    """Sample id of every target token, per LLM microbatch of this rank."""
    subset_inputs: Mapping[MicrobatchPlace, tuple[PackedInput, ...]] = field(default_factory=dict)
    """Of microbatches that run in sample subsets, one per subset."""
    digest: int = 0
    """Of the assignment; ranks compare it before they run the step."""
    balance: BalanceReport = field(default_factory=BalanceReport)
    """What balancing did."""

    @cached_property
    def num_target_tokens(self) -> int:
        """Target tokens of the whole global batch: what every loss is divided by."""
        return sum(sample.num_target_tokens for sample in self.lengths.values())

    @property
    def num_tokens(self) -> int:
        """LLM tokens of the whole global batch."""
        return sum(sample.num_tokens for sample in self.lengths.values())

    @cached_property
    def form(self) -> ScheduleForm:
        """Where the schedule cuts backwards."""
        return form_of(self.schedule)

    def subsets(self, place: MicrobatchPlace) -> tuple[Microbatch, ...]:
        """The sample subsets that a microbatch runs as; one where its backward is not cut."""
        return sample_subsets(place, form=self.form, graph=self.graph, assignment=self.assignment)

    def part_of(self, route: Route) -> int:
        """Index of the sample subset of the route's source that the route takes its rows from."""
        return next(index for index, atoms in enumerate(self.subsets(route.source)) if route.atoms[0] in atoms)

    def inputs_of(self, place: MicrobatchPlace) -> tuple[PackedInput, ...]:
        """What this rank loaded for a microbatch, one per sample subset."""
        return self.subset_inputs[place] if place in self.subset_inputs else (self.inputs[place],)

    def num_tokens_of(self, place: MicrobatchPlace) -> int:
        """Tokens that a microbatch has inside its unit."""
        return self._num_tokens(place.unit, self.assignment.atoms(place))

    def num_tokens_of_subsets(self, place: MicrobatchPlace) -> tuple[int, ...]:
        """Tokens that each sample subset of a microbatch has inside its unit."""
        return tuple(self._num_tokens(place.unit, atoms) for atoms in self.subsets(place))

    def _num_tokens(self, unit: str, atoms: Microbatch) -> int:
        if self.graph.unit(unit).role is Role.ENCODER:
            return sum(self.lengths[atom.sample_id].items[atom.item_index].num_tokens for atom in atoms)
        return sum(self.lengths[atom.sample_id].num_tokens for atom in atoms)

    def num_rows_of_route(self, route: Route) -> int:
        """Rows that travel along a route."""
        return sum(self.lengths[atom.sample_id].items[atom.item_index].num_output_tokens for atom in route.atoms)

    def source_rows(self, route: Route) -> Tensor:
        """[num_rows]: where the route's rows lie in the output of the sample subset that it takes them from."""
        starts, total = {}, 0
        for atom in self.subsets(route.source)[self.part_of(route)]:
            starts[atom] = total
            total += self.lengths[atom.sample_id].items[atom.item_index].num_output_tokens
        spans = [
            torch.arange(starts[atom], starts[atom] + self.lengths[atom.sample_id].items[atom.item_index].num_output_tokens)
            for atom in route.atoms
        ]
        return torch.cat(spans)


@dataclass(frozen=True)
class StepResult:
    """What one rank knows after a step; sums over ranks are the caller's."""

    loss_sum: float
    """Sum of the target tokens' losses on this rank's microbatches (tensor parallel rank 0 of the last stage only)."""
    num_correct_tokens: int
    correct_samples: Mapping[int, bool]
    """sample id -> whether greedy decoding gives the whole answer; evaluation only."""
    events: tuple[TimelineEvent, ...]
    peak_activation_bytes: int
