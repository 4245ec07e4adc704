"""Token counts from the headers of images, against those that transformers' own processors give, for 1,000 random sizes."""

import gzip
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageFile

from megatron.runtime.feed.packing import pack_encoder_microbatch, pack_language_microbatch
from multimodal.data.image_processing import image_grid, num_tiles
from multimodal.data.length_table import read_length_table, uniform_lengths, write_length_table
from multimodal.data.manifest import ManifestSource
from multimodal.data.source_views import SourceSubset
from multimodal.values.assignment import Atom
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput, ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.data.conftest import DataFolder

SIZES = [(random.Random(seed).randint(1, 4000), random.Random(-seed - 1).randint(30, 3000)) for seed in range(1000)]
"""(width, height), 20 of them thinner than Qwen2-VL's rule allows."""


def qwen2_5_vl(image: ImageInput) -> Callable[[int, int], int]:
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": image.min_pixels, "longest_edge": image.max_pixels}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=image.patch_size, merge_size=2, temporal_patch_size=2)
    return count(Qwen2_5_VLProcessor, image_processor=processor)


def llava(strategy: str) -> Callable[[ImageInput], Callable[[int, int], int]]:
    def build(image: ImageInput) -> Callable[[int, int], int]:
        from transformers.models.llava.processing_llava import LlavaProcessor

        processor = SimpleNamespace(crop_size={"height": image.image_size, "width": image.image_size})
        options = {"patch_size": image.patch_size, "vision_feature_select_strategy": strategy, "num_additional_image_tokens": 1}
        return count(LlavaProcessor, image_processor=processor, **options)

    return build


def internvl(image: ImageInput) -> Callable[[int, int], int]:
    """Two of the tokens that the processor counts stand around an image."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    processor = GotOcr2ImageProcessorPil(
        size={"height": image.image_size, "width": image.image_size},
        crop_to_patches=image.max_tiles > 1,
        max_patches=image.max_tiles,
    )
    counted = count(InternVLProcessor, image_processor=processor, image_seq_length=256)
    return lambda height, width: counted(height, width) - 2


def pixtral(image: ImageInput) -> Callable[[int, int], int]:
    module = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral", reason="it is not in this version")

    def counted(height: int, width: int) -> int:
        size, patch = (image.longest_side,) * 2, (image.patch_size,) * 2
        found = module.get_resize_output_image_size(np.zeros((height, width, 3), bool), size=size, patch_size=patch)
        rows, columns = (side // image.patch_size for side in found)
        return rows * (columns + 1)

    return counted


def count(processor: Any, **attributes: Any) -> Callable[[int, int], int]:
    """The processor's own count, without the tokenizer that building one needs."""
    itself = SimpleNamespace(_merge_kwargs=lambda **given: {"images_kwargs": {}}, **attributes)
    return lambda height, width: int(
        processor._get_num_multimodal_tokens(itself, image_sizes=[(height, width)])["num_image_tokens"][0]
    )


