"""Samples from a `manifest.jsonl` or data in another form: texts, images and sound, indexed once, files decoded on demand."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from multimodal.data.audio.audio_files import read_audio_length
from multimodal.data.audio.audio_processing import audio_grid
from multimodal.data.chat.chat_format import ChatFormat
from multimodal.data.conversation import (
    Conversation,
    GeneratedSegment,
    ItemSegment,
    Segment,
    TextSegment,
    build_conversation,
    build_sample_lengths,
    build_sample_text,
    find_item_behind_text,
)
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.forms.segments import EMBEDDED, AudioSegment, ImageSegment, SegmentedSample
from multimodal.data.image_files import ManifestPaths, check_image_size, read_image_size
from multimodal.data.image_processing import image_grid, num_tiles
from multimodal.data.index.index_cache import IndexCache
from multimodal.data.index.item_reader import ItemDecoder, ItemReader, WantedItem, item_inputs
from multimodal.data.index.sample_index import IndexedItem, IndexedSample, SampleIndex, build_index
from multimodal.data.sample_source import DEFAULT_MAX_PIXELS, ItemPixels, SampleText
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import DataError, ModelError
from multimodal.values.model_graph import AudioInput, ItemInput, ModelGraph, Role, Unit
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.units.item_passes import count_llm_tokens


class ManifestSource:
    """A `SampleSource` over data on disk; the whole text is tokenised when its index is built, so that lengths are exact.

    Samples that the model cannot use are left out and counted in `skipped`; every fault of the manifest is a DataError.
    """

    skipped: Mapping[str, int]
    """Reason for which samples were left out -> their number."""
    num_cut: int
    """Samples that were longer than seq_length and lost their end."""

    def __init__(
        self,
        path: str | Path,
        *,
        graph: ModelGraph,
        tokenizer: Tokenizer,
        seq_length: int,
        needs_items_first: bool = False,
        allows_outside_paths: bool = False,
        max_image_pixels: int = DEFAULT_MAX_PIXELS,
        chat: ChatFormat | None = None,
        cache: IndexCache | None = None,
        decoder: ItemDecoder | None = None,
    ) -> None:
        """Index `path`, data of one of the forms that `open_sample_files` knows; O(bytes of it), unless `cache` has the index.

        graph: its encoders take images and sound, but its generator, if it has one, makes images that are the assistant's;
        samples with something that no unit takes are left out.
        seq_length: longer samples are cut at the end (`build_conversation`).
        needs_items_first: images must come before the text of their sample, as --attention-mask prefix wants it.
        allows_outside_paths: image files may lie outside the manifest's folder (`ManifestPaths`).
        max_image_pixels: the largest image (width x height of its file) that is decoded.
        chat: writes conversations by a model's template; None: in turns of Braid's own.
        cache: keeps indices; None: the index is built, and not kept.
        decoder: decodes items; None: this process does, when they are asked for.

        Raises DataError for a manifest that is missing, malformed or without a usable sample, for image files that are missing,
        too large or in a place where they may not be, and for images behind text where that is not allowed; ModelError for units
        that cannot take or make image files.
        """
        self._files = open_sample_files(path)
        self._graph = graph
        _check_channels(graph)
        self._decoder = decoder or ItemReader(item_inputs(graph), embedded=self._files.embedded)
        self._tokenizer = tokenizer
        self._chat = chat
        self._seq_length = seq_length
        self._needs_items_first = needs_items_first
        self._paths = ManifestPaths(self._files.folder, allows_outside=allows_outside_paths)
        self._max_image_pixels = max_image_pixels
        options = (seq_length, needs_items_first, allows_outside_paths, max_image_pixels)
        facts = self._facts(options)
        self._samples = cache.get(self._files.folder, depends_on=facts, build=self._build) if cache else self._build()
        self.skipped = self._samples.skipped
        self.num_cut = self._samples.num_cut

    def __len__(self) -> int:
        """Count the usable samples."""
        return len(self._samples)

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index."""
        items = [self._samples.item(index, item_index) for item_index in range(self._samples.num_items(index))]
        return build_sample_lengths(
            self._samples.conversation(index),
            sample_id=index,
            units=[item.unit for item in items],
            sizes=[_input_of(self._graph.unit(item.unit)).num_tokens(item.grid) for item in items],
        )

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample."""
        return build_sample_text(self._samples.conversation(index), pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item; raises DataError when its file is damaged or not of the size that was indexed."""
        return self._decoder.read(self._wanted(index, item_index))

    def expect_items(self, items: Sequence[tuple[int, int]]) -> None:
        """Tell which items will be asked for next."""
        self._decoder.expect([self._wanted(*each) for each in items])

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one image, (frames, 1) of a clip."""
        return self._samples.item(index, item_index).grid

    def _wanted(self, index: int, item_index: int) -> WantedItem:
        return WantedItem(self._samples.item(index, item_index), self._samples.where(index))

    def _facts(self, options: tuple[object, ...]) -> list[str]:
        """Spell everything that the index depends on, beside the tokenizer."""
        units = [repr((unit.name, unit.role, unit.image, unit.audio)) for unit in self._graph.units]
        units += [repr((unit.name, unit.queries)) for unit in self._graph.units if unit.queries is not None]
        units += [repr(edge) for edge in self._graph.edges if self._graph.backbone.name not in edge]
        return [str(self._files.path.absolute()), self._files.digest, *units, repr(options)]

    def _build(self) -> SampleIndex:
        skipped: Counter[str] = Counter()
        index = build_index(self._usable(skipped), skipped=skipped)
        self._check_not_empty(index)
        return index

    def _usable(self, skipped: Counter[str]) -> Iterator[IndexedSample]:
        for sample in self._files.samples():
            sample_or_reason = self._index(sample)
            if isinstance(sample_or_reason, str):
                skipped[sample_or_reason] += 1
            else:
                yield sample_or_reason

    def _index(self, sample: SegmentedSample) -> IndexedSample | str:
        """Return the sample, or the reason for which it is left out."""
        found: list[tuple[ImageSegment | AudioSegment, Unit]] = []
        for segment in sample.segments:
            if not isinstance(segment, TextSegment):
                unit = self._unit_of(segment, where=sample.where)
                if unit is None:
                    return _reason_of(segment)
                found.append((segment, unit))
        tiles = [self._index_item(segment, unit, where=sample.where) for segment, unit in found]
        segments = _with_items(sample.segments, tiles, [unit for _, unit in found], graph=self._graph)
        conversation, items = self._tokenise(segments, where=sample.where), [*chain.from_iterable(tiles)]
        if not conversation.num_target_tokens:
            return f"without a target token among the first {self._seq_length} (seq_length)"
        if self._needs_items_first:
            _check_items_first(conversation, items, where=sample.where)
        return IndexedSample(sample.where, conversation, tuple(items[: len(conversation.item_starts)]))

    def _tokenise(self, segments: Sequence[Segment], *, where: str) -> Conversation:
        if self._chat is not None:
            return self._chat.build(segments, seq_length=self._seq_length, where=where)
        return build_conversation(segments, tokenizer=self._tokenizer, seq_length=self._seq_length)

    def _opened(self, path: str) -> tuple[str, bytes | None]:
        """Return what messages call an image, and its bytes where it is no file."""
        return ("its image", self._files.embedded(path)) if path.startswith(EMBEDDED) else (path, None)

    def _unit_of(self, segment: ImageSegment | AudioSegment, *, where: str) -> Unit | None:
        """Return the unit that takes or makes an item; raises DataError where the item does not say which of several."""
        if isinstance(segment, AudioSegment):
            fitting = [unit for unit in self._graph.item_encoders if unit.audio is not None]
        else:
            made = [unit for unit in self._graph.generators if unit.image is not None]
            taken = [unit for unit in self._graph.item_encoders if unit.image is not None]
            fitting = made if segment.is_answer and made else taken
        if segment.unit is not None:
            return next((unit for unit in fitting if unit.name == segment.unit), None)
        if len(fitting) > 1:
            names = [unit.name for unit in fitting]
            raise DataError(
                f'{where}: {segment.path} might be for any of the units {", ".join(names)}; say for which: "unit": "{names[0]}"'
            )
        return fitting[0] if fitting else None

    def _index_item(self, segment: ImageSegment | AudioSegment, unit: Unit, *, where: str) -> list[IndexedItem]:
        """Return an item, or the tiles of an image."""
        found = _input_of(unit)
        path = segment.path if segment.path.startswith(EMBEDDED) else self._paths.resolve(segment.path, where=where)
        name = path
        if isinstance(segment, ImageSegment):
            name, content = self._opened(path)
            size = segment.size or read_image_size(name, content=content, where=where)
            check_image_size(name, size=size, max_pixels=self._max_image_pixels, where=where)
        elif path.startswith(EMBEDDED):
            raise DataError(f"{where}: sound inside a data set cannot be read; save it as files, and name these")
        else:
            size = read_audio_length(path, where=where), 1
        try:
            if isinstance(found, AudioInput):
                return [IndexedItem(unit.name, path, size, audio_grid(size[0], audio=found))]
            grid = image_grid(width=size[0], height=size[1], image_input=found)
            count = num_tiles(width=size[0], height=size[1], image_input=found)
            return [IndexedItem(unit.name, path, size, grid, tile) for tile in range(count)]
        except DataError as problem:
            raise DataError(f"{where}: {name}: {problem}, or remove that line") from problem

    def _check_not_empty(self, index: SampleIndex) -> None:
        if len(index):
            return
        if not index.skipped:
            raise DataError(f"{self._files.path}: the manifest is empty; expected one JSON object a line")
        reasons = "; ".join(
            f"{count} {'sample' if count == 1 else 'samples'} {reason}" for reason, count in index.skipped.items()
        )
        raise DataError(
            f"{self._files.path}: no usable sample ({reasons}); use other data, another --model or a larger --seq-length"
        )


def _with_items(
    segments: Sequence[TextSegment | ImageSegment | AudioSegment],
    tiles: Sequence[Sequence[IndexedItem]],
    units: Sequence[Unit],
    *,
    graph: ModelGraph,
) -> list[Segment]:
    """Return the segments of a sample with what its items become in the LLM; tiles: of each; units: those that take them."""
    remaining = zip(tiles, units, strict=True)
    return [segment if isinstance(segment, TextSegment) else _item_segment(*next(remaining), graph=graph) for segment in segments]


def _item_segment(tiles: Sequence[IndexedItem], unit: Unit, *, graph: ModelGraph) -> Segment:
    if unit.role is Role.GENERATOR:
        return GeneratedSegment()
    num_output_tokens = sum(count_llm_tokens(graph, unit, tile.grid) for tile in tiles)
    return ItemSegment(num_output_tokens, is_sound=unit.audio is not None, num_tiles=len(tiles))


def _reason_of(segment: ImageSegment | AudioSegment) -> str:
    """Return why a sample is left out that has an item which no unit takes."""
    kind = "audio" if isinstance(segment, AudioSegment) else "images"
    return f"with {kind}{f' for {segment.unit!r}' if segment.unit else ''}, which no unit of the model takes"


def _check_items_first(conversation: Conversation, items: Sequence[IndexedItem], *, where: str) -> None:
    item_index = find_item_behind_text(conversation)
    if item_index is not None:
        raise DataError(
            f"{where}: {items[item_index].path} stands behind text, but --attention-mask prefix has images before all of "
            "a sample's text; put the images first there, or use --attention-mask embedded"
        )


def _check_channels(graph: ModelGraph) -> None:
    for unit in graph.units:
        if unit.image is not None and unit.image.in_channels not in (1, 3):
            raise ModelError(
                f"unit '{unit.name}': in_channels is {unit.image.in_channels}, but image files have 1 (grey) or 3 (RGB)"
            )


def _input_of(unit: Unit) -> ItemInput:
    assert unit.item_input is not None
    return unit.item_input
