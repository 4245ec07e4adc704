"""Indices on disk: as in memory, found again, and never one that does not fit."""

import io
import json
import logging
import multiprocessing
import os
import signal
import tracemalloc
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.beside.energon import write_rows
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.forms.segments import SegmentedSample
from multimodal.data.global_batches import DataPart, GlobalBatches, split_indices
from multimodal.data.index import sample_indexer
from multimodal.data.index.index_cache import FOLDER_NAME, IndexCache, watch_indexing
from multimodal.data.index.sample_index import SampleIndex, build_index, read_index, write_index
from multimodal.data.index.sample_indexer import IndexOptions, SampleIndexer, gather
from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.model_graph import ModelGraph
from tests.unit.data.conftest import DataFolder, assert_same

TEXT = {"type": "text", "role": "assistant", "text": "cats\ud800é"}
IMAGE = {"type": "image", "path": "a.png"}
CACHE = IndexCache("bytes")


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.num_texts = 0

    def encode(self, text: str) -> list[int]:
        self.num_texts += 1
        return super().encode(text)


@pytest.fixture
def open_cached(data: DataFolder, graph: ModelGraph, tmp_path: Path) -> Any:
    """Index two samples with a cache; returns the source and the number of texts that were tokenised."""
    data.image("a.png", (24, 16))
    data.manifest([[IMAGE, TEXT, IMAGE], [TEXT], [{"type": "audio", "path": "a.wav"}, TEXT]])

    def build(cache: IndexCache | None = CACHE, **options: Any) -> tuple[ManifestSource, int]:
        tokenizer = CountingTokenizer()
        given = {"graph": options.pop("graph", graph), "options": IndexOptions(**{"seq_length": 99, **options})}
        return ManifestSource(open_sample_files(tmp_path), tokenizer=tokenizer, cache=cache, **given), tokenizer.num_texts

    return build


def test_an_index_is_found_again_and_says_the_same(open_cached, tmp_path):
    fresh, num_texts = open_cached(None)
    assert num_texts == 2 and not (tmp_path / FOLDER_NAME).exists()
    assert open_cached()[1] == 2
    (written,) = (tmp_path / FOLDER_NAME).iterdir()
    found, num_texts = open_cached()
    assert num_texts == 0
    assert_same(found, fresh)
    with pytest.raises(IndexError, match="item 2 of sample 0, which has 2"):
        found.item(0, 2)
    assert written.stat().st_mode & 0o777 == 0o755


def test_everything_that_matters_makes_another_index(open_cached, tmp_path, text_graph, painter_graph):
    open_cached()
    for cache, options in (
        (IndexCache("other tokenizer"), {}),
        (CACHE, {"seq_length": 98}),
        (CACHE, {"overlong": "skip"}),
        (CACHE, {"graph": text_graph}),
        (CACHE, {"graph": painter_graph}),
        (CACHE, {"max_image_pixels": 24 * 16}),
        (CACHE, {"allows_outside_paths": True}),
    ):
        assert open_cached(cache, **options)[1] > 0 and open_cached(cache, **options)[1] == 0
    manifest = tmp_path / "manifest.jsonl"
    before = manifest.stat()
    manifest.write_text(manifest.read_text().replace("cats", "dogs"))
    os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    source, num_texts = open_cached()
    assert num_texts == 2 and b"dogs" in bytes(source.text(1).token_ids.astype(np.uint8))


def test_damaged_indices_are_built_again(open_cached, tmp_path):
    open_cached()
    (written,) = (tmp_path / FOLDER_NAME).iterdir()
    for name, content in (("token_ids", b""), ("index.json", b"{}"), ("paths", b"a.p"), ("items", None)):
        if content is None:
            (written / name).unlink()
        else:
            (written / name).write_bytes(content)
        assert read_index(written) is None
        assert open_cached()[1] == 2 and open_cached()[1] == 0