FAMILIES: Mapping[str, tuple[ImageInput, Callable[[ImageInput], Callable[[int, int], int]]]] = {
    "Qwen2.5-VL": (ImageInput(num_frames=2, max_pixels=12845056), qwen2_5_vl),
    "Qwen2.5-VL, narrow bounds": (ImageInput(num_frames=2, min_pixels=200704, max_pixels=401408), qwen2_5_vl),
    "Qwen3-VL": (ImageInput(num_frames=2, patch_size=16, min_pixels=65536, max_pixels=16777216), qwen2_5_vl),
    "LLaVA": (ImageInput(image_size=336, merge_size=1, class_token="dropped", fit="crop"), llava("default")),
    "LLaVA with its class token": (ImageInput(image_size=336, merge_size=1, class_token="kept", fit="crop"), llava("full")),
    "Pixtral": (ImageInput(patch_size=16, merge_size=1, longest_side=1024, has_row_ends=True), pixtral),
    "InternVL": (ImageInput(image_size=448, class_token="dropped"), internvl),
    "InternVL with tiles": (ImageInput(image_size=448, class_token="dropped", max_tiles=12), internvl),
    "InternVL with few tiles": (ImageInput(image_size=448, class_token="dropped", max_tiles=3), internvl),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_transformers(family: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")
    image, build = FAMILIES[family]
    counted, num_compared = build(image), 0
    for width, height in SIZES:
        if image.image_size is None and max(width, height) > 200 * min(width, height):
            continue
        expected = counted(height, width)
        count = image.num_output_tokens(image_grid(width=width, height=height, image_input=image))
        assert count * num_tiles(width=width, height=height, image_input=image) == expected, (width, height)
        num_compared += 1
    assert num_compared > 970


def test_no_image_is_decoded_for_its_length(data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files hold no pixels at all behind their headers."""
    sizes = {"0.png": (300, 200), "1.png": (17, 90), "2.png": (2000, 1000)}
    for name, size in sizes.items():
        path = data.path / data.image(name, size)
        path.write_bytes(path.read_bytes()[:60])
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("an image was decoded"))
    source = data.open([[{"type": "image", "path": name}, {"type": "text", "role": "assistant", "text": "a"}] for name in sizes])
    assert [source.lengths(index).items[0].num_tokens for index in range(3)] == [48, 36, 40]


SHAPE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", **SHAPE},
            "audio": {"role": "encoder", **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
            "painter": {"role": "generator", **SHAPE},
        }
    }
)
HEADER = "sample_id,image_sizes,text_words,text_tokens_gpt2,answer_words,audio_seconds,colour\n"


def test_rows_become_items_and_text(tmp_path):
    path = tmp_path / "lengths.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(HEADER + "x,56x56;84x56,10,20,5,0.5,red\ny,,0,0,,0,\n")
    items = (ItemLengths("vision", 16, 4), ItemLengths("vision", 24, 6), ItemLengths("audio", 25, 6))
    assert read_length_table(path, graph=GRAPH) == (SampleLengths(0, items, 20, 10), SampleLengths(1, (), 1, 1))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "has no rows"),
        ("a.csv", "width,height\n1,2\n", "none of the columns image_sizes.*found width, height; name one in"),
        ("a.csv", (HEADER + "caf\u00e9,,1,1,1,0,\n").encode("latin-1"), "cannot be read as csv behind row 0 .*utf-8"),
        ("a.csv", HEADER + "x," + "9" * 200_000, "cannot be read as csv behind row 0 .*field larger"),
        ("a.csv.gz", "plain text", "cannot be read as csv"),
        ("a.csv.gz", gzip.compress(HEADER.encode() * 99, mtime=0)[:-20], "cannot be read as csv"),
        ("a.csv.gz", gzip.compress(HEADER.encode(), mtime=0)[:20] + bytes(90), "cannot be read as csv"),
        ("a.txt", "", "expected a .csv, .csv.gz or .parquet file; convert it"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        read_length_table(tmp_path / name, graph=GRAPH)


def test_missing_tables_and_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"gone\.csv: no such file; give a"):
        read_length_table(tmp_path / "gone.csv", graph=GRAPH)
    with pytest.raises(DataError, match=r": a folder; give a"):
        read_length_table(tmp_path, graph=GRAPH)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"a\.parquet: reading parquet needs the package pyarrow; install it, or give"):
        read_length_table(tmp_path / "a.parquet", graph=GRAPH)


@pytest.mark.parametrize("value", [[1], {"a": 1}, b"seven", "1" * 400])
def test_values_of_other_types_in_parquet_are_refused(tmp_path, monkeypatch, value):
    """Parquet has types; a stand-in for pyarrow gives what its own reader would."""
    (tmp_path / "a.parquet").write_bytes(b"")
    table = SimpleNamespace(to_pylist=lambda: [{"text_tokens": 3, "image_sizes": None}, {"text_tokens": value}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(read_table=lambda path: table))
    with pytest.raises(DataError, match=r"a\.parquet, row 2: text_tokens is .*, expected a number from 0"):
        read_length_table(tmp_path / "a.parquet", graph=GRAPH)


def test_a_parquet_file_that_pyarrow_refuses_is_named(tmp_path, monkeypatch):
    def read_table(path):
        raise KeyError("its own kind of error")

    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(read_table=read_table))
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet .*; replace the file"):
        read_length_table(tmp_path / "a.parquet", graph=GRAPH)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path):
    """Spreadsheets write one."""
    (tmp_path / "a.csv").write_text("text_tokens\n7\n", encoding="utf-8-sig")
    assert read_length_table(tmp_path / "a.csv", graph=GRAPH) == (SampleLengths(0, (), 7, 7),)


def test_uniform_lengths_count_encoder_outputs_among_the_backbones_tokens():
    (sample,) = uniform_lengths(GRAPH, tokens={"vision": 64, "painter": 100, "llm": 30}, num_samples=1)
    assert sample.items == (ItemLengths("vision", 64, 16), ItemLengths("painter", 100, 0))
    assert (sample.num_tokens, sample.num_text_tokens) == (30, 14)


def test_an_encoder_says_how_long_audio_is(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(HEADER + "x,,10,20,5,3,red\n")
    ear = {"role": "encoder", **SHAPE, "audio": {"tokens_per_second": 20, "merge_factor": 4}}
    graph = ModelGraph.from_dict({"units": {"ear": ear, "llm": {"role": "backbone", **SHAPE}}})
    (sample,) = read_length_table(path, graph=graph)
    assert sample.items == (ItemLengths("ear", 60, 15),)
    assert uniform_lengths(graph, tokens={"ear": 10, "llm": 8}, num_samples=1)[0].items == (ItemLengths("ear", 10, 2),)


@pytest.mark.parametrize("name", ["L.csv", "L.csv.gz"])
def test_written_lengths_are_read_back(tmp_path, name):
    samples = (SampleLengths(0, (ItemLengths("vision", 16, 4), ItemLengths("vision", 64, 16)), 9, 3), SampleLengths(1, (), 5, 5))
    write_length_table(tmp_path / name, samples)
    assert read_length_table(tmp_path / name, graph=GRAPH) == samples


def test_items_that_are_none_are_refused_and_those_of_other_models_left_out(tmp_path):
    (tmp_path / "L.csv").write_text("items,text_tokens\nother:16:4,9\nvision:16,9\n")
    with pytest.raises(DataError, match=r"row 2: items has 'vision:16', expected UNIT:TOKENS:OUTPUT_TOKENS"):
        read_length_table(tmp_path / "L.csv", graph=GRAPH)
    (tmp_path / "L.csv").write_text("items,text_tokens\nother:16:4,9\n")
    assert read_length_table(tmp_path / "L.csv", graph=GRAPH)[0].items == ()


IMAGE = ImageInput(patch_size=4)
INDEX_OF_SAMPLE = {70: 0, 71: 1, 72: 2}


@pytest.fixture
def source(data: DataFolder) -> ManifestSource:
    first, second, third = (
        {"type": "image", "path": data.image(f"{number}.png", size, seed=number)}
        for number, size in enumerate([(24, 16), (8, 8), (16, 32)])
    )
    words = {"type": "text", "role": "document", "text": "words"}
    return data.open([[first, words, second], [words], [words, third, words]])


def test_encoder_microbatch_holds_the_items_in_order(source: ManifestSource) -> None:
    atoms = [Atom(72, 0), Atom(70, 1), Atom(70, 0)]
    batch = pack_encoder_microbatch(atoms, source=SourceSubset(source, INDEX_OF_SAMPLE), item_input=IMAGE, with_pixels=True)
    assert batch.lengths == (32, 4, 24)
    assert batch.positions.dtype == torch.int64 and batch.positions.shape == (60, 2)
    assert batch.positions[32:36].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert batch.positions[36:].max(dim=0).values.tolist() == [3, 5]
    assert batch.patches is not None and batch.patches.dtype == torch.uint8
    expected = [source.item(index, item).patches for index, item in ((2, 0), (0, 1), (0, 0))]
    np.testing.assert_array_equal(batch.patches.numpy(), np.concatenate(expected))


def test_later_stages_decode_nothing(source: ManifestSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pixels the files are not touched, and all else is the same."""
    atoms = [Atom(70, 0), Atom(72, 0)]
    full = pack_encoder_microbatch(atoms, source=SourceSubset(source, INDEX_OF_SAMPLE), item_input=IMAGE, with_pixels=True)
    monkeypatch.delattr(ManifestSource, "item")
    light = pack_encoder_microbatch(atoms, source=SourceSubset(source, INDEX_OF_SAMPLE), item_input=IMAGE, with_pixels=False)
    assert light.patches is None
    assert torch.equal(light.positions, full.positions) and light.lengths == full.lengths


def test_language_microbatch_holds_the_samples_in_order(source: ManifestSource) -> None:
    batch, spans = pack_language_microbatch([Atom(71), Atom(70), Atom(72)], source=SourceSubset(source, INDEX_OF_SAMPLE))
    texts = [source.text(index) for index in (1, 0, 2)]
    assert batch.lengths == tuple(len(text.token_ids) for text in texts)
    joined = {name: np.concatenate([getattr(text, name) for text in texts]) for name in ("token_ids", "labels", "is_target")}
    assert batch.token_ids.tolist() == joined["token_ids"].tolist()
    assert batch.target_rows.tolist() == joined["is_target"].nonzero()[0].tolist()
    assert batch.targets.tolist() == joined["labels"][joined["is_target"]].tolist()
    assert batch.positions.tolist() == [place for length in batch.lengths for place in range(length)]
    assert {atom: length for atom, (_, length) in spans.items()} == {Atom(70, 0): 6, Atom(70, 1): 1, Atom(72, 0): 8}
    covered = sorted(place for start, length in spans.values() for place in range(start, start + length))
    placeholder = source.text(0).token_ids[2]
    assert covered == torch.nonzero(batch.token_ids == placeholder).flatten().tolist()


@pytest.mark.parametrize(("class_token", "rows"), [("dropped", (24, 29)), ("kept", (0, 25))])
def test_every_image_may_have_a_class_token(class_token: str, rows: tuple[int, int], source: ManifestSource) -> None:
    """Behind its patches where it is dropped later, so that outputs keep their places; else before them."""
    atoms = [Atom(70, 0), Atom(70, 1)]
    given = {"source": SourceSubset(source, INDEX_OF_SAMPLE), "with_pixels": True}
    inputs = IMAGE, replace(IMAGE, class_token=class_token)
    plain, batch = (pack_encoder_microbatch(atoms, **given, item_input=each) for each in inputs)
    is_class = (batch.positions == -1).all(dim=1)
    assert batch.lengths == (25, 5)
    assert tuple(is_class.nonzero()[:, 0].tolist()) == rows
    assert batch.patches is not None and plain.patches is not None
    assert not batch.patches[is_class].any()
    assert torch.equal(batch.patches[~is_class], plain.patches)
    assert torch.equal(batch.positions[~is_class], plain.positions)
