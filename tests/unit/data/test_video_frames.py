"""Frames of videos that the tests make, whose grey says which frame it is."""

import json
from pathlib import Path

import numpy as np
import pytest

from multimodal.data.video_frames import FramePlace, frame_address, parse_frame_address, read_frame, read_video_length
from multimodal.values.errors import DataError
from tests.unit.data.conftest import DataFolder
from tests.unit.data.forms.test_tar_files import write_tar


def write_video(path: Path, *, num_frames: int, height: int = 32) -> Path:
    """Write a video of ten frames a second; frame i has the grey 10 * i."""
    av = pytest.importorskip("av", reason="PyAV is not installed (pip install 'braid[video]')")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, height, "yuv420p"
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((height, 48, 3), 10 * index, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
@pytest.mark.parametrize(("num_frames", "wanted", "shown"), [(20, 4, [2, 7, 12, 17]), (20, 1, [10]), (3, 3, [0, 1, 2])])
def test_frames_are_spread_over_the_time(num_frames: int, wanted: int, shown: list[int], kind: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / f"clip.{kind}", num_frames=num_frames)
    length = read_video_length(str(path), where="here")
    assert (length.size, length.num_frames, length.seconds) == ((48, 32), num_frames, pytest.approx(num_frames / 10))
    for content in (None, path.read_bytes()):
        places = [FramePlace(str(path), index, wanted) for index in range(wanted)]
        greys = [np.asarray(read_frame(place, content=content, where="here").convert("L")).mean() for place in places]
        assert greys == pytest.approx([10 * index for index in shown], abs=4)


@pytest.mark.parametrize("content", [b"", b"no video", b"#EXTM3U\n#EXTINF:1,\nother.mp4\n", None])
def test_what_is_no_video_is_said(content: bytes | None, tmp_path: Path) -> None:
    write_video(tmp_path / "other.mp4", num_frames=2)
    path = tmp_path / "clip.m3u8"
    if content is not None:
        path.write_bytes(content)
    for read in (
        lambda: read_video_length(str(path), where="here"),
        lambda: read_frame(FramePlace(str(path), 0, 1), where="here"),
    ):
        with pytest.raises(DataError, match=r"here: .*clip.m3u8 cannot be decoded as a video .*; give another file"):
            read()


def test_addresses_of_frames_are_those_of_no_image() -> None:
    for path in ("clip.mp4", "\0[3, 1, 2]", "a\nb.mp4"):
        assert parse_frame_address(path) is None
        assert parse_frame_address(frame_address(FramePlace(path, 3, 8))) == (path, 3, 8)


@pytest.mark.parametrize(
    ("options", "shown"), [({}, 8), ({"num_frames": 3}, 3), ({"video_fps": 2.0}, 4), ({"num_frames": 3, "video_fps": 5.0}, 3)]
)
def test_a_sample_with_a_video_is_one_with_its_frames(options: dict[str, float], shown: int, data: DataFolder) -> None:
    path = write_video(data.path / "clip.mp4", num_frames=20)
    for index in range(shown):
        read_frame(FramePlace(str(path), index, shown), where="here").save(data.path / f"{index}.png")
    turns = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "grey"}]
    as_images = [{**turns[0], "content": "<image>" * shown + "what?"}, turns[1]]
    segments = [{"type": "text", "role": role, "text": text} for role, text in (("user", "what?"), ("assistant", "grey"))]
    expected = data.open(data.entries([{"messages": as_images, "images": [f"{index}.png" for index in range(shown)]}], "a.jsonl"))
    for found in (
        data.entries([{"messages": turns, "videos": ["clip.mp4"]}], "b.jsonl"),
        data.entries([{"id": 1, "segments": [{"type": "video", "path": "clip.mp4"}, *segments]}], "manifest.jsonl"),
        write_tar(data.path / "t.tar", {"x.mp4": path.read_bytes(), "x.json": json.dumps({"messages": turns})}),
    ):
        source = data.open(found, **options)
        assert source.lengths(0) == expected.lengths(0) and len(source.lengths(0).items) == shown
        assert source.text(0).token_ids.tolist() == expected.text(0).token_ids.tolist()
        for index in range(shown):
            np.testing.assert_array_equal(source.item(0, index).patches, expected.item(0, index).patches)


def test_a_video_of_another_size_than_indexed_is_named(data: DataFolder) -> None:
    write_video(data.path / "clip.mp4", num_frames=3)
    turns = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "grey"}]
    source = data.open(data.entries([{"messages": turns, "videos": ["clip.mp4"]}]))
    write_video(data.path / "clip.mp4", num_frames=3, height=64)
    with pytest.raises(DataError, match=r"clip.mp4 has frames of 48x64 pixels, but 48x32 when the data was indexed"):
        source.item(0, 0)
