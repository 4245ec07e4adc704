"""Several data sets as one that takes their samples in turn."""

from collections.abc import Sequence
from dataclasses import replace

from multimodal.data.sample_source import ItemPixels, SampleSource, SampleText
from multimodal.values.sample_lengths import SampleLengths


class InterleavedSource:
    """A `SampleSource` whose sample `index` is sample `index // n` of source `index % n` of n; as long as the shortest allows."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        """sources: at least one."""
        self._sources = tuple(sources)

    def __len__(self) -> int:
        """Count the samples."""
        return len(self._sources) * min(map(len, self._sources))

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index here."""
        source, position = self._at(index)
        found = source.lengths(position)
        return replace(found, sample_id=index)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample."""
        source, position = self._at(index)
        return source.text(position)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item of a sample."""
        source, position = self._at(index)
        return source.item(position, item_index)

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one item."""
        source, position = self._at(index)
        return source.item_grid(position, item_index)

    def _at(self, index: int) -> tuple[SampleSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._sources[index % len(self._sources)], index // len(self._sources)
