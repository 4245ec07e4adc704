"""One step as the executor takes it, and as it gives it back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from multimodal.model.stage_input import PackedInput
from multimodal.values.assignment import Assignment, MicrobatchPlace, Route, Routes
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.schedule import Schedule
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
    target_samples: Mapping[MicrobatchPlace, tuple[int, ...]] = field(default_factory=dict)
    """Sample id of every target token, per LLM microbatch of this rank."""

    @cached_property
    def num_target_tokens(self) -> int:
        """Target tokens of the whole global batch: what every loss is divided by."""
        return sum(sample.num_target_tokens for sample in self.lengths.values())

    @property
    def num_tokens(self) -> int:
        """LLM tokens of the whole global batch."""
        return sum(sample.num_tokens for sample in self.lengths.values())

    def num_tokens_of(self, place: MicrobatchPlace) -> int:
        """Tokens that a microbatch has inside its unit."""
        atoms = self.assignment.atoms(place)
        if self.graph.unit(place.unit).role is Role.BACKBONE:
            return sum(self.lengths[atom.sample_id].num_tokens for atom in atoms)
        return sum(self.lengths[atom.sample_id].items[atom.item_index].num_tokens for atom in atoms)

    def num_rows_of_route(self, route: Route) -> int:
        """Rows that travel along a route."""
        return sum(self.lengths[atom.sample_id].items[atom.item_index].num_output_tokens for atom in route.atoms)

    def source_rows(self, route: Route) -> Tensor:
        """[num_rows]: where the route's rows lie in its source microbatch's output."""
        starts, total = {}, 0
        for atom in self.assignment.atoms(route.source):
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
