"""The index over a manifest, and the files that it may name."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from multimodal.data.image_processing import image_to_patches
from multimodal.data.index.sample_indexer import BAD
from multimodal.values.errors import DataError, ModelError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.data.conftest import PAINTER, UNITS, DataFolder
from tests.unit.golden_answers import Kinds, golden_test

ANSWER = {"type": "text", "role": "assistant", "text": "yes"}
QUESTION = {"type": "text", "role": "user", "text": "what?"}
DOCUMENT = {"type": "text", "role": "document", "text": "words"}
AUDIO = {"type": "audio", "path": "a.wav", "seconds": 1.0}


def image(path: str, size: tuple[int, int] | None = None) -> dict[str, object]:
    return {"type": "image", "path": path} | ({"width": size[0], "height": size[1]} if size else {})


def test_lengths_text_and_pixels_agree(data: DataFolder, graph: ModelGraph, tmp_path: Path) -> None:
    """Two images, one of whose sizes the manifest leaves out, in document order."""
    data.image("a.png", (24, 16))
    data.image("b.png", (8, 40), seed=1)
    source = data.open([[image("a.png", (24, 16)), DOCUMENT, image("b.png"), DOCUMENT]])
    assert len(source) == 1 and source.skipped == {} and source.num_cut == 0
    items = (ItemLengths("vision", 24, 6), ItemLengths("vision", 20, 5))
    # begin, 2 x (start, end), marker, 2 x "words", end
    assert source.lengths(0) == SampleLengths(0, items, num_text_tokens=1 + 4 + 1 + 10 + 1, num_target_tokens=11)
    text = source.text(0)
    assert len(text.token_ids) == source.lengths(0).num_tokens
    assert text.item_starts == ((0, 2, 6), (1, 16, 5))
    assert [source.item_grid(0, item) for item in (0, 1)] == [(4, 6), (10, 2)]
    encoder = graph.unit("vision").image
    assert encoder is not None
    for item, name in enumerate(("a.png", "b.png")):
        with Image.open(tmp_path / name) as file:
            expected = image_to_patches(file, image_input=encoder)
        found = source.item(0, item)
        assert found.grid == expected.grid == source.item_grid(0, item)
        np.testing.assert_array_equal(found.patches, expected.patches)


def test_tiles_of_an_image_are_items_that_follow_each_other(data: DataFolder, graph: ModelGraph) -> None:
    described = graph.to_dict()
    described["units"]["vision"]["image"] |= {"image_size": 16, "max_tiles": 3}
    tiled = ModelGraph.from_dict(described)
    line = [image(data.image("a.png", (40, 20))), image(data.image("b.png", (20, 20))), ANSWER]
    source = data.open([line], graph=tiled, needs_items_first=True)
    assert source.lengths(0).items == (ItemLengths("vision", 16, 4),) * 4
    assert source.text(0).item_starts == ((0, 2, 4), (1, 6, 4), (2, 10, 4), (3, 16, 4))
    left, right, whole, other = (source.item(0, item).patches for item in range(4))
    assert left.shape == right.shape == whole.shape == other.shape and not np.array_equal(left, right)
    with pytest.raises(DataError, match="b.png stands behind text"):
        data.open([[line[0], QUESTION, line[1], ANSWER]], graph=tiled, needs_items_first=True)


def test_samples_with_items_that_cannot_be_read_are_left_out(data: DataFolder) -> None:
    """Each with a reason of its own; what is wrong with the manifest stays an error."""
    (data.path / "cut.png").write_bytes(b"\x89PNG")
    text = {"type": "text", "role": "assistant", "text": "yes"}
    lines = [[{"type": "image", "path": path}, text] for path in (data.image("a.png", (16, 16)), "gone.png", "cut.png")]
    source = data.open(lines, skips_bad=True)
    assert len(source) == 1 and set(source.skipped.values()) == {1}
    for reason, name in zip(source.skipped, ("gone.png does not exist", "cut.png cannot be decoded"), strict=True):
        assert reason.startswith(f"{BAD}{data.path / 'manifest.jsonl'}, line ") and name in reason
    with pytest.raises(DataError, match=r"gone\.png does not exist"):
        data.open(lines)
    with pytest.raises(DataError, match="the key 'path' is missing"):
        data.open([*lines, [{"type": "image"}, text]], skips_bad=True)


def test_an_answer_that_is_an_image_is_for_the_generator(data: DataFolder, painter_graph: ModelGraph) -> None:
    """A model without a generator reads it like any other image."""
    data.image("a.png", (24, 16))
    line = [image("a.png"), QUESTION, {**image("a.png"), "role": "assistant"}]
    source = data.open([line], graph=painter_graph)
    assert source.lengths(0).items == (ItemLengths("vision", 24, 6), ItemLengths("painter", 6, 0))
    *_, (item, start, num_tokens) = source.text(0).item_starts
    assert (item, num_tokens) == (1, 0) and source.text(0).is_target[start - 1]
    assert source.text(0).labels[start - 1] == source.text(0).token_ids[start]
    assert source.item(0, 1).grid == source.item_grid(0, 1) == (2, 3)
    assert source.item(0, 1).patches.shape == (6, 3 * 8 * 8)
    assert data.open([[*line, ANSWER]]).lengths(0).items == (ItemLengths("vision", 24, 6),) * 2


def open_lines(document: dict[str, Any]) -> str:
    """Open samples of segments, each a kind and what it is; returns the tokens of samples, and what was left out and cut."""
    units = {name: {**UNITS, "painter": PAINTER}[name] for name in document["units"]}
    data = DataFolder(Path(), ModelGraph.from_dict({"units": units}))
    data.image("a.png", (8, 8))
    source = data.open([[*map(segment, line)] for line in document["lines"]], **document["options"])
    told = [f"left out {source.skipped}" if source.skipped else "", f"{source.num_cut} cut" if source.num_cut else ""]
    for sample in map(source.lengths, range(len(source))):
        items = "".join(f"{item.unit} {item.num_tokens} -> {item.num_output_tokens}, " for item in sample.items)
        told.append(f"{items}text {sample.num_text_tokens}, targets {sample.num_target_tokens}")
    return "; ".join(filter(None, told))


def segment(text: str) -> dict[str, Any]:
    kind, _, rest = text.partition(" ")
    files = {"image": image(rest), "made": {**image(rest), "role": "assistant"}, "audio": AUDIO}
    return files.get(kind, {"type": "text", "role": kind, "text": rest})


LINES: Kinds = {"lines": ({"lines": [["document words"]], "units": ["vision", "llm"], "options": {}}, open_lines)}
test_lines_are_opened_as_written = golden_test("lines.txt", LINES)


def test_blank_lines_and_a_folder_are_accepted(data: DataFolder) -> None:
    assert len(data.open(data.manifest([[DOCUMENT], "", [DOCUMENT]]).parent)) == 2


def test_a_file_that_changed_since_is_named(data: DataFolder) -> None:
    source = data.open([[image(data.image("a.png", (8, 8)), (8, 9)), ANSWER]])
    with pytest.raises(DataError, match=r"line 1 \(sample 's1'\): .*a\.png is 8x8 pixels but the manifest says 8x9"):
        source.item(0, 0)


def test_items_name_their_unit(data: DataFolder, two_encoder_graph: ModelGraph) -> None:
    """Where several might take them; those for a unit that the model lacks are left out."""
    data.image("a.png", (8, 8))
    clip = {"type": "audio", "path": data.audio("a.wav", 1601)}
    mine, yours = {**image("a.png"), "unit": "vision"}, {**image("a.png"), "unit": "sketch"}
    source = data.open([[yours, clip, mine, DOCUMENT], [{**clip, "unit": "nose"}, DOCUMENT]], graph=two_encoder_graph)
    assert source.skipped == {"with audio for 'nose', which no unit of the model takes": 1}
    lengths = source.lengths(0)
    assert lengths.items == (ItemLengths("sketch", 4, 1), ItemLengths("ear", 6, 3), ItemLengths("vision", 4, 1))
    assert [source.item_grid(0, item) for item in range(3)] == [(2, 2), (11, 1), (2, 2)]
    assert source.item(0, 1).patches.shape == (6, 5 * 4)
    message = r'line 1 .*: a.png might be for any of the units vision, sketch; say for which: "unit": "vision"'
    with pytest.raises(DataError, match=message):
        data.open([[image("a.png"), DOCUMENT]], graph=two_encoder_graph)


def test_models_that_cannot_take_image_files(data: DataFolder, graph: ModelGraph) -> None:
    changed = graph.to_dict()
    changed["units"]["vision"]["image"]["in_channels"] = 4
    with pytest.raises(ModelError, match="unit 'vision': in_channels is 4"):
        data.open([[ANSWER]], graph=ModelGraph.from_dict(changed))


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image that is not the manifest's."""
    path = tmp_path_factory.mktemp("outside") / "x.png"
    Image.new("RGB", (8, 8)).save(path)
    return path


