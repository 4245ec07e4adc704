"""One training step as one value: model graph, plan, assignment, and the cuts of the step's work."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from multimodal.values.action import Action, Coverage, LayerRange
from multimodal.values.arrays.length_arrays import LengthArrays, LengthBatch
from multimodal.values.arrays.rows import Integers
from multimodal.values.assignment import Assignment, Atom, MicrobatchPlace, PlacedAtoms, Routes
from multimodal.values.backward_need import BackwardNeed, stage_backward_need
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.parts.cuts import UNCUT, Cuts, SegmentCut, StageKey, StageSplit
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths

__all__ = ["UNCUT", "Cuts", "SegmentCut", "StageKey", "StageSplit", "StepGraph", "validate_assignment"]

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class StepGraph:
    """One step: its model, plan and samples, and the cuts of its work.

    `values/dependencies.py` defines the step's work and its needs; `values/step_work.py` numbers it.
    """

    graph: ModelGraph
    plan: Plan
    assignment: Assignment
    cuts: Cuts = UNCUT
    forward_only: bool = False
    """Leave backwards and reductions out (evaluation)."""
    _needs: dict[tuple[str, range], BackwardNeed] = field(default_factory=dict, init=False, repr=False)
    _variants: list["StepGraph"] = field(default_factory=list, init=False, repr=False)
    _made: dict[Callable[[Any], object], object] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone: values derived from them are larger, and can be derived again."""
        return StepGraph, (self.graph, self.plan, self.assignment, self.cuts, self.forward_only)

    def with_cuts(self, cuts: Cuts) -> "StepGraph":
        """Return this step with other cuts; the same value for the same cuts."""
        if not self._variants:
            self._variants.append(self)
        for step in self._variants:
            if step.cuts is cuts or step.cuts == cuts:
                return step
        step = replace(self, cuts=cuts)
        object.__setattr__(step, "_variants", self._variants)
        object.__setattr__(step, "_needs", self._needs)
        self._variants.append(step)
        return step

    def with_assignment(self, assignment: Assignment) -> "StepGraph":
        """Return this step for other samples; derived values are kept if the assignments have the same `shape`."""
        step = StepGraph(self.graph, self.plan, assignment, self.cuts, self.forward_only)
        if step.shape == self.shape:
            step._made.update(self._made)
        return step

    def once(self, make: Callable[["StepGraph"], Made]) -> Made:
        """Return `make(self)`, computed only once. It must depend on the shape of the assignment only."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast(Made, self._made[make])

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """Numbers of microbatches and the routes between them; steps of one shape have the same schedules. O(atoms log)."""
        counts = tuple((unit, placed.counts.tobytes()) for unit, placed in self.assignment.placed.items())
        return counts, self.routes.sources.tobytes(), self.routes.targets.tobytes()

    @property
    def routes(self) -> Routes:
        """All routes between units."""
        return self.assignment.routes(self.graph)

    def replica_routes(self, source: str, target: str) -> list[list[int]]:
        """Return the pairs of a source replica and a target replica that routes connect, each once."""
        placed = (self.assignment.placed[unit] for unit in (source, target))
        ends = (each.replica_of_microbatch[ends] for each, ends in zip(placed, self.routes.of_edge(source, target), strict=True))
        pairs: list[list[int]] = np.unique(np.column_stack(tuple(ends)), axis=0).tolist()
        return pairs

    def backward_need(self, unit: str, replica: int, stage: int) -> BackwardNeed:
        """Return the gradients that the backward of a virtual stage must compute; none in a step that only runs forwards."""
        if self.forward_only:
            return BackwardNeed.NONE
        like = unit, self.plan.virtual_stage(unit, replica, stage).layers
        if like not in self._needs:
            self._needs[like] = stage_backward_need(self.graph, self.plan, unit, replica, stage)
        return self._needs[like]

    def lanes_of(self, unit: str, replica: int, stage: int) -> tuple[int, ...]:
        """Return the lanes that together execute a virtual stage."""
        return self.plan.lanes_of_stage(unit, replica, stage)

    def item_ranks(self, unit: str, replica: int) -> tuple[int, ...]:
        """Return the ranks that need the pixels or sound of a replica's items.

        That is an encoder's first stage, which takes them, and a generator's last one, which is to make them; and no rank of the
        backbone, or of an encoder that takes what others give.
        """
        described = self.graph.unit(unit)
        if described.role is Role.BACKBONE or described.join is not None:
            return ()
        return self.plan.units[unit].replicas[replica].virtual_stages[0 if described.role is Role.ENCODER else -1].ranks

    def num_microbatches(self, unit: str, replica: int) -> int:
        """Return the number of microbatches of a replica."""
        return self.assignment.num_microbatches(unit, replica)

    @cached_property
    def microbatch_set(self) -> frozenset[MicrobatchPlace]:
        """All microbatches."""
        return frozenset(self.microbatches)

    @property
    def microbatches(self) -> tuple[MicrobatchPlace, ...]:
        """All microbatches, unit by unit in the graph's order, replica by replica."""
        return tuple(
            MicrobatchPlace(unit, replica, index)
            for unit in self.graph.unit_names
            for replica, count in enumerate(self.assignment.placed[unit].counts.tolist())
            for index in range(count)
        )

    @property
    def stages(self) -> tuple[StageKey, ...]:
        """All virtual stages, unit by unit in the graph's order, replica by replica."""
        return tuple(
            (unit, replica, stage)
            for unit in self.graph.unit_names
            for replica, each in enumerate(self.plan.units[unit].replicas)
            for stage in range(len(each.virtual_stages))
        )

    def reductions(self, unit: str, replica: int, stage: int) -> tuple[Coverage, ...]:
        """Return the part that each reduction of a trained stage covers, in the order in which they run.

        If replicas are not alike, these are trained ranges of layers that the same ranks hold, from the last to the first;
        reduced by layer, the first layer of each range is a piece of its own, since it may be the first layer of a stage.
        """
        layers, held = self.plan.virtual_stage(unit, replica, stage).layers, self.plan.units[unit]
        is_by_layer = (unit, stage) in self.cuts.reduced_by_layer
        if not held.is_unlike:
            return (LayerRange(1, len(layers)), LayerRange(0, 1)) if is_by_layer else (None,)
        ranges = [each for each in held.shared_ranges if each.start in layers]
        if is_by_layer:
            ranges = [part for each in ranges for part in (each[:1], each[1:])]
        trained = (each for each in reversed(ranges) if any(map(self.graph.unit(unit).is_trainable, each)))
        return tuple(LayerRange(each.start - layers.start, each.stop - layers.start) for each in trained)

    def begins_early(self, reduction: Action) -> bool:
        """Return True if a reduction by layer starts with the last microbatch's backward instead of after it."""
        is_by_layer = (reduction.unit, reduction.stage) in self.cuts.reduced_by_layer
        return is_by_layer and reduction.covers != self.reductions(*reduction[1:4])[-1]

    def consumers(self, microbatch: MicrobatchPlace) -> tuple[tuple[Atom, ...], ...]:
        """Return the sample subsets of an encoder's microbatch: its atoms, grouped by the microbatch that consumes them.

        Groups come in the order of their consumers (microbatch, then replica); atoms keep their packing order. With one subset
        per consumer, a subset's gradient arrives in one piece, and samples that the LLM defers come last (Entrain 4.5.3).
        """
        routes = self.routes.from_source.get(microbatch, ())
        ordered = sorted(routes, key=lambda route: (route.target.microbatch, route.target.replica, route.target.unit))
        position = {atom: index for index, atom in enumerate(self.assignment.atoms(microbatch))}
        return tuple(tuple(sorted(route.atoms, key=position.__getitem__)) for route in ordered)

    def sample_subsets(self, microbatch: MicrobatchPlace) -> tuple[tuple[Atom, ...], ...]:
        """Return the atoms of each piece that a microbatch runs in: one piece per consumer if its backward is cut, else one.

        The forward of a cut microbatch runs subset by subset, too, so that each subset has an autograd graph of its own. Packed
        samples do not attend to each other, so this changes no number.
        """
        return self.consumers(microbatch) if microbatch in self.cuts.num_subsets else (self.assignment.atoms(microbatch),)


