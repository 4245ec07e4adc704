"""Indices whose samples producers tokenise and measure are those that a rank builds by itself, and so are their errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save

from megatron.runtime.feed.producers import produced_items, wire
from megatron.runtime.feed.producers.produced_items import ProducedItems, describe_data_set
from multimodal.data.chat.text_settings import TextSettings
from multimodal.data.conversation import TextSegment
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.forms.segments import FileSegment, SegmentedSample
from multimodal.data.index.item_reader import ItemReader
from multimodal.data.index.sample_index import build_index
from multimodal.data.index.sample_indexer import Indexing, IndexOptions, SampleIndexer
from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import ConfigError, DataError
from tests.unit.runtime.feed.producers.conftest import GRAPH, TEXTS, TOKEN, Serving

OPTIONS = IndexOptions(48)
NUM_SAMPLES = 150


class NoTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        raise AssertionError("a rank tokenised")


@pytest.fixture
def lines(tmp_path: Path) -> list[dict[str, Any]]:
    """Samples of several kinds: with and without an image, too long, without a target, and with sound, which nothing takes."""
    Image.new("RGB", (32, 24)).save(tmp_path / "a.png")
    image, sound = {"type": "image", "path": "a.png"}, {"type": "audio", "path": "a.wav"}
    found = []
    for number in range(NUM_SAMPLES):
        text = {"type": "text", "role": "assistant", "text": "cats\ud800é" * (1 + number % 9)}
        segments = [[text], [image, text], [text, image], [sound, text], [{**text, "role": "user"}]][number % 5]
        found.append({"id": number, "segments": segments})
    return found


@pytest.fixture
def open_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ManifestSource]:
    """Write a manifest, and index it by producers or, without any, here."""
    monkeypatch.setattr(produced_items, "_BLOCK_WEIGHT", 2**17)  # eight samples

    def build(lines: list[Any], *producers: Serving, texts: TextSettings = TEXTS) -> ManifestSource:
        path = tmp_path / "manifest.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        files = open_sample_files(path)
        indexing: Indexing = SampleIndexer.index_all
        if producers:
            data_set = describe_data_set(GRAPH, path, texts=texts, options=OPTIONS)
            addresses, local = [each.address for each in producers], ItemReader(GRAPH, files)
            produced = ProducedItems(addresses, token=TOKEN, data_set=data_set, local=local)
            produced.check()
            indexing = produced.index_all
        tokenizer = NoTokenizer() if producers else ByteTokenizer()
        options = IndexOptions(OPTIONS.seq_length)
        return ManifestSource(files, graph=GRAPH, tokenizer=tokenizer, options=options, indexing=indexing)

    return build


def _check_alike(found: ManifestSource, expected: ManifestSource) -> None:
    assert (len(found), found.num_cut, dict(found.skipped)) == (len(expected), expected.num_cut, dict(expected.skipped))
    for index in range(len(expected)):
        assert found.lengths(index) == expected.lengths(index)
        np.testing.assert_array_equal(found.text(index).token_ids, expected.text(index).token_ids)
        np.testing.assert_array_equal(found.text(index).is_target, expected.text(index).is_target)
        assert found.wanted(index, 0) == expected.wanted(index, 0) if expected.lengths(index).items else True


def test_producers_index_as_a_rank_would(serve, lines, open_source):
    expected = open_source(lines)
    assert expected.num_cut and len(expected.skipped) == 2
    _check_alike(open_source(lines, serve(), serve()), expected)


@pytest.mark.parametrize("has_other", [True, False])
def test_what_a_lost_producer_owed_is_indexed_once(serve, lines, open_source, monkeypatch, has_other):
    """It closes its connection between two blocks; without another the rank has to tokenise."""
    expected, failing = open_source(lines), serve()
    asked = failing.close_after(3)
    if not has_other:
        monkeypatch.setattr(NoTokenizer, "encode", ByteTokenizer.encode)
    _check_alike(open_source(lines, failing, *([serve()] if has_other else [])), expected)
    assert asked[0] > 3


@pytest.mark.parametrize("faults", [("missing.png",), ("missing.png", "no JSON"), ("no JSON", "missing.png")])
def test_the_first_fault_is_told_whoever_finds_it(serve, lines, open_source, faults):
    wrong: list[Any] = list(lines)
    for place, fault in zip((37, 60), faults, strict=False):
        wrong[place] = fault if fault == "no JSON" else {"id": "x", "segments": [{"type": "image", "path": fault}]}
    with pytest.raises(DataError) as here:
        open_source(wrong)
    with pytest.raises(DataError) as there:
        open_source(wrong, serve(), serve())
    assert str(there.value) == str(here.value) and ", line 38" in str(here.value)


def test_another_tokenizer_is_refused_at_the_start(serve, tmp_path):
    (tmp_path / "manifest.jsonl").touch()
    data_set = json.loads(describe_data_set(GRAPH, tmp_path / "manifest.jsonl", texts=TEXTS, options=OPTIONS))
    local = ItemReader(GRAPH, open_sample_files(tmp_path))
    found = ProducedItems([serve().address], token=TOKEN, data_set=json.dumps({**data_set, "identity": "other"}), local=local)
    with pytest.raises(ConfigError, match="--producers .*other tokens there: the run's .* are other, the producer's are None"):
        found.check()


def test_samples_travel_as_they_are():
    segments = (
        TextSegment("user", "\ud800 \n"),
        FileSegment("image", "a", "vision", True, (3, 4)),
        FileSegment("image", "\0b"),
        FileSegment("audio", "c"),
        FileSegment("video", "d", "vision"),
    )
    block = wire.SampleBlock(3, (SegmentedSample("line 1", segments), SegmentedSample("", ())))
    assert wire.unpack_wanted(json.loads(json.dumps(wire.pack_wanted(block)))) == block


@pytest.mark.parametrize("said", [[], ["a"], [0, 1], [0, ["", {"kind": "film"}]], [0, ["", {"kind": "text", "role": 1}]]])
def test_samples_that_are_none_are_refused(said):
    with pytest.raises(wire.WireError, match="a request that is none"):
        wire.unpack_wanted(said)


def test_indices_that_are_none_are_refused():
    good, payload = wire.pack_index(build_index(["why", "why"]))
    assert wire.unpack_index(good, bytearray(payload), num_samples=2).skipped == {"why": 2}
    with pytest.raises(wire.WireError, match="an index that is none .of other than 3 samples"):
        wire.unpack_index(good, bytearray(payload), num_samples=3)
    arrays = load(payload)
    wrong: list[tuple[Any, bytes]] = [
        ([], payload),
        ({}, payload),
        ({**good, "summary": {}}, payload),
        (good, b""),
        (good, payload[:-1]),
        (good, payload.replace(b'"I32"', b'"I33"')),
        (good, save({name: array for name, array in arrays.items() if name != "paths"})),
        (good, save({**arrays, "items": np.zeros((0, 3), np.int64)})),
        (good, save({**arrays, "token_starts": np.array(0)})),
        (good, save({**arrays, "token_ids": np.zeros(1, np.int32)})),
    ]
    for said, values in wrong:
        with pytest.raises(wire.WireError, match="an index that is none"):
            wire.unpack_index(said, bytearray(values), num_samples=2)
