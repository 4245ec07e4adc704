"""A few real documents of the corpus, as a data set for exact comparisons."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from multimodal.data.manifest import ManifestSource
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.data.tokenizer import build_tokenizer
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths
from tests.distributed.random_source import SampleShape

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "corpus"
"""Beside the repository."""
VOCAB_SIZE = 266
"""The byte tokenizer's 265, made even."""


@dataclass(frozen=True)
class CorpusSource:
    """Follows the SampleSource protocol, and tells what `GradientCase` asks of a RandomSource."""

    source: ManifestSource
    vocab_size: int = VOCAB_SIZE

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self, index: int) -> SampleLengths:
        return self.source.lengths(index)

    def text(self, index: int) -> SampleText:
        return self.source.text(index)

    def item(self, index: int, item_index: int) -> ItemPixels:
        return self.source.item(index, item_index)

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        return self.source.item_grid(index, item_index)

    @cached_property
    def shapes(self) -> tuple[SampleShape, ...]:
        """What all samples look like; an item's tokens in one row."""
        found = map(self.lengths, range(len(self)))
        return tuple(
            SampleShape(
                tuple((item.unit, 1, item.num_output_tokens) for item in sample.items),
                sample.num_text_tokens,
                sample.num_target_tokens,
            )
            for sample in found
        )


def read_documents(folder: Path, *, graph: ModelGraph, image_counts: tuple[int, ...], seq_length: int) -> CorpusSource:
    """Take the first samples of the corpus that have so many images and no audio; folder: for a manifest of these alone."""
    with (CORPUS / "manifest.jsonl").open() as lines:
        entries = [json.loads(line) for line in lines]
    chosen: list[str] = []
    for count in image_counts:
        entry = next(
            entry
            for entry in entries
            if [segment["type"] for segment in entry["segments"]].count("image") == count
            and all(segment["type"] != "audio" for segment in entry["segments"])
        )
        entries.remove(entry)
        for segment in entry["segments"]:
            if segment["type"] == "image":
                segment["path"] = str(CORPUS / segment["path"])
        chosen.append(json.dumps(entry))
    manifest = folder / "manifest.jsonl"
    manifest.write_text("\n".join(chosen))
    tokenizer = build_tokenizer("ByteTokenizer")
    return CorpusSource(
        ManifestSource(manifest, graph=graph, tokenizer=tokenizer, seq_length=seq_length, allows_outside_paths=True)
    )