def validate_assignment(step: StepGraph, lengths: Sequence[SampleLengths]) -> None:
    """Check that every atom of a global batch is placed exactly once, in a replica that exists, and that no microbatch is empty.

    A generator need not be assigned samples without anything for it to generate.
    """
    arrays = LengthBatch.of(lengths).arrays
    for name in step.graph.unit_names:
        if name not in step.assignment.placed:
            raise AssignmentError(f"the assignment says nothing of unit '{name}'")
        placed, num_replicas = step.assignment.placed[name], step.plan.units[name].data_parallel_size
        if placed.num_replicas != num_replicas:
            raise AssignmentError(f"unit '{name}': the assignment has {placed.num_replicas} replicas, the plan {num_replicas}")
        if not np.diff(placed.atom_starts).all():
            raise AssignmentError(f"unit '{name}': a microbatch is empty; leave it out")
        if problem := _misplaced(placed, arrays, role=step.graph.unit(name).role, unit=name):
            raise AssignmentError(f"unit '{name}': {problem}")


def _misplaced(placed: PlacedAtoms, arrays: LengthArrays, *, role: Role, unit: str) -> str:
    """Describe an error in the places of a unit's atoms; empty if there is none. O(atoms log)."""
    items = arrays.items_of(unit)
    of_items, indices = arrays.sample_ids[arrays.sample_of_item[items]], arrays.index_of_item[items]
    whole = np.full(len(arrays), -1)
    expected = _in_order(of_items, indices) if role is Role.ENCODER else _in_order(arrays.sample_ids, whole)
    found = _in_order(placed.sample_ids, placed.item_indices)
    if np.array_equal(found, expected):
        return ""
    atoms = {Atom(*row) for row in found.tolist()}
    if len(atoms) < len(found):
        repeated, count = next(each for each in sorted(Counter(map(tuple, found.tolist())).items()) if each[1] > 1)
        return f"{_describe(Atom(*repeated))} is placed {count} times; place it once"
    wanted = {Atom(*row) for row in expected.tolist()}
    needed = wanted if role is not Role.GENERATOR else {Atom(sample) for sample in of_items.tolist()}
    if missing := sorted(needed - atoms):
        return f"{_describe(missing[0])} is placed nowhere ({len(missing)} such)"
    if unknown := sorted(atoms - wanted):
        return f"{_describe(unknown[0])} is not in the global batch or not for this unit"
    return ""


def _in_order(sample_ids: Integers, item_indices: Integers) -> Integers:
    """Return atoms as rows, [num_atoms, 2], sorted."""
    order = np.lexsort((item_indices, sample_ids))
    return np.column_stack((sample_ids[order], item_indices[order]))


def _describe(atom: Atom) -> str:
    return f"sample {atom.sample_id}" if atom.item_index < 0 else f"item {atom.item_index} of sample {atom.sample_id}"
