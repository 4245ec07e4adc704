r"""Opens untrusted video files and takes frames out of them, as images; every fault is a DataError.

A video is seen as frames in the middle of equal parts of its time. Where a data set names a video, every frame is an image of its
own, with the address `PATH\0frame INDEX/NUMBER`: whoever needs it decodes it alone, from the last key frame before it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple

from PIL import Image

from multimodal.values.errors import ConfigError, DataError

_ADDRESS = re.compile(r"(.*)\0frame (\d+)/(\d+)", re.DOTALL)
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,ogg,asf"
"""FFmpeg's names of the containers that are opened, whatever a file's name; play lists, which name other files, are none."""


class FramePlace(NamedTuple):
    """The address of a frame, taken apart."""

    path: str
    """The video's."""
    frame: int
    num_frames: int
    """Frames that are taken of the video."""


class VideoLength(NamedTuple):
    """Size and length of a video, by its header."""

    size: tuple[int, int]
    """(width, height) of its frames."""
    num_frames: int
    start: float
    """Seconds."""
    seconds: float


def frame_address(place: FramePlace) -> str:
    """Return a frame's address."""
    return f"{place.path}\0frame {place.frame}/{place.num_frames}"


def parse_frame_address(path: str) -> FramePlace | None:
    """Return the frame at an address, or None for the path of an image."""
    match = _ADDRESS.fullmatch(path)
    return match and FramePlace(match[1], int(match[2]), int(match[3]))


def read_video_length(path: str, *, content: bytes | None = None, where: str) -> VideoLength:
    """Return the size and length of a video from its header; of one that tells no number of frames, by their rate.

    content: the bytes of a video that is no file; `path` is then only its name. where: names the sample in errors. Raises
    ConfigError without PyAV (extra `video`), and DataError for what is no video.
    """
    with _opened(path, content, where=where) as (_, stream):
        return _length(stream)


def read_frame(place: FramePlace, *, content: bytes | None = None, where: str) -> Image.Image:
    """Decode one frame; raises as `read_video_length`. content: as there."""
    with _opened(place.path, content, where=where) as (container, stream):
        length = _length(stream)
        time = length.start + (place.frame + 0.5) * length.seconds / place.num_frames
        container.seek(int(time / stream.time_base), stream=stream)
        shown = None
        for frame in container.decode(stream):
            if shown is not None and frame.time > time:
                break
            shown = frame
        if shown is None:
            raise ValueError("no frame")
        image: Image.Image = shown.to_image()
        return image


@contextmanager
def _opened(path: str, content: bytes | None, *, where: str) -> Iterator[tuple[Any, Any]]:
    """Give a container and its stream of video; whatever fails meanwhile is a DataError."""
    try:
        import av
    except ImportError as problem:
        raise ConfigError(f"{path}: videos need the package av: pip install 'braid[video]'") from problem
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}
    try:
        with av.open(path if content is None else BytesIO(content), options=options) as container:
            yield container, container.streams.video[0]
    except Exception as problem:  # decoders raise errors of every kind for damaged files
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise DataError(
            f"{where}: {path} cannot be decoded as a video ({reason}); give another file, convert it, or remove the sample"
        ) from problem


def _length(stream: Any) -> VideoLength:
    seconds = stream.duration * stream.time_base if stream.duration else (stream.container.duration or 0) / 10**6
    number = stream.frames or round(float(seconds) * float(stream.average_rate or 0))
    start = (stream.start_time or 0) * stream.time_base
    return VideoLength((stream.width, stream.height), max(1, number), float(start), float(seconds))
