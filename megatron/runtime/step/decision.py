"""The decisions of a step (the place and time of every sample), and facts that follow from these and from lengths alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from multimodal.values.assignment import Assignment, Atom, Microbatch, MicrobatchPlace, Route, Routes
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.parts.cuts import Cuts
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape


@dataclass(frozen=True)
class StepDecision:
    """The decisions about one global batch, alike on every rank."""

    schedule: Schedule
    """The lowered schedule of the step's shape."""
    assignment: Assignment
    lengths: Mapping[int, SampleLengths]
    """Sample id -> lengths."""

    @property
    def shape(self) -> StepShape:
        """The schedule's shape."""
        return self.schedule.shape

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.shape.graph

    @property
    def plan(self) -> Plan:
        """The places of all layers."""
        return self.shape.plan

    @property
    def routes(self) -> Routes:
        """The hand-overs of microbatches between units."""
        return self.assignment.routes(self.graph)

    @property
    def cuts(self) -> Cuts:
        """The schedule's cuts of backwards and reductions."""
        return self.shape.cuts

    @cached_property
    def num_target_tokens(self) -> int:
        """Target tokens of the whole global batch."""
        return sum(sample.num_target_tokens for sample in self.lengths.values())

    @cached_property
    def loss_divisor(self) -> float:
        """The sum of the weights of all these tokens, by which the LLM's loss is divided."""
        return sum(sample.loss_weight * sample.num_target_tokens for sample in self.lengths.values())

    @cached_property
    def data_set_divisors(self) -> tuple[float, ...]:
        """The same sum for each data set of a mixture, up to the last one that is in the batch."""
        samples = self.lengths.values()
        weights = [sample.loss_weight * sample.num_target_tokens for sample in samples]
        return tuple(np.bincount([sample.data_set for sample in samples], weights).tolist())

    @property
    def loss_counts(self) -> Mapping[str | int, float]:
        """The divisors of sums of losses: by unit, and by the numbers of data sets if there are several."""
        counts: dict[str | int, float] = {self.graph.backbone.name: self.loss_divisor}
        counts |= self.num_generated_values.items()
        if len(self.data_set_divisors) > 1:
            counts |= enumerate(self.data_set_divisors)
        return counts

    @cached_property
    def num_generated_values(self) -> Mapping[str, int]:
        """Generator -> pixel values (emulated: tokens) that it makes in the global batch, by which its loss is divided."""
        num_tokens = {unit.name: 0 for unit in self.graph.generators}
        for item in (item for sample in self.lengths.values() for item in sample.items if item.unit in num_tokens):
            num_tokens[item.unit] += item.num_tokens
        num_values = ((unit.name, unit.item_input.num_patch_values if unit.item_input else 1) for unit in self.graph.generators)
        return {name: num_tokens[name] * count for name, count in num_values}

    @property
    def samples_in_words(self) -> frozenset[int]:
        """Samples with targets, and without items for generators."""
        trained = ((sample_id, sample.items) for sample_id, sample in self.lengths.items() if sample.num_target_tokens)
        return frozenset(key for key, items in trained if all(item.unit not in self._generators for item in items))

    @cached_property
    def num_tokens(self) -> int:
        """LLM tokens of the whole global batch."""
        return sum(sample.num_tokens for sample in self.lengths.values())

    def places_of(self, rank: int) -> Iterator[MicrobatchPlace]:
        """Yield the microbatches that pass through a rank, unit by unit."""
        for name, unit in self.plan.units.items():
            for replica in (index for index, each in enumerate(unit.replicas) if rank in each.ranks):
                for microbatch in range(self.assignment.num_microbatches(name, replica)):
                    yield MicrobatchPlace(name, replica, microbatch)

    def subsets(self, place: MicrobatchPlace) -> tuple[Microbatch, ...]:
        """Return the sample subsets that a microbatch runs as, each with an autograd graph of its own; one if it is not cut."""
        if place not in self.cuts.num_subsets:
            return (self.assignment.atoms(place),)
        return self.assignment.subsets(self.graph, place)

    def part_of(self, route: Route) -> int:
        """Return the index of the source's sample subset from which the route takes its rows."""
        return next(index for index, atoms in enumerate(self.subsets(route.source)) if route.atoms[0] in atoms)

    def num_tokens_of(self, place: MicrobatchPlace) -> int:
        """Return a microbatch's number of tokens inside its unit."""
        return sum(self.num_tokens_of_subsets(place))

    def num_tokens_of_subsets(self, place: MicrobatchPlace) -> tuple[int, ...]:
        """Return the number of tokens inside its unit of each sample subset of a microbatch."""
        return tuple(self._num_tokens(place.unit, atoms) for atoms in self.subsets(place))

    def _num_tokens(self, unit: str, atoms: Microbatch) -> int:
        if self.graph.unit(unit).role is Role.ENCODER:
            return sum(self.lengths[atom.sample_id].items[atom.item_index].inside(unit).num_tokens for atom in atoms)
        if self.graph.unit(unit).role is Role.GENERATOR:
            items = (item for atom in atoms for item in self.lengths[atom.sample_id].items)
            return sum(item.inside(unit).num_tokens for item in items if item.unit == unit)
        return sum(self.lengths[atom.sample_id].num_tokens for atom in atoms)

    def num_rows_of_route(self, route: Route) -> int:
        """Return the number of rows that travel along a route."""
        return sum(piece.num_rows for piece in self.pieces_of(route))

    def source_rows(self, route: Route) -> Tensor:
        """[num_rows]: positions of the route's rows in the output of the sample subset that it takes them from."""
        starts, total = {}, 0
        for atom in self.subsets(route.source)[self.part_of(route)]:
            for piece in self.output_of(route.source.unit, atom):
                starts[piece] = total
                total += piece.num_rows
        return torch.cat([torch.arange(starts[piece], starts[piece] + piece.num_rows) for piece in self.pieces_of(route)])

    def pieces_of(self, route: Route) -> list["OutputPiece"]:
        """Return the pieces that travel along a route, in order."""
        return [piece for atom in route.atoms for piece in self.output_of(route.source.unit, atom, route.target.unit)]

    def output_of(self, unit: str, atom: Atom, target: str | None = None) -> tuple["OutputPiece", ...]:
        """Return the output of an atom in its unit, in order; target: only the part that this unit consumes.

        That is an encoder's tokens; of the LLM, the states of `Unit.num_conditions` tokens for each item that a generator makes.
        """
        items = self.lengths[atom.sample_id].items
        if self.graph.unit(unit).role is Role.ENCODER:
            return (OutputPiece(atom, items[atom.item_index].inside(unit).num_output_tokens),)
        made = (
            (index, each.unit) for index, each in enumerate(items) if each.unit in ((target,) if target else self._generators)
        )
        return tuple(OutputPiece(Atom(atom.sample_id, index), self.graph.unit(name).num_conditions) for index, name in made)

    @cached_property
    def _generators(self) -> frozenset[str]:
        return frozenset(unit.name for unit in self.graph.generators)


class OutputPiece(NamedTuple):
    """Consecutive rows in a unit's output for a microbatch."""

    item: Atom
    num_rows: int