def lead_out(folder: Path, outside: Path, way: str) -> str:
    if way == "absolute":
        return str(outside)
    if way == "upwards":
        return os.path.relpath(outside, folder)
    if way == "a link":
        (folder / "link.png").symlink_to(outside)
        return "link.png"
    if way == "beside":  # a folder that begins alike
        (beside := folder.with_name(f"{folder.name}-2")).mkdir()
        (beside / "x.png").write_bytes(outside.read_bytes())
        return f"../{beside.name}/x.png"
    (folder / "images").symlink_to(outside.parent)
    return "images/x.png" if way == "a folder's link" else f"images/../{outside.parent.name}/./x.png"


@pytest.mark.parametrize("way", ["absolute", "upwards", "a link", "beside", "a folder's link", "both"])
def test_no_path_leads_out_without_the_flag(data: DataFolder, tmp_path: Path, outside: Path, way: str) -> None:
    lines = [[ANSWER], [{"type": "image", "path": lead_out(tmp_path, outside, way), "width": 8, "height": 8}, ANSWER]]
    message = rf"line 2 \(sample 's2'\): .*leads to .*x.png, which is not in the manifest's folder {tmp_path}; move .*or add "
    with pytest.raises(DataError, match=f"{message}--allow-outside-paths if you trust the manifest"):
        data.open(lines)
    assert data.open(lines, allows_outside_paths=True).item(1, 0).grid == (2, 2)


