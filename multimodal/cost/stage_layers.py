"""The layers of each virtual stage of a plan, counted by kind and by the backward that is needed of them."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from multimodal.cost.layers.layer import Layer
from multimodal.cost.layers.registry import LAYER_KINDS, count_segments, describe_layer
from multimodal.cost.memoize import memoized
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.cuts import StageKey
from multimodal.values.parts.state_copies import sharers_of_stage
from multimodal.values.plan import Plan

LayerCounts = Mapping[tuple[str, BackwardNeed], int]


@dataclass(frozen=True)
class StageLayers:
    """Layers and weights of stages."""

    graph: ModelGraph
    plan: Plan
    vocab_size: int

    def tensor_size(self, stage: StageKey) -> int:
        """Return the tensor parallel size of a stage."""
        return self.plan.units[stage[0]].tensor_size(self.plan.virtual_stage(*stage))

    def counts(self, stage: StageKey) -> LayerCounts:
        """Return the number of layers of each kind and need in a stage."""
        return self._counted(stage[0], self.plan.virtual_stage(*stage).layers)[1]

    def in_order(self, stage: StageKey) -> Sequence[tuple[str, BackwardNeed]]:
        """Return kind and need of every layer of a stage, first to last."""
        return self._counted(stage[0], self.plan.virtual_stage(*stage).layers)[0]

    @memoized
    def _counted(self, unit: str, indices: range) -> tuple[Sequence[tuple[str, BackwardNeed]], LayerCounts]:
        layers, needs = self.graph.unit(unit).layers, self._needs[unit]
        found = [(layers[layer], needs[layer]) for layer in indices]
        return found, Counter(found)

    def exchanges_tokens(self, stage: StageKey) -> bool:
        """Return True if a stage has experts, so that replicas that share experts wait for each other in it."""
        return any(LAYER_KINDS[layer].exchanges_tokens for layer, _ in self.counts(stage))

    def num_segments(self, stage: StageKey) -> int:
        """Return the number of segments of a stage."""
        return count_segments(self.graph.unit(stage[0]), self.plan.virtual_stage(*stage).layers)

    @memoized
    def num_weights(self, stage: StageKey, *, trained_only: bool) -> int:
        """Return the weights of a stage, all tensor parallel ranks together."""
        unit, counts = stage[0], self.counts(stage).items()
        if trained_only:
            return sum(count * self.describe(unit, layer).num_trained_weights(need) for (layer, need), count in counts)
        return sum(count * self.describe(unit, layer).num_held_weights for (layer, _), count in counts)

    def state_shares(self, stage: StageKey, *, num_copies: int | None) -> list[tuple[tuple[int, ...], int]]:
        """Return the trained weights of a stage, all tensor parallel ranks together, by the ranks that share their state.

        num_copies: as in `RunOptions`. Ranks are those that share with the stage's first. Shared experts are listed apart.
        """
        unit, replica, index = stage
        sizes, start = self.plan.units[unit], self.plan.virtual_stage(*stage).layers.start
        if num_copies is None and not sizes.is_unlike:
            held = [each.virtual_stages[index].ranks[:: self.tensor_size(stage)] for each in sizes.replicas]
            return [
                (tuple(rank for ranks in held[replica % num_sharers :: num_sharers] for rank in ranks), num_weights)
                for num_weights, num_sharers in self.weights_by_sharers(stage, trained_only=True)
            ]
        of_layers = [self.describe(unit, layer).num_trained_weights(need) for layer, need in self.in_order(stage)]
        shared = sharers_of_stage(sizes, replica, index, num_copies=num_copies or 1)
        return [(ranks, sum(of_layers[layers.start - start : layers.stop - start])) for layers, ranks in shared]

    def weights_by_sharers(self, stage: StageKey, *, trained_only: bool) -> tuple[tuple[int, int], ...]:
        """Return (weights that one replica holds of a stage, number of replicas that share them); experts apart."""
        num_sharers = self.plan.units[stage[0]].expert_parallel_size
        num_weights = self.num_weights(stage, trained_only=trained_only)
        if num_sharers == 1:
            return ((num_weights, 1),)
        of_experts = sum(
            count * self.describe(stage[0], layer).num_expert_weights
            for (layer, need), count in self.counts(stage).items()
            if not trained_only or (need.trains_weights and not self.describe(stage[0], layer).adapted)
        )
        return (num_weights - of_experts, 1), (of_experts // num_sharers, num_sharers)

    def trained_weights(self, stage: StageKey) -> tuple[int, ...]:
        """Return the weights of every trained layer of a stage, upstream first; all tensor parallel ranks together."""
        trained = [each for each in self.in_order(stage) if each[1].trains_weights]
        return tuple(self.describe(stage[0], layer).num_trained_weights(need) for layer, need in trained)

    def describe(self, unit: str, kind: str) -> Layer:
        """Return the costs of a layer of this kind in a unit."""
        return describe_layer(self.graph, self.graph.unit(unit), kind, vocab_size=self.vocab_size)

    @cached_property
    def of_rank(self) -> Mapping[int, Sequence[StageKey]]:
        """Rank -> the stages it holds."""
        stages: dict[int, list[StageKey]] = defaultdict(list)
        for name, unit in self.plan.units.items():
            for replica_index, replica in enumerate(unit.replicas):
                for stage in replica.virtual_stages:
                    for rank in stage.ranks:
                        stages[rank].append((name, replica_index, stage.index))
        return stages

    @cached_property
    def _needs(self) -> Mapping[str, Sequence[BackwardNeed]]:
        return {
            unit.name: [layers_backward_need(self.graph, unit.name, range(layer, layer + 1)) for layer in range(len(unit.layers))]
            for unit in self.graph.units
        }
