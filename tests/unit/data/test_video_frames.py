"""Frames of videos that the tests make, whose grey says which frame it is."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multimodal.data.video_frames import write_frames
from multimodal.values.errors import DataError


def write_video(path: Path, *, num_frames: int) -> Path:
    """Write a video of ten frames a second; frame i has the grey 10 * i."""
    av = pytest.importorskip("av", reason="PyAV is not installed (pip install 'braid[video]')")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 10 * index, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("num_frames", "wanted", "shown"),
    [(20, 4, [2, 7, 12, 17]), (20, 1, [10]), (3, 8, [0, 1, 2]), (1, 2, [0])],
)
def test_frames_are_spread_over_the_time(num_frames: int, wanted: int, shown: list[int], tmp_path: Path) -> None:
    paths = write_frames(write_video(tmp_path / "clip.mp4", num_frames=num_frames), tmp_path, num_frames=wanted)
    greys = [np.asarray(Image.open(path).convert("L")).mean() for path in paths]
    assert greys == pytest.approx([10 * index for index in shown], abs=4) and paths == sorted(paths)


def test_videos_of_one_name_do_not_share_frames(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = (write_video(folder / "clip.mp4", num_frames=3) for folder in (tmp_path, tmp_path / "other"))
    assert not {*write_frames(first, tmp_path, num_frames=3)} & {*write_frames(second, tmp_path, num_frames=3)}


@pytest.mark.parametrize("content", [b"", b"no video", None])
def test_what_is_no_video_is_said(content: bytes | None, tmp_path: Path) -> None:
    pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"clip.mp4: cannot be decoded as a video .*; give another file"):
        write_frames(path, tmp_path, num_frames=2)
