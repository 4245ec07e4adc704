"""Seconds of every layer of a unit for a microbatch of average samples: what planners sum over stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.backward_need import layers_backward_need


class LayerTimes(NamedTuple):
    """Per layer of a unit, one microbatch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        """Forward and backward together: what a stage of a full pipeline takes per microbatch."""
        return tuple(forward + backward for forward, backward in zip(self.forward, self.backward, strict=True))


@dataclass(frozen=True)
class PlanningTimes:
    """Looks layer times up, each computed once. One per planning request."""

    request: PlanningRequest
    is_frozen_aware: bool = True
    """False: every backward is taken to cost twice its forward (Cornstarch's baseline, 4.2)."""
    _known: dict[tuple[str, StageSize], LayerTimes] = field(default_factory=dict, repr=False)

    def of_unit(self, unit: str, size: StageSize) -> LayerTimes:
        """Return the seconds of each layer over a microbatch of average samples on a stage's ranks from a node's first on."""
        if (unit, size) not in self._known:
            self._known[unit, size] = self._compute(unit, size)
        return self._known[unit, size]

    def _compute(self, unit: str, size: StageSize) -> LayerTimes:
        request = self.request
        described = request.graph.unit(unit)
        load = request.load(unit, request.default_micro_batch_size)
        forward, backward = [], []
        # Layers of one kind in a unit have one shape and one backward.
        kinds = {}
        for index, kind in enumerate(described.layers):
            need = layers_backward_need(request.graph, unit, range(index, index + 1)) if kind not in kinds else None
            if need is not None:
                one = request.layer_costs.seconds(
                    unit,
                    kind,
                    load,
                    tensor_parallel_size=size.tensor,
                    context_parallel_size=size.context,
                    recompute=request.recompute,
                )
                kinds[kind] = (one.forward, one.backward(kind, need) if self.is_frozen_aware else 2 * one.forward)
            forward.append(kinds[kind][0])
            backward.append(kinds[kind][1])
        return LayerTimes(tuple(forward), tuple(backward))


def stage_times(times: LayerTimes, stages: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, ...]:
    """Return the seconds of each stage per microbatch, forward and backward; stages: layer ranges of each."""
    total = times.total
    return tuple(sum(sum(total[first:end]) for first, end in ranges) for ranges in stages)
