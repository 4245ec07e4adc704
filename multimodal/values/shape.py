"""The shape of a step: everything that its schedule depends on, and nobody's samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from multimodal.values.action import Action, Coverage, LayerRange
from multimodal.values.arrays.microbatches import MicrobatchCounts, MicrobatchPlace, PickledAlone, in_subset_order
from multimodal.values.arrays.routes import RouteEnds
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.cuts import UNCUT, Cuts, ReplicaKey, StageKey
from multimodal.values.plan import Plan


@dataclass(frozen=True, eq=False)
class StepShape(PickledAlone):
    """The shape of one step: its model and plan, its numbers of microbatches, the routes between these, and the cuts of its work.

    Steps of equal shapes have the same schedules. `values/work/step_work.py` numbers the work of a shape.
    """

    graph: ModelGraph
    plan: Plan
    counts: Mapping[str, MicrobatchCounts]
    """The microbatches of each unit."""
    routes: RouteEnds
    """The microbatches that hand something to each other."""
    cuts: Cuts = UNCUT
    forward_only: bool = False
    """Leave backwards and reductions out (evaluation)."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepShape):
            return NotImplemented
        mine, theirs = ((each._numbers, each.graph, each.plan, each.cuts) for each in (self, other))
        return self is other or mine == theirs

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _numbers(self) -> tuple[object, ...]:
        counts = tuple((unit, each.microbatch_starts.tobytes()) for unit, each in self.counts.items())
        return self.forward_only, counts, self.routes.sources.tobytes(), self.routes.targets.tobytes()

    @cached_property
    def _hash(self) -> int:
        """Made of what usually differs: equality compares all of plan and cuts."""
        sizes = tuple((unit.data_parallel_size, unit.num_virtual_stages) for unit in self.plan.units.values())
        cuts = self.cuts
        of_cuts = len(cuts.split), len(cuts.num_subsets), len(cuts.segments), cuts.reduced_by_layer, cuts.gathers_parameters
        return hash((self._numbers, sizes, of_cuts))

    def with_cuts(self, cuts: Cuts) -> "StepShape":
        """Return this shape with other cuts; this very one if they are its own."""
        return self if self.cuts is cuts or self.cuts == cuts else replace(self, cuts=cuts)

    @cached_property
    def linked_replicas(self) -> list[tuple[ReplicaKey, ReplicaKey]]:
        """The pairs of a source replica and a target replica that routes connect, each once, edge by edge."""
        found: list[tuple[ReplicaKey, ReplicaKey]] = []
        for edge in self.graph.edges:
            routes = zip(edge, self.routes.of_edge(*edge), strict=True)
            replicas = [self.counts[unit].replica_of_microbatch[ends] for unit, ends in routes]
            pairs = np.unique(np.column_stack(replicas), axis=0).tolist()
            found += [((edge[0], given), (edge[1], taken)) for given, taken in pairs]
        return found

    @cached_property
    def _need_of_layers(self) -> Callable[[str, range], BackwardNeed]:
        """Computed once for alike stages."""
        return cache(partial(layers_backward_need, self.graph))

    def backward_need(self, unit: str, replica: int, stage: int) -> BackwardNeed:
        """Return the gradients that the backward of a virtual stage must compute; none in a step that only runs forwards."""
        if self.forward_only:
            return BackwardNeed.NONE
        return self._need_of_layers(unit, self.plan.virtual_stage(unit, replica, stage).layers)

    def num_microbatches(self, unit: str, replica: int) -> int:
        """Return the number of microbatches of a replica."""
        return int(self.counts[unit].counts[replica])

    @property
    def microbatches(self) -> tuple[MicrobatchPlace, ...]:
        """All microbatches, unit by unit in the graph's order, replica by replica."""
        return tuple(
            MicrobatchPlace(unit, replica, index)
            for unit in self.graph.unit_names
            for replica, count in enumerate(self.counts[unit].counts.tolist())
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

    def consumers(self, microbatch: MicrobatchPlace) -> tuple[MicrobatchPlace, ...]:
        """Return the microbatches that a microbatch hands something to, one for each of its sample subsets, in their order."""
        return in_subset_order(self.routes.targets_of.get(microbatch, ()))
