"""Samples from a `manifest.jsonl`: texts and image files, indexed once, images decoded on demand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from multimodal.values.model_graph import ImageInput, ModelGraph, Unit
from multimodal.values.sample_lengths import SampleLengths


@dataclass(frozen=True, slots=True)
class _IndexedImage:
    unit: Unit
    """The encoder that takes it, or the generator that is to make it."""
    path: str
    size: tuple[int, int]
    """(width, height) in pixels."""
    grid: tuple[int, int]
    """(rows, columns) of patches."""


@dataclass(frozen=True, slots=True)
class _IndexedSample:
    where: str
    conversation: Conversation
    images: tuple[_IndexedImage, ...]
    """The images that fit into seq_length."""


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

        graph: its encoder takes the images, but its generator, if it has one, makes those that are the assistant's; samples with
        images that no unit takes are left out.
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
        self._encoder = _image_unit(graph.encoders, verb="take")
        self._generator = _image_unit(graph.generators, verb="make")
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
        conversation, images = self._samples[index].conversation, self._samples[index].images
        units, sizes = (
            [image.unit.name for image in images],
            [_image_input(image.unit).num_tokens(image.grid) for image in images],
        )
        return build_sample_lengths(conversation, sample_id=index, units=units, sizes=sizes)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and image positions of one sample."""
        return build_sample_text(self._samples[index].conversation, pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one image; raises DataError when its file is damaged or not of the size that was indexed."""
        image = self._samples[index].images[item_index]
        return read_image(image.path, size=image.size, image_input=_image_input(image.unit), where=self._samples[index].where)

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one image."""
        return self._samples[index].images[item_index].grid

    def _index(self, line: ManifestLine) -> _IndexedSample | str:
        """Return the sample, or the reason for which it is left out."""
        if any(isinstance(segment, AudioSegment) for segment in line.segments):
            return "with audio, which no unit of the model takes"
        if any(isinstance(segment, ImageSegment) and self._unit_of(segment) is None for segment in line.segments):
            return "with images, which no unit of the model takes"
        segments: list[Segment] = []
        images: list[_IndexedImage] = []
        for segment in line.segments:
            if isinstance(segment, TextSegment):
                segments.append(segment)
            elif isinstance(segment, ImageSegment):
                images.append(self._index_image(segment, where=line.where))
                num_output_tokens = _image_input(images[-1].unit).num_output_tokens(images[-1].grid)
                is_made = images[-1].unit is self._generator
                segments.append(GeneratedSegment() if is_made else ItemSegment(num_output_tokens))
        conversation = build_conversation(segments, tokenizer=self._tokenizer, seq_length=self._seq_length)
        if not conversation.num_target_tokens:
            return f"without a target token among the first {self._seq_length} (seq_length)"
        if self._needs_items_first:
            _check_items_first(conversation, images, where=line.where)
        return _IndexedSample(line.where, conversation, tuple(images[: len(conversation.item_starts)]))

    def _unit_of(self, segment: ImageSegment) -> Unit | None:
        return self._generator if segment.is_answer and self._generator else self._encoder

    def _index_image(self, segment: ImageSegment, *, where: str) -> _IndexedImage:
        path = self._paths.resolve(segment.path, where=where)
        size = segment.size or read_image_size(path, where=where)
        check_image_size(path, size=size, max_pixels=self._max_image_pixels, where=where)
        unit = self._unit_of(segment)
        assert unit is not None
        try:
            return _IndexedImage(unit, path, size, image_grid(width=size[0], height=size[1], image_input=_image_input(unit)))
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


def _check_items_first(conversation: Conversation, images: Sequence[_IndexedImage], *, where: str) -> None:
    item_index = find_item_behind_text(conversation)
    if item_index is not None:
        raise DataError(
            f"{where}: {images[item_index].path} stands behind text, but --attention-mask prefix has images before all of "
            "a sample's text; put the images first there, or use --attention-mask embedded"
        )


def _image_unit(units: Sequence[Unit], *, verb: str) -> Unit | None:
    """Find the unit that takes, or makes, the manifest's images."""
    with_images = [unit for unit in units if unit.image is not None]
    if len(with_images) > 1:
        names = ", ".join(unit.name for unit in with_images)
        raise ModelError(f"units {names} all {verb} images, and a manifest does not say which image is whose; keep one of them")
    for unit in with_images:
        if unit.image is not None and unit.image.in_channels not in (1, 3):
            raise ModelError(
                f"unit '{unit.name}': in_channels is {unit.image.in_channels}, but image files have 1 (grey) or 3 (RGB)"
            )
    return with_images[0] if with_images else None


def _image_input(unit: Unit) -> ImageInput:
    assert unit.image is not None
    return unit.image
