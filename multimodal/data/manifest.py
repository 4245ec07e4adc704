"""Samples from a `manifest.jsonl`: texts and image files, indexed once, images decoded on demand."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multimodal.data.conversation import Conversation, ItemSegment, Segment, TextSegment, build_conversation, build_sample_text
from multimodal.data.image_processing import image_grid, read_image, read_image_size
from multimodal.data.manifest_lines import AudioSegment, ImageSegment, ManifestLine, read_manifest_lines
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import DataError, ModelError
from multimodal.values.model_graph import ImageInput, ModelGraph, Unit
from multimodal.values.sample_lengths import ItemLengths, SampleLengths


@dataclass(frozen=True, slots=True)
class _IndexedImage:
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
    """Those that fit into seq_length."""


class ManifestSource:
    """A `SampleSource` over a manifest; the whole text is tokenised when it is built, so that lengths are exact.

    Samples that the model cannot use are left out and counted in `skipped`; every fault of the manifest is a DataError.
    """

    skipped: Mapping[str, int]
    """Why samples were left out -> how many."""
    num_cut: int
    """Samples that were longer than seq_length and lost their end."""

    def __init__(self, path: str | Path, *, graph: ModelGraph, tokenizer: Tokenizer, seq_length: int) -> None:
        """Index `path`, a manifest or the folder that holds a `manifest.jsonl`; O(bytes of the manifest).

        graph: its encoder takes the images; without one, samples with images are left out.
        seq_length: longer samples are cut at the end (`build_conversation`).

        Raises DataError for a manifest that is missing, malformed or without a usable sample and for image files that are
        missing; ModelError for an encoder that cannot take image files.
        """
        path = Path(path)
        self._manifest = path / "manifest.jsonl" if path.is_dir() else path
        self._encoder = _image_encoder(graph)
        self._tokenizer = tokenizer
        self._seq_length = seq_length
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
        conversation = self._samples[index].conversation
        grids = [image.grid for image in self._samples[index].images]
        outputs = [num_output_tokens for _, _, num_output_tokens in conversation.item_starts]
        name = self._encoder.name if self._encoder else ""
        return SampleLengths(
            sample_id=index,
            items=tuple(
                ItemLengths(name, rows * columns, output) for (rows, columns), output in zip(grids, outputs, strict=True)
            ),
            num_text_tokens=len(conversation.token_ids) - sum(outputs),
            num_target_tokens=conversation.num_target_tokens,
        )

    def text(self, index: int) -> SampleText:
        """Tokens, labels and image positions of one sample."""
        return build_sample_text(self._samples[index].conversation, pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one image; raises DataError when its file is damaged or not of the size that was indexed."""
        image = self._samples[index].images[item_index]
        return read_image(image.path, size=image.size, image_input=self._image_input, where=self._samples[index].where)

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one image."""
        return self._samples[index].images[item_index].grid

    @property
    def _image_input(self) -> ImageInput:
        assert self._encoder is not None and self._encoder.image is not None
        return self._encoder.image

    def _index(self, line: ManifestLine) -> _IndexedSample | str:
        """Return the sample, or why it is left out."""
        if any(isinstance(segment, AudioSegment) for segment in line.segments):
            return "with audio, which no unit of the model takes"
        if self._encoder is None and any(isinstance(segment, ImageSegment) for segment in line.segments):
            return "with images, which no unit of the model takes"
        segments: list[Segment] = []
        images: list[_IndexedImage] = []
        for segment in line.segments:
            if isinstance(segment, TextSegment):
                segments.append(segment)
            elif isinstance(segment, ImageSegment):
                images.append(self._index_image(segment, where=line.where))
                rows, columns = images[-1].grid
                segments.append(ItemSegment(rows * columns // self._image_input.merge_size**2))
        conversation = build_conversation(segments, tokenizer=self._tokenizer, seq_length=self._seq_length)
        if not conversation.num_target_tokens:
            return f"without a target token among the first {self._seq_length} (seq_length)"
        return _IndexedSample(line.where, conversation, tuple(images[: len(conversation.item_starts)]))

    def _index_image(self, segment: ImageSegment, *, where: str) -> _IndexedImage:
        path = os.path.join(self._manifest.parent, segment.path)
        if not os.path.isfile(path):
            raise DataError(f"{where}: {path} does not exist; restore the file or remove that line")
        size = segment.size or read_image_size(path, where=where)
        try:
            return _IndexedImage(path, size, image_grid(width=size[0], height=size[1], image_input=self._image_input))
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


def _image_encoder(graph: ModelGraph) -> Unit | None:
    """Find the unit that takes the manifest's images."""
    encoders = [unit for unit in graph.encoders if unit.image is not None]
    if len(encoders) > 1:
        names = ", ".join(unit.name for unit in encoders)
        raise ModelError(f"units {names} all take images, and a manifest does not say which image is whose; keep one of them")
    for unit in encoders:
        if unit.image is not None and unit.image.in_channels not in (1, 3):
            raise ModelError(
                f"unit '{unit.name}': in_channels is {unit.image.in_channels}, but image files have 1 (grey) or 3 (RGB)"
            )
    return encoders[0] if encoders else None
