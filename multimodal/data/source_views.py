"""Sources that view the samples of other sources: a subset, several one behind the other, other weights, or no pixels."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from multimodal.data.audio import SILENCE
from multimodal.data.global_batches import SplitPart
from multimodal.data.index.item_reader import expect_items, item_inputs
from multimodal.data.sample_source import ItemPixels, SampleSource, SampleText
from multimodal.values.errors import DataError
from multimodal.values.model_graph import AudioInput, ItemInput, ModelGraph
from multimodal.values.sample_lengths import SampleLengths, pass_items
from multimodal.values.units.items import Grid


class SourceView(ABC):
    """A `SampleSource` whose samples belong to other sources, under its own indices."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the samples."""

    @abstractmethod
    def _at(self, index: int) -> tuple[SampleSource, int]:
        """Return the source of a sample and its index there; raises IndexError beyond the end."""

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index here."""
        source, position = self._at(index)
        return replace(source.lengths(position), sample_id=index)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample."""
        source, position = self._at(index)
        return source.text(position)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item of a sample."""
        source, position = self._at(index)
        return source.item(position, item_index)

    def item_grid(self, index: int, item_index: int) -> Grid:
        """Return the grid of one item."""
        source, position = self._at(index)
        return source.item_grid(position, item_index)

    def expect_items(self, items: Sequence[tuple[int, int]]) -> None:
        """Announce the items that will be read next to the sources."""
        of_source: dict[int, tuple[SampleSource, list[tuple[int, int]]]] = {}
        for index, item_index in items:
            source, position = self._at(index)
            of_source.setdefault(id(source), (source, []))[1].append((position, item_index))
        for source, positions in of_source.values():
            expect_items(source, positions)


class SourceSubset(SourceView):
    """Some samples of a source, such as those of one split, or those of a global batch, addressed by their ids; or all."""

    def __init__(
        self, source: SampleSource, indices: Sequence[int] | npt.NDArray[np.int64] | Mapping[int, int] | None = None
    ) -> None:
        """indices: in `source`, of the samples in their order, or by their ids; None: all, by the same indices."""
        self._source, indices = source, range(len(source)) if indices is None else indices
        self._indices = indices if isinstance(indices, SplitPart | range | Mapping) else np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def _at(self, index: int) -> tuple[SampleSource, int]:
        return self._source, int(self._indices[index])


class JoinedSources(SourceView):
    """The samples of several sources, one source after another."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        """sources: at least one."""
        self._sources, self._starts = tuple(sources), np.cumsum([0, *map(len, sources)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _at(self, index: int) -> tuple[SampleSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = self._number(index)
        return self._sources[number], index - int(self._starts[number])

    def _number(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1


class Mixture(JoinedSources):
    """The samples of several data sets, which say of which they are."""

    def __init__(self, sources: Sequence[SampleSource], *, loss_weights: Sequence[float] = ()) -> None:
        """loss_weights: of all samples of each data set, in addition to their own; empty: 1."""
        super().__init__(sources)
        self._loss_weights = loss_weights or (1.0,) * len(sources)

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample."""
        found, number = super().lengths(index), self._number(index)
        return replace(found, data_set=number, loss_weight=found.loss_weight * self._loss_weights[number])


class PassedItems(SourceSubset):
    """The same samples, with lengths of items in all units that they pass through."""

    def __init__(self, source: SampleSource, *, graph: ModelGraph) -> None:
        """graph: its edges say which encoders feed others."""
        super().__init__(source)
        self._graph = graph

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample."""
        found = self._source.lengths(index)
        return replace(found, items=pass_items(self._graph, found.items))


class AveragedSamples(SourceSubset):
    """The same samples, each with the mean of its tokens' losses in place of their sum, times its own weight."""

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample."""
        found = self._source.lengths(index)
        return replace(found, loss_weight=found.loss_weight / max(1, found.num_target_tokens))


class BlankImages(SourceSubset):
    """The texts and lengths of a source with zeros (mid-grey) for pixels and with silence, to test if a model uses its items."""

    def __init__(self, source: SampleSource, *, graph: ModelGraph) -> None:
        """graph: gives the number of values of a token in each encoder."""
        super().__init__(source)
        self._inputs = {unit.name: unit.item_input for unit in graph.encoders if unit.item_input}

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Return an empty item of the same shape, without decoding it; an image that a generator makes stays as it is."""
        found = self._inputs.get(self._source.lengths(index).items[item_index].unit)
        if found is None:
            return self._source.item(index, item_index)
        return _blank_item(found, self._source.item_grid(index, item_index))

    def expect_items(self, items: Sequence[tuple[int, int]]) -> None:
        """Announce the items that are not empty and will be read next to the source."""
        kept = [each for each in items if self._source.lengths(each[0]).items[each[1]].unit not in self._inputs]
        expect_items(self._source, kept)


class ReadableItems(SourceSubset):
    """The same samples, with empty items of the promised lengths in the place of those that cannot be read."""

    def __init__(self, source: SampleSource, *, graph: ModelGraph) -> None:
        """graph: gives the number of values of a token in each unit."""
        super().__init__(source)
        self._inputs = item_inputs(graph)
        self.problems: dict[int, str] = {}
        """Index of a sample -> what is wrong with its first item that could not be read."""

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item, or note why not."""
        try:
            return self._source.item(index, item_index)
        except (DataError, OSError) as problem:
            self.problems.setdefault(index, str(problem))
        found = self._inputs[self._source.lengths(index).items[item_index].unit]
        return _blank_item(found, self._source.item_grid(index, item_index), is_bytes=True)


def _blank_item(found: ItemInput, grid: Grid, *, is_bytes: bool = False) -> ItemPixels:
    """Return an item of nothing: silence, or an image without a value; is_bytes: of bytes, as those beside it are."""
    if isinstance(found, AudioInput):
        silence = SILENCE if found.waveform is None else 0.0
        return ItemPixels(np.full((found.num_tokens(grid), found.num_patch_values), silence, np.float32), grid)
    num_patches = grid[0] * grid[1]
    if is_bytes:
        return ItemPixels(np.zeros((num_patches, found.num_pixel_values), np.uint8), grid)
    return ItemPixels(np.zeros((num_patches, found.num_patch_values), np.float32), grid)
