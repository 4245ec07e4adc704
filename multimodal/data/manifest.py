"""Samples from a `manifest.jsonl`: texts, image files and sound files, indexed once, files decoded on demand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multimodal.data.audio.audio_files import read_audio, read_audio_length
from multimodal.data.audio.audio_processing import audio_grid, audio_to_patches
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
from multimodal.data.image_files import ManifestPaths, check_image_size, read_image, read_image_size
from multimodal.data.image_processing import image_grid
from multimodal.data.manifest_lines import AudioSegment, ImageSegment, ManifestLine, read_manifest_lines
from multimodal.data.sample_source import DEFAULT_MAX_PIXELS, ItemPixels, SampleText
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import DataError, ModelError
from multimodal.values.model_graph import AudioInput, ItemInput, ModelGraph, Role, Unit
from multimodal.values.sample_lengths import SampleLengths


@dataclass(frozen=True, slots=True)
class _IndexedItem:
    unit: Unit
    """The encoder that takes it, or the generator that is to make it."""
    path: str
    size: tuple[int, int]
    """(width, height) in pixels; of sound (samples at 16 kHz, 1)."""
    grid: tuple[int, int]
    """(rows, columns) of patches; of sound (frames, 1)."""


@dataclass(frozen=True, slots=True)
class _IndexedSample:
    where: str
    conversation: Conversation
    items: tuple[_IndexedItem, ...]
    """Those that fit into seq_length."""


class ManifestSource:
    """A `SampleSource` over a manifest; the whole text is tokenised when it is built, so that lengths are exact.

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
    ) -> None:
        """Index `path`, a manifest or the folder that holds a `manifest.jsonl`; O(bytes of the manifest).

        graph: its encoders take images and sound, but its generator, if it has one, makes images that are the assistant's;
        samples with something that no unit takes are left out.
        seq_length: longer samples are cut at the end (`build_conversation`).
        needs_items_first: images must come before the text of their sample, as --attention-mask prefix wants it.
        allows_outside_paths: image files may lie outside the manifest's folder (`ManifestPaths`).
        max_image_pixels: the largest image (width x height of its file) that is decoded.

        Raises DataError for a manifest that is missing, malformed or without a usable sample, for image files that are missing,
        too large or in a place where they may not be, and for images behind text where that is not allowed; ModelError for units
        that cannot take or make image files.
        """
        path = Path(path)
        self._manifest = path / "manifest.jsonl" if path.is_dir() else path
        self._graph = graph
        _check_channels(graph)
        self._tokenizer = tokenizer
        self._seq_length = seq_length
        self._needs_items_first = needs_items_first
        self._paths = ManifestPaths(self._manifest.parent, allows_outside=allows_outside_paths)
        self._max_image_pixels = max_image_pixels
        self._samples: list[_IndexedSample] = []
        skipped: Counter[str] = Counter()
        for line in read_manifest_lines(self._manifest):
            sample_or_reason = self._index(line)
            if isinstance(sample_or_reason, str):
                skipped[sample_or_reason] += 1
            else:
                self._samples.append(sample_or_reason)
        self.skipped = dict(skipped)
        self.num_cut = sum(sample.conversation.is_cut for sample in self._samples)
        self._check_not_empty()

    def __len__(self) -> int:
        """Count the usable samples."""
        return len(self._samples)

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index."""
        items = self._samples[index].items
        units, sizes = [item.unit.name for item in items], [_input_of(item.unit).num_tokens(item.grid) for item in items]
        return build_sample_lengths(self._samples[index].conversation, sample_id=index, units=units, sizes=sizes)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample."""
        return build_sample_text(self._samples[index].conversation, pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item; raises DataError when its file is damaged or not of the size that was indexed."""
        item, where = self._samples[index].items[item_index], self._samples[index].where
        found = _input_of(item.unit)
        if isinstance(found, AudioInput):
            return audio_to_patches(read_audio(item.path, num_samples=item.size[0], where=where), audio=found)
        return read_image(item.path, size=item.size, image_input=found, where=where)

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one image, (frames, 1) of a clip."""
        return self._samples[index].items[item_index].grid

    def _index(self, line: ManifestLine) -> _IndexedSample | str:
        """Return the sample, or the reason for which it is left out."""
        found: list[tuple[ImageSegment | AudioSegment, Unit]] = []
        for segment in line.segments:
            if not isinstance(segment, TextSegment):
                unit = self._unit_of(segment, where=line.where)
                if unit is None:
                    return _reason_of(segment)
                found.append((segment, unit))
        items = [self._index_item(segment, unit, where=line.where) for segment, unit in found]
        segments = _with_items(line.segments, items)
        conversation = build_conversation(segments, tokenizer=self._tokenizer, seq_length=self._seq_length)
        if not conversation.num_target_tokens:
            return f"without a target token among the first {self._seq_length} (seq_length)"
        if self._needs_items_first:
            _check_items_first(conversation, items, where=line.where)
        return _IndexedSample(line.where, conversation, tuple(items[: len(conversation.item_starts)]))

    def _unit_of(self, segment: ImageSegment | AudioSegment, *, where: str) -> Unit | None:
        """Return the unit that takes or makes an item; raises DataError where the item does not say which of several."""
        if isinstance(segment, AudioSegment):
            fitting = [unit for unit in self._graph.encoders if unit.audio is not None]
        else:
            made = [unit for unit in self._graph.generators if unit.image is not None]
            taken = [unit for unit in self._graph.encoders if unit.image is not None]
            fitting = made if segment.is_answer and made else taken
        if segment.unit is not None:
            return next((unit for unit in fitting if unit.name == segment.unit), None)
        if len(fitting) > 1:
            names = [unit.name for unit in fitting]
            raise DataError(
                f'{where}: {segment.path} might be for any of the units {", ".join(names)}; say for which: "unit": "{names[0]}"'
            )
        return fitting[0] if fitting else None

    def _index_item(self, segment: ImageSegment | AudioSegment, unit: Unit, *, where: str) -> _IndexedItem:
        path, found = self._paths.resolve(segment.path, where=where), _input_of(unit)
        if isinstance(segment, ImageSegment):
            size = segment.size or read_image_size(path, where=where)
            check_image_size(path, size=size, max_pixels=self._max_image_pixels, where=where)
        else:
            size = read_audio_length(path, where=where), 1
        try:
            if isinstance(found, AudioInput):
                return _IndexedItem(unit, path, size, audio_grid(size[0], audio=found))
            return _IndexedItem(unit, path, size, image_grid(width=size[0], height=size[1], image_input=found))
        except DataError as problem:
            raise DataError(f"{where}: {path}: {problem}, or remove that line") from problem

    def _check_not_empty(self) -> None:
        if self._samples:
            return
        if not self.skipped:
            raise DataError(f"{self._manifest}: the manifest is empty; expected one JSON object a line")
        reasons = "; ".join(f"{count} {'sample' if count == 1 else 'samples'} {reason}" for reason, count in self.skipped.items())
        raise DataError(
            f"{self._manifest}: no usable sample ({reasons}); use other data, another --model or a larger --seq-length"
        )


def _with_items(segments: Sequence[TextSegment | ImageSegment | AudioSegment], items: Sequence[_IndexedItem]) -> list[Segment]:
    """Return the segments of a sample with what its items become in the LLM."""
    remaining = iter(items)
    return [segment if isinstance(segment, TextSegment) else _item_segment(next(remaining)) for segment in segments]


def _item_segment(item: _IndexedItem) -> Segment:
    if item.unit.role is Role.GENERATOR:
        return GeneratedSegment()
    return ItemSegment(_input_of(item.unit).num_output_tokens(item.grid), is_sound=item.unit.audio is not None)


def _reason_of(segment: ImageSegment | AudioSegment) -> str:
    """Return why a sample is left out that has an item which no unit takes."""
    kind = "audio" if isinstance(segment, AudioSegment) else "images"
    return f"with {kind}{f' for {segment.unit!r}' if segment.unit else ''}, which no unit of the model takes"


def _check_items_first(conversation: Conversation, items: Sequence[_IndexedItem], *, where: str) -> None:
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
