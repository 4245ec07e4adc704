"""Manifests that name files outside their folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph

ANSWER = {"type": "text", "role": "assistant", "text": "yes"}


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image that is not the manifest's."""
    path = tmp_path_factory.mktemp("outside") / "x.png"
    Image.new("RGB", (8, 8)).save(path)
    return path


def lead_out(folder: Path, outside: Path, way: str) -> str:
    """A path that a manifest in `folder` may name, in one of the ways out."""
    if way == "absolute":
        return str(outside)
    if way == "upwards":
        return os.path.relpath(outside, folder)
    if way == "a link":
        (folder / "link.png").symlink_to(outside)
        return "link.png"
    (folder / "images").symlink_to(outside.parent)
    return "images/x.png" if way == "a folder's link" else f"images/../{outside.parent.name}/./x.png"


@pytest.mark.parametrize("way", ["absolute", "upwards", "a link", "a folder's link", "both"])
def test_no_path_leads_out_without_the_flag(
    open_manifest: Callable[..., ManifestSource], tmp_path: Path, outside: Path, way: str
) -> None:
    lines = [[ANSWER], [{"type": "image", "path": lead_out(tmp_path, outside, way), "width": 8, "height": 8}, ANSWER]]
    message = rf"line 2 \(sample 's2'\): .*leads to {outside}, which is not in the manifest's folder {tmp_path}; move .*or add "
    with pytest.raises(DataError, match=f"{message}--allow-outside-paths if you trust the manifest"):
        open_manifest(lines)
    source = open_manifest(lines, allows_outside_paths=True)
    assert source.item(1, 0).grid == (2, 2)


def test_links_of_the_hubs_cache_are_its_files(
    write_image: Callable[..., str], tmp_path: Path, graph: ModelGraph, outside: Path
) -> None:
    folder, blobs = tmp_path / "snapshots" / "1a2b" / "data", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / write_image("a.png", (8, 8))).rename(blobs / "3c4d")
    (folder / "a.png").symlink_to("../../../blobs/3c4d")
    entry = {"image": "a.png", "messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "yes"}]}
    (blobs / "5e6f").write_text(json.dumps(entry))
    (folder / "data.json").symlink_to("../../../blobs/5e6f")
    assert len(ManifestSource(folder / "data.json", graph=graph, tokenizer=ByteTokenizer(), seq_length=99)) == 1
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(outside)
    (blobs / "5e6f").write_text(f"{json.dumps(entry)}\n")
    with pytest.raises(DataError, match="which is not in the manifest's folder"):
        ManifestSource(folder / "data.json", graph=graph, tokenizer=ByteTokenizer(), seq_length=99)


def test_any_path_that_stays_inside_is_allowed(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str], tmp_path: Path
) -> None:
    """Absolute, roundabout, and linked inside the folder."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link.png").symlink_to(tmp_path / write_image("a.png", (8, 8)))
    paths = ["a.png", str(tmp_path / "a.png"), "deep/../a.png", "deep/link.png"]
    assert len(open_manifest([[{"type": "image", "path": path}, ANSWER] for path in paths])) == 4


def test_a_folder_that_begins_alike_is_outside(open_manifest: Callable[..., ManifestSource], tmp_path: Path) -> None:
    """`data-2` is not in `data`."""
    beside = tmp_path.with_name(tmp_path.name + "-2")
    beside.mkdir()
    Image.new("RGB", (8, 8)).save(beside / "x.png")
    with pytest.raises(DataError, match="--allow-outside-paths"):
        open_manifest([[{"type": "image", "path": f"../{beside.name}/x.png"}, ANSWER]])


def test_a_manifest_behind_a_link_has_the_folder_it_is_opened_in(
    write_manifest: Callable[..., Path], write_image: Callable[..., str], tmp_path: Path, graph: ModelGraph
) -> None:
    """A folder that is itself a link is the manifest's folder all the same."""
    write_image("a.png", (8, 8))
    write_manifest([[{"type": "image", "path": "a.png"}, ANSWER]])
    link = tmp_path.with_name(tmp_path.name + "-link")
    link.symlink_to(tmp_path)
    assert len(ManifestSource(link, graph=graph, tokenizer=ByteTokenizer(), seq_length=99)) == 1
