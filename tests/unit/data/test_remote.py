"""Data at addresses: the same samples as on this machine, from as few bytes, whatever the server does meanwhile."""

import multiprocessing
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multimodal.data import remote
from multimodal.data.byte_cache import ByteCache
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.index.index_cache import IndexCache
from multimodal.data.remote import RemoteOptions, RemotePath, data_path
from multimodal.values.errors import DataError, RemoteError
from tests.unit.data.conftest import DataFolder, assert_same
from tests.unit.data.forms.test_sample_files import energon, write_tar
from tests.unit.data.remote_servers import FolderServer, serve_folder, serve_s3, upload
from tests.unit.data.test_image_files import write_video

ANSWER = {"type": "text", "role": "assistant", "text": "yes"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderServer]:
    """Shows the folder of `data`; nobody waits for a second try."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    with serve_folder(tmp_path) as found:
        yield found


@pytest.fixture
def options(tmp_path: Path) -> RemoteOptions:
    return RemoteOptions(tmp_path / ".cache", cache_mib=64, retries=2)


def shown(name: str, **size: int) -> list[dict[str, Any]]:
    return [{"type": "image", "path": name, **size}, ANSWER]


def of_manifest(data: DataFolder) -> str:
    (data.path / "pictures 1").mkdir()
    names = [data.image(f"pictures 1/{number}#%2e.png", (16 + 8 * number, 24)) for number in range(3)]
    data.manifest([shown(name) for name in names])
    return ""


def of_videos(data: DataFolder) -> str:
    data.manifest([[{"type": "video", "path": write_video(data.path / "a.mp4", num_frames=9).name}, ANSWER]])
    return ""


def of_parquet(data: DataFolder) -> str:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raw = [(data.path / data.image(f"{number}.png", (16, 16 + 8 * number))).read_bytes() for number in range(4)]
    rows = [{"texts": [{"user": "what?", "assistant": "it"}], "images": [{"bytes": each, "path": None}]} for each in raw]
    parquet.write_table(pyarrow.Table.from_pylist(rows), data.path / "rows.parquet", row_group_size=2)
    return "rows.parquet"


def of_tars(data: DataFolder) -> str:
    picture = (data.path / data.image("a.png", (40, 24))).read_bytes()
    for name in ("b.tar", "a.tar"):
        write_tar(data.path / "tars" / name, {"x.png": picture, "x.txt": name, "y.png": picture, "y.txt": "it"})
    return "tars"


def of_energon(data: DataFolder) -> str:
    picture = (data.path / data.image("a.png", (24, 24))).read_bytes()
    fields = {"image": "png", "context": "json[asked][en]", "answers": "json[said]"}
    energon(data.path / "set", [picture, picture], sample_type={"__class__": "VQASample"}, field_map=fields)
    return "set/train"


FORMS = [of_manifest, of_videos, of_parquet, of_tars, of_energon]


@pytest.mark.parametrize("form", FORMS)
def test_remote_data_are_those_of_this_machine(form, data, server, options, monkeypatch):
    place = form(data)
    expected = data.open(data.path / place)
    with serve_s3(monkeypatch) as bucket:
        upload(data.path)
        for base in (server.address, bucket):
            assert_same(data.open(data_path(f"{base}/{place}", options)), expected)


def test_the_index_of_a_tar_takes_no_bodies(data, server, options):
    pixels = np.random.default_rng(0).integers(0, 256, (200_000,), dtype=np.uint8).tobytes()
    picture = (data.path / data.image("a.png", (16, 16))).read_bytes() + pixels
    files = {f"{index}.{kind}": content for index in range(8) for kind, content in (("png", picture), ("txt", "it"))}
    write_tar(data.path / "a.tar", files)
    source = data.open(data_path(f"{server.address}/a.tar", options), seq_length=100)
    assert len(source) == 8 and len(server.requests) < 8 + 4, "an image's header is asked for although it has been read"
    assert server.sent() < 0.3 * (data.path / "a.tar").stat().st_size
    before, sent = len(server.requests), server.sent()
    source.item(3, 0)
    assert len(server.requests) == before + 1 and server.sent() == sent + len(picture)
    again = data.open(data_path(f"{server.address}/a.tar", options), seq_length=100)
    again.item(3, 0)
    assert server.sent() == sent + len(picture), "what is kept was asked for again"


def test_items_of_a_step_are_asked_for_at_once(data, server, options):
    """The server answers eight requests together: for the items, and, as the index is made, for headers of single files."""
    names = [data.image(f"{number:02d}.png", (16, 16), seed=number) for number in range(16)]
    data.manifest([shown(name) for name in names])
    write_tar(
        data.path / "a.tar",
        {file: raw for name in names for file, raw in ((name, (data.path / name).read_bytes()), (f"{name[:2]}.txt", "a"))},
    )
    for place, first in (("manifest.jsonl", threading.Barrier(8, timeout=60)), ("a.tar", None)):
        server.meets, expected = first, data.open(data.path / place)
        source = data.open(data_path(f"{server.address}/{place}", replace(options, cache_mib=0)))
        server.meets = threading.Barrier(8, timeout=60)
        source.expect_items([(index, 0) for index in range(16)])
        assert_same(source, expected)
    assert sum(path.endswith(".png") for method, path, _ in server.requests if method == "GET") == 32


@pytest.mark.parametrize("failures", [[503, 429], [500], [0, 503], [1], [1, 0]])
def test_failures_that_pass_are_tried_again(failures, server, options):
    (server.folder / "a.bin").write_bytes(bytes(1000))
    server.failures += failures
    assert data_path(f"{server.address}/a.bin", options).read_range(10, 100) == bytes(100)
    assert not server.failures


@pytest.mark.parametrize(
    ("failures", "tries", "message"),
    [
        ([503] * 9, 3, r"a\.bin: cannot be read, tried 3 times \(503.*--data-retries"),
        ([0] * 20, 3, r"a\.bin: cannot be read, tried 3 times"),
        ([403], 1, r"a\.bin: cannot be read \(403.*credentials"),
        ([2], 1, r"a\.bin: 100 bytes from 10 on were asked for, and 1000 came; put it where ranges"),
    ],
)
def test_what_does_not_pass_is_said(failures, tries, message, server, options, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    (server.folder / "a.bin").write_bytes(bytes(1000))
    server.failures += failures
    with pytest.raises(RemoteError, match=message):
        data_path(f"{server.address}/a.bin", options).read_range(10, 100)
    assert len(waits) == tries - 1 and waits == sorted(set(waits)), "each wait is longer than the one before"


def test_a_server_that_is_gone_is_no_bad_sample(data, server, options):
    data.manifest([shown(data.image("a.png", (16, 16)))])
    path = data_path(server.address, replace(options, cache_mib=0))
    source = data.open(path, skips_bad=True)
    server.failures += [503] * 9
    with pytest.raises(RemoteError, match=r"a\.png: cannot be read, tried 3 times"):
        source.item(0, 0)
    remote._known.cache_clear()
    with pytest.raises(RemoteError, match=r"cannot be read, tried 3 times"):
        data.open(path / "manifest.jsonl", skips_bad=True)


def test_a_missing_file_is_a_bad_sample(data, server, options):
    data.manifest([shown(data.image("a.png", (16, 16))), shown("gone.png"), shown("none.png", width=16, height=16)])
    path = data_path(server.address, options)
    with pytest.raises(DataError, match=r"line 2 .*http://.*/gone\.png does not exist; restore the file"):
        data.open(path)
    source = data.open(path, skips_bad=True)
    assert len(source) == 2 and "gone.png does not exist" in next(iter(source.skipped))
    with pytest.raises(DataError, match=r"line 3 .*/none\.png does not exist"):
        source.item(1, 0)


def test_no_path_leaves_its_folder(data, server, options):
    (data.path / "inner").mkdir()
    outside = data.image("a.png", (16, 16))
    address = f"{server.address}/{outside}"
    for name, allowed, message in (
        ("../a.png", True, r"\.\./a\.png leads out of the data's folder http://.*/inner; move the file there"),
        ("x/../../a.png", False, "leads out of the data's folder"),
        (f"{data.path}/a.png", True, "leads out of the data's folder"),
        (address, False, "is no path of a file, and nothing is downloaded; .*--allow-outside-paths"),
        ("ftp://a.org/a.png", True, "line 1 .*unknown protocol 'ftp'; use one of s3, gs, http, https"),
    ):
        data.manifest([shown(name)]).rename(data.path / "inner" / "manifest.jsonl")
        remote._known.cache_clear()
        for place in (data_path(f"{server.address}/inner", options), data.path / "inner"):
            if isinstance(place, RemotePath) or "://" in name:
                with pytest.raises(DataError, match=message):
                    data.open(place, allows_outside_paths=allowed)
    data.manifest([shown(address)]).rename(data.path / "inner" / "manifest.jsonl")
    remote._known.cache_clear()
    for place in (data_path(f"{server.address}/inner", options), data.path / "inner"):
        assert data.open(place, allows_outside_paths=True, remote=options).item(0, 0).grid == (4, 4)


def test_changed_data_are_indexed_anew(data, server, options, tmp_path):
    open_data = partial(data.open, data_path(f"{server.address}/tars", options), cache=IndexCache(""))
    indices = tmp_path / ".cache" / "braid" / "index"
    of_tars(data)
    first, digest = open_data(), open_sample_files(data.path / "tars").digest
    open_data()
    assert len([*indices.iterdir()]) == 1
    write_tar(data.path / "tars" / "a.tar", {"x.png": (data.path / "a.png").read_bytes(), "x.txt": "another"})
    remote._known.cache_clear()
    assert (
        len(open_data()) == len(first) - 1
        and len([*indices.iterdir()]) == 2
        and open_sample_files(data.path / "tars").digest != digest
    )


def test_nothing_at_an_address(server, options):
    for name in ("none.jsonl", "none"):
        with pytest.raises(DataError, match=re.escape(f"{server.address}/{name}: no such manifest; give --data-path")):
            open_sample_files(f"{server.address}/{name}", options)


def _fill(folder: Path, first: int) -> None:
    cache = ByteCache(folder, most_bytes=200_000)
    for number in range(first, first + 60):
        cache.put(f"{number:032x}", bytes([number % 256]) * 10_000)


def test_what_is_kept_is_bounded_and_whole(tmp_path):
    """Four processes write at once; the ones that were used last stay."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_fill, [(tmp_path, 30 * number) for number in range(4)])
    kept = [each for each in tmp_path.rglob("*") if each.is_file() and each.name != "total"]
    assert 0 < sum(each.stat().st_size for each in kept) <= 200_000
    cache = ByteCache(tmp_path, most_bytes=200_000)
    for each in kept:
        assert cache.get(each.name, size=10_000) == bytes([int(each.name, 16) % 256]) * 10_000
    assert cache.get(kept[0].name, size=9_999) is None
    cache.put("0" * 32, bytes(100_000))
    assert cache.get("0" * 32, size=100_000) is None, "larger than what is made room for at a time"
    (tmp_path / "total").write_bytes(bytes(6))  # as a disk has it behind a power failure
    cache.put("0" * 32, b"a")
    assert cache.get("0" * 32, size=1) == b"a" and int((tmp_path / "total").read_bytes()) <= 200_000
    ByteCache(tmp_path / "none", most_bytes=0).put("0" * 32, b"a")
    assert not (tmp_path / "none").exists()
