"""What lengths that vary cost a pipeline, in closed form: its stages wait for the heaviest microbatch that is in them."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.unit_layout import UnitLayout
from multimodal.values.backward_need import layers_backward_need

NUM_DRAWN = 1024
"""Microbatches drawn from the lengths."""
SEED = 0
TIGHTNESS = 0.5
"""How much of a stage's wait for the heaviest microbatch in the pipeline 1F1B's slack leaves; an estimate's, not a result's."""


@dataclass(frozen=True)
class LengthSpread:
    """How uneven microbatches are. One per planning request."""

    request: PlanningRequest
    _works: dict[str, NDArray[np.float64]] = field(default_factory=dict, repr=False)
    _draws: dict[tuple[str, int], NDArray[np.float64]] = field(default_factory=dict, repr=False)
    _heaviest: dict[tuple[str, int, int], float] = field(default_factory=dict, repr=False)

    def slowdown(self, unit: str, *, micro_batch_size: int, num_stages: int) -> float:
        """Return how many times an average microbatch's time a full pipeline of so many stages takes for each.

        The stages work on as many microbatches at a time and go on together: about as fast as the heaviest of them.
        """
        if num_stages <= 1 or not self.request.lengths_vary:
            return 1.0
        sums = self._microbatches(unit, micro_batch_size)
        mean = float(sums.mean())
        if mean <= 0:
            return 1.0
        shares = (np.arange(len(sums) + 1) / len(sums)) ** num_stages
        heaviest = float(np.diff(shares) @ sums)  # the mean of the largest of num_stages draws
        return 1 + TIGHTNESS * (heaviest / mean - 1)

    def heaviest_seconds(self, unit: str, layout: UnitLayout) -> float:
        """Return the seconds that the heaviest sample spends in all stages of a unit: no step is shorter."""
        key = unit, layout.tensor_parallel_size, layout.context_parallel_size
        if key not in self._heaviest:
            loads = self.request.sample_loads[unit]
            heaviest = loads[int(np.argmax(self._seconds_of_samples(unit)))]
            self._heaviest[key] = self._seconds(unit, UnitLoad(*map(int, heaviest)), tensor=key[1], context=key[2])
        return self._heaviest[key]

    def _microbatches(self, unit: str, micro_batch_size: int) -> NDArray[np.float64]:
        """Work of microbatches of samples as they come, ascending."""
        key = unit, micro_batch_size
        if key not in self._draws:
            works = self._seconds_of_samples(unit)
            drawn = np.random.default_rng(SEED).integers(len(works), size=(NUM_DRAWN, micro_batch_size))
            self._draws[key] = np.sort(works[drawn].sum(axis=1))
        return self._draws[key]

    def _seconds_of_samples(self, unit: str) -> NDArray[np.float64]:
        """Seconds of each sample in one layer of the unit on one rank, the mean over all but the first and the last."""
        if unit not in self._works:
            rows, index = np.unique(self.request.sample_loads[unit].astype(np.int64), axis=0, return_inverse=True)
            costs = self.request.layer_costs
            body = self.request.graph.unit(unit).layers[1:-1]
            shares = {kind: count / len(body) for kind, count in Counter(body).items()}
            seconds = [
                sum(share * costs.seconds(unit, kind, UnitLoad(*row)).forward for kind, share in shares.items())
                for row in rows.tolist()
            ]
            self._works[unit] = np.array(seconds)[index.ravel()]
        return self._works[unit]

    def _seconds(self, unit: str, load: UnitLoad, *, tensor: int, context: int) -> float:
        request, described = self.request, self.request.graph.unit(unit)
        total = 0.0
        for kind in dict.fromkeys(described.layers):
            index = described.layers.index(kind)
            need = layers_backward_need(request.graph, unit, range(index, index + 1))
            one = request.layer_costs.seconds(
                unit, kind, load, tensor_parallel_size=tensor, context_parallel_size=context, recompute=request.recompute
            )
            total += described.layers.count(kind) * (one.forward + one.backward(kind, need))
        return total
