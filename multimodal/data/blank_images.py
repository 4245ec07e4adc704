"""A data set without its pixels, to see whether a model really looks at the images."""

import numpy as np

from multimodal.data.sample_source import ItemPixels, SampleSource, SampleText
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths


class BlankImages:
    """A `SampleSource` with the texts and lengths of another one and zeros (mid-grey) for pixels; decodes nothing."""

    def __init__(self, source: SampleSource, *, graph: ModelGraph) -> None:
        """`graph` says how many values a patch of each encoder has."""
        self._source = source
        self._patch_dims = {unit.name: unit.image.in_channels * unit.image.patch_size**2 for unit in graph.encoders if unit.image}

    def __len__(self) -> int:
        """Count the samples."""
        return len(self._source)

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample, as the source has them."""
        return self._source.lengths(index)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample, as the source has them."""
        return self._source.text(index)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Zeros of the item's shape; what a generator is to make stays as it is."""
        item = self._source.lengths(index).items[item_index]
        if item.unit not in self._patch_dims:
            return self._source.item(index, item_index)
        patches = np.zeros((item.num_tokens, self._patch_dims[item.unit]), dtype=np.float32)
        return ItemPixels(patches, self._source.item_grid(index, item_index))

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one item, as the source has it."""
        return self._source.item_grid(index, item_index)
