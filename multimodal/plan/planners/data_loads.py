"""The work of the samples that a plan is made for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.unit_load import UnitLoad, sample_load
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths


@dataclass(frozen=True)
class DataLoads:
    """The loads of all samples on all units, each figure computed once."""

    graph: ModelGraph
    lengths: tuple[SampleLengths, ...]

    @cached_property
    def of_samples(self) -> Mapping[str, NDArray[np.float64]]:
        """Unit -> [num_samples, 4]: the load of each sample, with the columns of `UnitLoad`."""
        width = len(UnitLoad._fields)
        return {
            unit.name: np.array([sample_load(unit, sample) for sample in self.lengths], dtype=np.float64).reshape(-1, width)
            for unit in self.graph.units
        }

    @cached_property
    def vary(self) -> bool:
        """True if samples differ, so that balancing matters."""
        return any(bool((loads != loads[0]).any()) for loads in self.of_samples.values())

    @cached_property
    def mean(self) -> Mapping[str, tuple[float, ...]]:
        """Unit -> the mean load of a sample."""
        return {name: tuple(loads.mean(axis=0).tolist()) for name, loads in self.of_samples.items()}

    @cached_property
    def idle_units(self) -> frozenset[str]:
        """Units for which none of the samples has work."""
        return frozenset(name for name, load in self.mean.items() if not load[0] and name != self.graph.backbone.name)

    def of_average(self, unit: str, num_samples: float) -> UnitLoad:
        """Return the load of this many average samples on a unit."""
        return UnitLoad(*(round(num_samples * each) for each in self.mean[unit]))

    @cached_property
    def longest_items(self) -> Mapping[str, int]:
        """Unit -> the tokens of the longest of its items."""
        longest: dict[str, int] = {}
        passes = (each for sample in self.lengths for item in sample.items for each in (item.passes or (item,)))
        for item in passes:
            longest[item.unit] = max(longest.get(item.unit, 0), item.num_tokens)
        return longest