def test_links_of_the_hubs_cache_are_its_files(data: DataFolder, tmp_path: Path, graph: ModelGraph, outside: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "1a2b" / "data", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / data.image("a.png", (8, 8))).rename(blobs / "3c4d")
    (folder / "a.png").symlink_to("../../../blobs/3c4d")
    entry = {"image": "a.png", "messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "yes"}]}
    (blobs / "5e6f").write_text(json.dumps(entry))
    (folder / "data.json").symlink_to("../../../blobs/5e6f")
    assert len(data.open(folder / "data.json")) == 1
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(outside)
    (blobs / "5e6f").write_text(f"{json.dumps(entry)}\n")
    with pytest.raises(DataError, match="which is not in the manifest's folder"):
        data.open(folder / "data.json")


def test_any_path_that_stays_inside_is_allowed(data: DataFolder, tmp_path: Path) -> None:
    """Absolute, roundabout, and linked inside the folder."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link.png").symlink_to(tmp_path / data.image("a.png", (8, 8)))
    paths = ["a.png", str(tmp_path / "a.png"), "deep/../a.png", "deep/link.png"]
    assert len(data.open([[{"type": "image", "path": path}, ANSWER] for path in paths])) == 4
    (manifest := data.path / "manifest.jsonl").rename(moved := tmp_path.with_name(f"{tmp_path.name}.jsonl"))
    assert len(data.open(moved, media_dir=str(tmp_path))) == 4 and not manifest.exists()
    with pytest.raises(DataError, match="deep/a.png does not exist"):
        data.open(moved, media_dir=str(tmp_path / "deep"))


def test_a_manifest_behind_a_link_has_the_folder_it_is_opened_in(data: DataFolder, tmp_path: Path, graph: ModelGraph) -> None:
    """A folder that is itself a link is the manifest's folder all the same."""
    data.image("a.png", (8, 8))
    data.manifest([[{"type": "image", "path": "a.png"}, ANSWER]])
    link = tmp_path.with_name(tmp_path.name + "-link")
    link.symlink_to(tmp_path)
    assert len(data.open(link)) == 1
