"""Samples from a `manifest.jsonl` or data in another form: texts, images and sound, indexed once, decoded on demand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import islice

import numpy as np

from multimodal.data.chat.chat_format import ChatFormat
from multimodal.data.conversation import build_sample_lengths, build_sample_text
from multimodal.data.forms.sample_files import SampleFiles
from multimodal.data.image_files import FRAME_MARK
from multimodal.data.index.index_cache import IndexCache
from multimodal.data.index.item_reader import ItemDecoder, ItemReader, WantedItem, item_inputs
from multimodal.data.index.sample_index import SampleIndex, join_indices
from multimodal.data.index.sample_indexer import Indexing, IndexOptions, SampleIndexer
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.arrays.rows import Integers
from multimodal.values.errors import DataError, ModelError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.units.items import Grid


class ManifestSource:
    """A `SampleSource` over data on disk; all text is tokenised when its index is built, so that lengths are exact.

    Samples that the model cannot use are left out and counted in `skipped`; every fault of the manifest is a DataError.
    """

    skipped: Mapping[str, int]
    """Reason for leaving samples out -> number of such samples."""
    num_cut: int
    """Number of samples that were longer than seq_length and were cut at the end."""

    def __init__(
        self,
        files: SampleFiles,
        *,
        graph: ModelGraph,
        tokenizer: Tokenizer,
        options: IndexOptions,
        chat: ChatFormat | None = None,
        cache: IndexCache | None = None,
        decoder: ItemDecoder | None = None,
        indexing: Indexing = SampleIndexer.index_all,
    ) -> None:
        """Index `files`, data in any form; O(their bytes), unless `cache` has the index.

        graph: its encoders take images, videos and sound; its generator, if it has one, makes the assistant's images; samples
        with items that no unit takes are left out. chat: writes conversations by a model's template; None: in Braid's own format.
        cache: keeps indices; None: the index is built, and not kept. decoder: decodes items; None: this process does, on request.
        indexing: tokenises texts and measures items, if there is no index yet; by default this process does.

        Raises DataError for a manifest that is missing, malformed or without a usable sample, for image files that are missing,
        too large or outside of the allowed folder, and for images behind text if that is not allowed; ModelError for units that
        cannot take or make image files.
        """
        self._graph, self._inputs = graph, item_inputs(graph)
        for unit in graph.units:
            if unit.image is not None and unit.image.in_channels not in (1, 3):
                raise ModelError(
                    f"unit '{unit.name}': in_channels is {unit.image.in_channels}, but image files have 1 (grey) or 3 (RGB)"
                )
        self._decoder = decoder or ItemReader(graph, files)
        self._tokenizer = tokenizer
        indexer = SampleIndexer(graph, files=files, tokenizer=tokenizer, chat=chat, options=options)

        def build(done: int = 0) -> Iterator[SampleIndex]:
            return indexing(indexer, islice(files.samples(), done, None))

        if cache:
            # Everything that the index depends on, beside the tokenizer.
            units = [repr((unit.name, unit.role, unit.image, unit.audio)) for unit in graph.units]
            units += [repr((unit.name, unit.queries)) for unit in graph.units if unit.queries is not None]
            units += [repr(edge) for edge in graph.edges if graph.backbone.name not in edge]
            facts = [str(files.path.absolute()), files.digest, *units, repr(astuple(options))]
            self._samples = cache.get(files.folder, name=str(files.path), depends_on=facts, build=build)
        else:
            self._samples = join_indices(build())
        self.skipped = self._samples.skipped
        self.num_cut = self._samples.num_cut
        if not len(self) and not self.skipped:
            raise DataError(f"{files.path}: the manifest is empty; expected one JSON object a line")
        if not len(self):
            reasons = [f"{count} {'sample' if count == 1 else 'samples'} {reason}" for reason, count in self.skipped.items()]
            raise DataError(
                f"{files.path}: no usable sample ({'; '.join(reasons)}); use other data, another --model or a larger --seq-length"
            )

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_tokens(self) -> Integers:
        """[num_samples] tokens of each sample in the LLM."""
        return np.diff(self._samples.arrays["token_starts"])

    @property
    def shows_single_frames(self) -> bool:
        """True if among the first items there are frames of videos that are images to the model."""
        has_frames = FRAME_MARK.encode() in self._samples.arrays["paths"][: 2**20].tobytes()
        return has_frames and not any(unit.image.video for unit in self._graph.item_encoders if unit.image is not None)

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index."""
        items = [self._samples.item(index, item_index) for item_index in range(self._samples.num_items(index))]
        units = [item.unit for item in items]
        sizes = [self._inputs[item.unit].num_tokens(item.grid) for item in items]
        return build_sample_lengths(self._samples.conversation(index), sample_id=index, units=units, sizes=sizes)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample."""
        return build_sample_text(self._samples.conversation(index), pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item; raises DataError if its file is damaged or not of the indexed size."""
        return self._decoder.read(self.wanted(index, item_index))

    def expect_items(self, items: Sequence[tuple[int, int]]) -> None:
        """Announce the items that will be read next."""
        self._decoder.expect([self.wanted(*each) for each in items])

    def item_grid(self, index: int, item_index: int) -> Grid:
        """Return the grid of one item."""
        return self._samples.item(index, item_index).grid

    def wanted(self, index: int, item_index: int) -> WantedItem:
        """Return what decodes an item."""
        return WantedItem(self._samples.item(index, item_index), self._samples.where(index))
