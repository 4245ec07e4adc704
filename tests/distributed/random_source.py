"""A data set of random numbers with chosen lengths, for exact comparisons."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multimodal.data.audio import frames_to_patches, samples_to_patches
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.values.model_graph import AudioInput, ItemInput, ModelGraph, Role
from multimodal.values.sample_lengths import ItemLengths, SampleLengths, pass_item, pass_items
from multimodal.values.units.items import Grid


@dataclass(frozen=True)
class SampleShape:
    """What a random sample looks like: its items as (unit, merged rows, merged columns), its text and target tokens.

    A clip of sound is (unit, frames, 1), or (unit, samples, 1); a step of a video has its time behind these, and those behind its
    first one, at 0, follow each other. What a generator makes has no tokens in the LLM.
    """

    items: tuple[tuple[str, int, int] | tuple[str, int, int, int], ...]
    num_text_tokens: int
    num_target_tokens: int


@dataclass(frozen=True)
class RandomSource:
    """Follows the SampleSource protocol; everything is drawn from (seed, index)."""

    graph: ModelGraph
    shapes: tuple[SampleShape, ...]
    vocab_size: int
    seed: int = 0
    num_between: int = 1
    """Text tokens between two items, where there are as many."""

    def __len__(self) -> int:
        return len(self.shapes)

    def lengths(self, index: int) -> SampleLengths:
        shape = self.shapes[index]
        items, starts = [], []
        cursor, rest = 1, shape.num_text_tokens - 1
        for item, (unit, *_) in enumerate(shape.items):
            grid = self.item_grid(index, item)
            is_input = self.graph.unit(unit).role is Role.ENCODER
            found = self._input(unit)
            alone = self.graph.unit(unit).num_output_tokens(grid) if is_input else 0
            items.append(ItemLengths(unit, found.num_tokens(grid), alone))
            num_outputs = pass_item(self.graph, items[-1]).num_output_tokens
            # A generator is given the hidden state of the token before.
            starts.append(cursor if is_input else cursor - 1)
            cursor += num_outputs
            is_followed = item < len(shape.items) - 1 and not any(shape.items[item + 1][3:])
            if rest > self.num_between and is_followed:
                cursor, rest = cursor + self.num_between, rest - self.num_between
        return SampleLengths(index, pass_items(self.graph, items), shape.num_text_tokens, shape.num_target_tokens, tuple(starts))

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
        grid, found = self.item_grid(index, item_index), self._input(self.shapes[index].items[item_index][0])
        if isinstance(found, AudioInput) and found.waveform is not None:
            return samples_to_patches(self._numbers(index, item_index, grid[:1]), audio=found)
        if isinstance(found, AudioInput):
            return frames_to_patches(self.frames(index, item_index), grid, audio=found)
        if found.latents is not None:
            size = (grid[0] * grid[1], found.num_pixel_values)
            pixels = np.random.default_rng((self.seed, index, item_index)).integers(256, size=size, dtype=np.uint8)
            return ItemPixels(pixels, grid)
        return ItemPixels(self._numbers(index, item_index, (grid[0] * grid[1], found.num_patch_values)), grid)

    def frames(self, index: int, item_index: int) -> npt.NDArray[np.float32]:
        """[max_frames, num_mel_bins]: a clip's spectrogram, and what follows it."""
        found = self._input(self.shapes[index].items[item_index][0])
        assert isinstance(found, AudioInput)
        return self._numbers(index, item_index, (2 * found.max_tokens, found.num_mel_bins))

    def item_grid(self, index: int, item_index: int) -> Grid:
        unit, rows, columns, *time = self.shapes[index].items[item_index]
        found = self._input(unit)
        size = 1 if isinstance(found, AudioInput) else found.merge_size
        return (rows * size, columns * size, time[0]) if time else (rows * size, columns * size)

    def _input(self, unit: str) -> ItemInput:
        found = self.graph.unit(unit).item_input
        assert found is not None
        return found

    def _numbers(self, index: int, item_index: int, size: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return np.random.default_rng((self.seed, index, item_index)).standard_normal(size).astype(np.float32)