def test_a_folder_of_others_leaves_the_index_in_the_users_cache(open_cached, tmp_path, monkeypatch):
    (tmp_path / FOLDER_NAME).write_text("no folder can be made here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert open_cached()[1] == 2 and open_cached()[1] == 0
    assert len(list((tmp_path / "cache" / "braid" / "index").iterdir())) == 1
    (tmp_path / "elsewhere").write_text("here neither")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert open_cached()[1] == 2 and open_cached()[1] == 2


def test_an_index_may_be_kept_elsewhere_and_its_place_is_told(open_cached, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cache = IndexCache("bytes", chosen=tmp_path / "mine")
    assert open_cached(cache)[1] == 2 and open_cached(cache)[1] == 0
    (place,) = (tmp_path / "mine").iterdir()
    assert not (tmp_path / FOLDER_NAME).exists()
    kept = "(elsewhere: --data-cache-path DIR; it may be removed)"
    assert caplog.messages == [f"{tmp_path / 'manifest.jsonl'}: indexed into {place} {kept}"]
    (tmp_path / "file").write_text("no folder can be made here")
    with pytest.raises(
        ConfigError, match=r"--data-cache-path .*file: the index cannot be written \(.*\); give a folder that can"
    ):
        open_cached(IndexCache("bytes", chosen=tmp_path / "file"))


@pytest.mark.parametrize("chosen", [None, "mine"])
def test_data_that_cannot_be_read_are_not_taken_for_a_folder_that_cannot_be_written(chosen, tmp_path):
    def build(done: int) -> Iterator[SampleIndex]:
        yield build_index(["why"])
        raise PermissionError(13, "Permission denied", "part-2.jsonl")

    cache = IndexCache("bytes", chosen=tmp_path / chosen if chosen else None)
    with pytest.raises(DataError, match=r"the data cannot be read \(.*part-2.jsonl.*\); make them readable"):
        cache.get(tmp_path, name="data", depends_on=(), build=build)


def test_a_kept_index_is_not_overwritten(tmp_path):
    """Two runs may write the same at once: the first stays, and nothing hidden is left."""
    write_index(lambda done: [build_index(["why"])], tmp_path / "index" / "a")
    write_index(lambda done: [], tmp_path / "index" / "a")
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["a"]
    assert json.loads((tmp_path / "index" / "a" / "index.json").read_text())["skipped"] == {"why": 1}
    found = read_index(tmp_path / "index" / "a")
    assert found is not None and len(found) == 0


def test_blocks_of_several_processes_are_one_index(data, two_encoder_graph, tmp_path, monkeypatch):
    """Units are met in another order in every block, and one block has no items."""
    data.image("a.png", (24, 16))
    clip = {"type": "audio", "path": data.audio("a.wav", 1600)}
    images = [{**IMAGE, "unit": unit} for unit in ("vision", "sketch")]
    none = {"type": "image", "path": "a.png", "unit": "else"}
    samples = [[images[1], TEXT], [TEXT], [TEXT], [TEXT], [clip, TEXT], [images[0], TEXT, clip], [none, TEXT], [TEXT]]
    samples.append([clip, TEXT])
    whole = data.open(samples, graph=two_encoder_graph)
    monkeypatch.setattr(sample_indexer, "BLOCK_SIZE", 2)
    monkeypatch.setattr(sample_indexer.os, "sched_getaffinity", lambda process: {0, 1, 2})
    for options in ({}, {"cache": CACHE}):
        found = data.open(samples, graph=two_encoder_graph, **options)
        assert len(whole) == 8
        assert_same(found, whole)
    assert len([*(tmp_path / FOLDER_NAME).iterdir()]) == 1
    with pytest.raises(DataError, match="line 8 .*gone.png does not exist"):
        data.open([*samples[:7], [{**IMAGE, "path": "gone.png", "unit": "vision"}, TEXT], b"{"], graph=two_encoder_graph)


def in_blocks(
    indexer: SampleIndexer, samples: Iterable[SegmentedSample], *, killed_behind: int | None = None
) -> Iterator[SampleIndex]:
    """Index two samples at a time, and kill the process behind so many blocks."""
    for number, block in enumerate(gather(samples, weight=lambda sample: 1, most=2)):
        if number == killed_behind:
            os.kill(os.getpid(), signal.SIGKILL)
        yield indexer.index_block(block)


@pytest.mark.parametrize(
    ("change", "num_texts"),
    [
        (lambda folder: None, 3),
        (lambda folder: (folder / "manifest.jsonl").open("a").write("\n"), 6),
        (lambda folder: os.truncate(*folder.glob(f"{FOLDER_NAME}/.writing-*/token_ids"), 9), 6),
        (lambda folder: [(each / "index.json").write_text("{") for each in folder.glob(f"{FOLDER_NAME}/.writing-*")], 6),
        (lambda folder: os.utime(*folder.glob(f"{FOLDER_NAME}/.writing-*"), (0, 0)), 6),
    ],
)
def test_an_index_that_was_killed_goes_on(change, num_texts, data, tmp_path):
    """Of seven samples four were indexed, one of which is left out."""
    data.image("a.png", (24, 16))
    sound = {"type": "audio", "path": "a.wav"}
    manifest = data.manifest([[IMAGE, TEXT, IMAGE], [sound, TEXT], [TEXT], [TEXT], [IMAGE, TEXT], [TEXT], [TEXT]])
    killed = multiprocessing.get_context("fork").Process(
        target=data.open, args=(manifest,), kwargs={"cache": CACHE, "indexing": partial(in_blocks, killed_behind=2)}
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and not [*tmp_path.glob(f"{FOLDER_NAME}/[!.]*")]
    change(tmp_path)
    tokenizer = CountingTokenizer()
    found = data.open(manifest, cache=CACHE, indexing=in_blocks, tokenizer=tokenizer)
    assert (tokenizer.num_texts, len(found)) == (num_texts, 6)
    assert_same(found, whole := data.open(manifest))
    assert [found.wanted(0, 1), found.wanted(3, 0)] == [whole.wanted(0, 1), whole.wanted(3, 0)]


BLOCKS = [build_index(["why"] * number) for number in (2, 1, 3)]


def test_a_hundred_million_samples_are_opened_in_little_memory(tmp_path):
    count = 10**8
    write_rows(tmp_path / "index", count)
    tracemalloc.start()
    index = read_index(tmp_path / "index")
    assert index is not None and len(index) == count and index.num_cut == 0
    train = split_indices(count, split="969,30,1", seed=1).train
    drawn = [train[sample.source_index] for sample in GlobalBatches((DataPart(len(train)),), 64, seed=1).batch(10**6)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len({*drawn}) == 64 and peak < 1e8


def watched(console: Console, seconds: list[float]) -> list[SampleIndex]:
    passing = iter(seconds)
    return list(watch_indexing(iter(BLOCKS), path="data.json", console=console, clock=lambda: next(passing)))


def test_a_log_gets_a_line_now_and_then(caplog):
    caplog.set_level(logging.INFO)
    console = Console(file=io.StringIO())
    assert watched(console, [0.0, 10.0, 31.0, 31.0, 40.0]) == BLOCKS
    assert caplog.messages == ["data.json: indexed 3 samples so far"]
    caplog.set_level(logging.WARNING)
    assert watched(console, []) == BLOCKS and len(caplog.messages) == 1


def test_a_terminal_gets_a_bar(caplog):
    caplog.set_level(logging.INFO)
    shown = io.StringIO()
    assert watched(Console(file=shown, force_terminal=True, width=80), [0.0]) == BLOCKS
    assert "indexing data.json: 6 samples" in shown.getvalue() and not caplog.messages
