"""A data set of random numbers with chosen lengths, for exact comparisons."""

from dataclasses import dataclass

import numpy as np

from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.sample_lengths import ItemLengths, SampleLengths


@dataclass(frozen=True)
class SampleShape:
    """What a random sample looks like: its items as (unit, merged rows, merged columns), its text and target tokens.

    What a generator makes has no tokens in the LLM.
    """

    items: tuple[tuple[str, int, int], ...]
    num_text_tokens: int
    num_target_tokens: int


@dataclass(frozen=True)
class RandomSource:
    """Follows the SampleSource protocol; everything is drawn from (seed, index)."""

    graph: ModelGraph
    shapes: tuple[SampleShape, ...]
    vocab_size: int
    seed: int = 0

    def __len__(self) -> int:
        return len(self.shapes)

    def lengths(self, index: int) -> SampleLengths:
        shape = self.shapes[index]
        items, starts = [], []
        cursor, rest = 1, shape.num_text_tokens - 1
        for item, (unit, *_) in enumerate(shape.items):
            grid = self.item_grid(index, item)
            is_input = self.graph.unit(unit).role is Role.ENCODER
            image = self.graph.unit(unit).image
            assert image is not None
            num_outputs = image.num_output_tokens(grid) if is_input else 0
            items.append(ItemLengths(unit, image.num_tokens(grid), num_outputs))
            # A generator is given the hidden state of the token before.
            starts.append(cursor if is_input else cursor - 1)
            cursor += num_outputs
            if rest > 1 and item < len(shape.items) - 1:  # some text between items
                cursor, rest = cursor + 1, rest - 1
        return SampleLengths(index, tuple(items), shape.num_text_tokens, shape.num_target_tokens, tuple(starts))

    def text(self, index: int) -> SampleText:
        lengths, generator = self.lengths(index), np.random.default_rng((self.seed, index))
        is_target = np.zeros(lengths.num_tokens, dtype=bool)
        is_text = np.ones(lengths.num_tokens, dtype=bool)
        starts = []
        for item, (entry, start) in enumerate(zip(lengths.items, lengths.starts, strict=True)):
            starts.append((item, start, entry.num_output_tokens))
            is_text[start : start + entry.num_output_tokens] = False
        free = np.flatnonzero(is_text)
        is_target[generator.choice(free, size=lengths.num_target_tokens, replace=False)] = True
        tokens = generator.integers(0, self.vocab_size, size=(2, lengths.num_tokens))
        return SampleText(tokens[0], tokens[1], is_target, tuple(starts))

    def item(self, index: int, item_index: int) -> ItemPixels:
        grid = self.item_grid(index, item_index)
        image = self.graph.unit(self.shapes[index].items[item_index][0]).image
        assert image is not None
        generator = np.random.default_rng((self.seed, index, item_index))
        size = (grid[0] * grid[1], image.num_patch_values)
        return ItemPixels(generator.standard_normal(size).astype(np.float32), grid)

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        unit, rows, columns = self.shapes[index].items[item_index]
        image = self.graph.unit(unit).image
        assert image is not None
        return rows * image.merge_size, columns * image.merge_size
