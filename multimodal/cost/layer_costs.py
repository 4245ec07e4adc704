"""How long a model's layers compute on a cluster: the one answer that planners, the simulator and the emulation ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from multimodal.cost.analytic_curves import analytic_curves
from multimodal.cost.cluster import Cluster
from multimodal.cost.layer_collectives import layer_waiting
from multimodal.cost.layer_curves import LayerCurves, counted_tokens
from multimodal.cost.layer_flops import UnitLoad
from multimodal.cost.layer_profile import LayerProfile
from multimodal.cost.layer_seconds import NO_SECONDS, LayerSeconds
from multimodal.cost.quadratic import Quadratic
from multimodal.values.model_graph import LayerKind, ModelGraph

Recompute = Literal["selective", "full"]
"""What a transformer layer computes again in its backward: `selective` (core attention) or `full` (the whole layer)."""
_CurveKey = tuple[str, LayerKind, int, int]


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of single layers. Nothing here depends on what is frozen: `LayerSeconds.backward` applies that.

    Computations come from a profile or from the cluster's description; collectives always from the cluster's links.

    Raises ConfigError when the profile is of another model.
    """

    graph: ModelGraph
    cluster: Cluster
    vocab_size: int
    """Padded."""
    profile: LayerProfile | None = None
    """Measured curves; layers that it does not list are computed from the cluster's description."""

    def __post_init__(self) -> None:
        if self.profile is not None:
            self.profile.check(self.graph)

    def seconds(
        self,
        unit: str,
        kind: LayerKind,
        load: UnitLoad,
        *,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        recompute: Recompute | None = None,
        ranks: Sequence[int] | None = None,
    ) -> LayerSeconds:
        """Return the seconds of one layer of this kind over one microbatch; O(1).

        load: of the whole microbatch, before tensor and context parallelism divide it; an empty one takes no time. ranks: of the
        stage, for its collectives, as `Stage.ranks`; None: neighbours that begin at a node's first accelerator.
        """
        if not load.num_tokens:
            return NO_SECONDS
        curves = self.curves(unit, kind, tensor_parallel_size=tensor_parallel_size, context_parallel_size=context_parallel_size)
        neighbours = range(tensor_parallel_size * context_parallel_size)
        waits = self._waiting_curve(unit, kind, tensor_parallel_size, neighbours if ranks is None else tuple(ranks))
        waiting = waits.at(load.num_tokens, load.num_squared)
        counted = counted_tokens(self.graph.unit(unit).role, kind, load)
        forward, input_gradient, weight_gradient, attention = (curve.at(*counted) for curve in curves)
        num_passes = 1
        if kind is LayerKind.TRANSFORMER and recompute is not None:
            num_passes = 2 if recompute == "full" else 1
            input_gradient += forward if recompute == "full" else attention
        return LayerSeconds(
            forward + waiting, input_gradient + num_passes * waiting, weight_gradient, waiting, num_passes * waiting
        )

    def curves(self, unit: str, kind: LayerKind, *, tensor_parallel_size: int, context_parallel_size: int) -> LayerCurves:
        """Return what the layer's computations cost on one rank, without collectives and recomputation."""
        key = unit, kind, tensor_parallel_size, context_parallel_size
        if key not in self._curves:
            measured = self.profile.find(*key) if self.profile is not None else None
            self._curves[key] = measured or analytic_curves(
                self.graph,
                self.graph.unit(unit),
                kind,
                num_ranks=tensor_parallel_size * context_parallel_size,
                cluster=self.cluster,
                vocab_size=self.vocab_size,
            )
        return self._curves[key]

    def _waiting_curve(self, unit: str, kind: LayerKind, tensor_parallel_size: int, ranks: Sequence[int]) -> Quadratic:
        key = unit, kind, tensor_parallel_size, ranks
        if key not in self._waiting:
            self._waiting[key] = layer_waiting(
                self.graph.unit(unit), kind, tensor_parallel_size=tensor_parallel_size, ranks=ranks, cluster=self.cluster
            )
        return self._waiting[key]

    @cached_property
    def _curves(self) -> dict[_CurveKey, LayerCurves]:
        return {}

    @cached_property
    def _waiting(self) -> dict[tuple[str, LayerKind, int, Sequence[int]], Quadratic]:
        return {}
