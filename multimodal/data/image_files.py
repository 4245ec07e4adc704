r"""Opens untrusted image and video files: inside their folder, of some formats, of bounded size; every fault is a DataError.

A video is seen as some of its frames: each in the middle of one of so many equal parts of its time. An item of it has the address
`PATH\0frame INDEX/NUMBER`, or `INDEX,INDEX/NUMBER` of several frames, which are one step of the video: whoever needs it decodes
these alone, from the last key frame before each. The address of its sound is `PATH\0sound`.
"""

import math
import os
import posixpath
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from multimodal.data.audio import SAMPLING_RATE
from multimodal.data.image_processing import image_to_patches
from multimodal.data.index.index_cache import FOLDER_NAME
from multimodal.data.remote import DataPath, RemotePath, data_path, is_address
from multimodal.data.sample_source import PILLOW_MAX_PIXELS, ItemPixels
from multimodal.values.errors import BraidError, ConfigError, DataError, require_package
from multimodal.values.model_graph import ImageInput

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that are opened, whatever the file's name; Pillow's other decoders, some of which start programs, are not used."""
_JPEG_FRAMES = (0xFFC0, 0xFFC1, 0xFFC2)  # markers before the size: baseline, extended and progressive
_JPEG_SKIPPED = (0xFFC4, 0xFFCC, 0xFFDB, 0xFFDD, 0xFFFE)  # of tables and comments, which may come first, as applications' may
_ORIENTING = b"Exif\0\0", b"http:/"  # begins of segments of a JPEG that may say which side is up: EXIF and XMP
_NAMES = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_TURNS = {number: Image.Transpose[name] for number, name in enumerate(_NAMES.split(), 2)}
"""Orientation in EXIF -> what lets an image stand upright; from 5 on width and height are exchanged."""
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "I;16", "I;16L", "I;16B", "I;16N")
"""Pixel modes with known values for black and white."""
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # --max-image-pixels decides between Pillow's two limits
warnings.filterwarnings("ignore", "Corrupt EXIF data", UserWarning)  # such an image is upright


class ManifestPaths:
    """Looks up the files that a manifest names; an untrusted manifest must not name files outside its folder."""

    def __init__(self, folder: DataPath, *, allows_outside: bool) -> None:
        """folder: the manifest's; allows_outside: True if addresses, absolute paths, `..` and links may lead out of it."""
        self._folder, self._allows_outside = folder, allows_outside
        self._root = os.path.realpath(str(folder))
        snapshots = [parent for parent in Path(self._root).parents if parent.name == "snapshots"][:1]
        # The cache of Hugging Face's hub has only links in `snapshots`, to the files in `blobs` beside that.
        self._roots = (self._root, *[str(parent.with_name("blobs")) for parent in snapshots])
        self._real_folder = cache(os.path.realpath)  # since a manifest names many files in few folders

    def resolve(self, path: str, *, where: str) -> str:
        """Return a path that can be opened; raises DataError if it lies outside, or on this machine and there is no such file."""
        if is_address(path) and not self._allows_outside:
            raise DataError(
                f"{where}: {path[:60]} is no path of a file, and nothing is downloaded; save it beside the data, or add "
                "--allow-outside-paths if you trust the data"
            )
        if is_address(path):
            try:
                return str(data_path(path))
            except DataError as problem:
                raise DataError(f"{where}: {problem}") from problem
        if isinstance(self._folder, RemotePath):
            if path.startswith("/") or ".." in path.split("/"):
                raise DataError(
                    f"{where}: {path} leads out of the data's folder {self._folder}; move the file there, or give its whole "
                    "address and --allow-outside-paths"
                )
            return str(self._folder / posixpath.normpath(path))
        full = os.path.join(self._folder, path)
        if not os.path.isfile(full):
            raise DataError(f"{where}: {full} {_missing(full)}")
        if self._allows_outside:
            return full
        folder, name = os.path.split(full)
        real = os.path.realpath(full) if os.path.islink(full) else os.path.join(self._real_folder(folder), name)
        if not any(os.path.commonpath((real, root)) == root for root in self._roots):
            raise DataError(
                f"{where}: {path} leads to {real}, which is not in the manifest's folder {self._root}; move the file there, "
                "or add --allow-outside-paths if you trust the manifest"
            )
        return full


def read_image_size(path: str, *, content: BinaryIO | None = None, where: str) -> tuple[int, int]:
    """Return (width, height) of the upright image from the header; raises DataError, which names file and sample (`where`).

    content: an image that is no file of this machine; `path` is then only its name.
    """
    try:
        with open(path, "rb") if content is None else nullcontext(content) as file:
            if (size := _size_of_jpeg(file)) is not None:
                return size
            file.seek(0)
            with Image.open(file, formats=FORMATS) as image:
                return _upright(image)[0]
    except BraidError:
        raise
    except Exception as problem:  # decoders raise errors of every kind for damaged files
        raise _unreadable(path, is_file=content is None, where=where, problem=problem) from problem


def _size_of_jpeg(file: BinaryIO) -> tuple[int, int] | None:
    """Return (width, height) of a JPEG of 8 bits by its header; None for files that Pillow opens, or says why not."""
    is_jpeg = file.read(2) == b"\xff\xd8"
    while is_jpeg and len(segment := file.read(10)) == 10:
        marker, length, precision, height, width, num_channels = struct.unpack(">HHBHHB", segment)
        if marker in _JPEG_FRAMES:
            return (width, height) if precision == 8 and num_channels in (1, 3, 4) and width and height else None
        if not (marker in _JPEG_SKIPPED or 0xFFE0 <= marker <= 0xFFEF) or length < 2 or segment[4:] in _ORIENTING:
            return None
        file.seek(length - 8, os.SEEK_CUR)  # behind marker and length
    return None


def _upright(image: Image.Image) -> tuple[tuple[int, int], int]:
    """Return (width, height) once an image that is not loaded yet stands upright, and its orientation in EXIF."""
    try:  # not by the method of PNG, which would decode it; TIFFs are turned by Pillow itself
        orientation = 1 if image.format == "TIFF" else Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # as above
        orientation = 1
    return (image.size[::-1] if orientation in (5, 6, 7, 8) else image.size), orientation


def check_image_size(path: str, *, size: tuple[int, int], max_pixels: int, where: str) -> None:
    """Raise DataError for an image with too many pixels; `path`, `size` (width, height) and `where` describe the image."""
    if math.prod(size) > max_pixels:
        sides = [f"{side:,}" if side < 10**15 else "more than 10^15" for side in size]
        raise DataError(
            f"{where}: {path} has {' x '.join(sides)} pixels, but no more than {max_pixels:,} are decoded; "
            f"scale it down, or raise --max-image-pixels (up to {PILLOW_MAX_PIXELS:,})"
        )


def read_image(
    path: str, *, size: tuple[int, int], image_input: ImageInput, where: str, content: BinaryIO | None = None, tile: int = 0
) -> ItemPixels:
    """Decode an image file into patches; of an animation or a file with several pages, the first image.

    `size` is the (width, height) that was indexed, `where` names the sample in errors, `content` is an image that is no file of
    this machine (`path` is then only its name), `tile` the index of the wanted tile. Raises DataError if the file is missing,
    damaged, none of FORMATS, of another size (before it is decoded), or has pixels of unknown range.
    """
    try:
        with Image.open(path if content is None else content, formats=FORMATS) as image:
            actual_size, orientation = _upright(image)
            if actual_size == size:
                image.load()
    except Exception as problem:  # as above
        raise _unreadable(path, is_file=content is None, where=where, problem=problem) from problem
    if actual_size != size:
        raise DataError(
            f"{where}: {path} is {actual_size[0]}x{actual_size[1]} pixels but the manifest says {size[0]}x{size[1]}; "
            f"correct width and height there, replace the file, or remove {FOLDER_NAME} if the file is right"
        )
    if image.mode not in _MODES:
        raise DataError(f"{where}: {path} has pixels of mode {image.mode}, expected grey, RGB or CMYK; convert it to 8-bit RGB")
    upright = image.transpose(_TURNS[orientation]) if orientation in _TURNS else image
    return image_to_patches(upright, image_input=image_input, tile=tile)


def _unreadable(path: str, *, is_file: bool, where: str, problem: Exception) -> DataError:
    if is_file and not os.path.isfile(path):
        return DataError(f"{where}: {path} {_missing(path)}")
    if isinstance(problem, Image.DecompressionBombError):
        return DataError(f"{where}: {path} has more than {PILLOW_MAX_PIXELS:,} pixels, which Pillow refuses; scale it down")
    reason = " ".join(str(problem).split()) or type(problem).__name__
    if isinstance(problem, UnidentifiedImageError):
        reason = f"it is none of {', '.join(FORMATS)}"
    return DataError(f"{where}: {path} cannot be decoded as an image ({reason}); replace the file or remove that line")


def _missing(path: str) -> str:
    """Say why a path is none of a file, and what to do."""
    found = "is not a regular file; put a file there" if os.path.exists(path) else "does not exist; restore the file"
    return f"{found} or remove that line"


FRAME_MARK = "\0frame "
_ADDRESS = re.compile(rf"(.*){FRAME_MARK}(\d+(?:,\d+)*)/(\d+)", re.DOTALL)
_MOST_MISSING = 1.0
"""Seconds by which a video may end before its header says so, or its last frame may stand."""
SOUND = "\0sound"
"""The end of the address of a video's sound."""
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,ogg,asf"
"""FFmpeg's names of the containers that are opened, whatever a file's name; play lists, which name other files, are none."""


class FramePlace(NamedTuple):
    """The address of frames of one video that are one item, taken apart."""

    path: str
    """The video's."""
    frames: tuple[int, ...]
    num_frames: int
    """Equal parts of the video's time that frames are counted by."""


class VideoLength(NamedTuple):
    """Size and length of a video, by its header."""

    size: tuple[int, int]
    """(width, height) of its frames."""
    num_frames: int
    start: float
    """Seconds."""
    seconds: float
    fps: float
    num_samples: int
    """Samples of its sound, at 16 kHz; 0 if it has none."""


def frame_address(place: FramePlace) -> str:
    """Return the address of frames."""
    return f"{place.path}{FRAME_MARK}{','.join(map(str, place.frames))}/{place.num_frames}"


def parse_frame_address(path: str) -> FramePlace | None:
    """Return the frames at an address, or None for the path of an image."""
    match = _ADDRESS.fullmatch(path)
    return match and FramePlace(match[1], tuple(map(int, match[2].split(","))), int(match[3]))


def read_video_length(path: str, *, content: BinaryIO | None = None, where: str) -> VideoLength:
    """Return the size and length of a video from its header; of one that tells no number of frames, by their rate.

    content, where: as for `read_image_size`. Raises ConfigError without PyAV (extra `video`), and DataError for no video.
    """
    with _opened(path, content, where=where) as (container, stream):
        length = _length(stream)
        frame = next(container.decode(stream), None) if math.prod(length.size) <= PILLOW_MAX_PIXELS else None
        return length._replace(size=length.size[::-1]) if frame and _orientation(frame) > 4 else length


def read_frames(place: FramePlace, *, content: BinaryIO | None = None, where: str) -> list[Image.Image]:
    """Decode frames; raises as `read_video_length`. content: as there."""
    with _opened(place.path, content, where=where) as (container, stream):
        length = _length(stream)
        images: dict[int, Image.Image] = {}
        for frame in dict.fromkeys(place.frames):
            time = length.start + (frame + 0.5) * length.seconds / place.num_frames
            container.seek(int(time / stream.time_base), stream=stream)
            found = _frame_at(container.decode(stream), time)
            image, orientation = found.to_image(), _orientation(found)
            images[frame] = image.transpose(_TURNS[orientation]) if orientation in _TURNS else image
        return [images[frame] for frame in place.frames]


def _orientation(frame: Any) -> int:
    """Return the EXIF orientation that says what the matrix of a frame's container does; no header that PyAV shows says so."""
    matrix = bytes(frame.side_data.get("DISPLAYMATRIX", bytes(36)))
    a, b, _, c, d, *_ = struct.unpack("9i", matrix)  # a pixel at (x, y) is shown at (a x + c y, b x + d y)
    x, y = (c, b) if abs(b) > abs(a) else (a, d)
    return 1 + 4 * (abs(b) > abs(a)) + ((x < 0) ^ 3 * (y < 0))


def _frame_at(frames: Iterator[Any], time: float) -> Any:
    """Return the last frame that begins at a time or before it, or the first one; raises ValueError if they end long before."""
    shown = None
    for frame in frames:
        if shown is not None and frame.time > time:
            return shown
        shown = frame
    if shown is None or time > shown.time + _MOST_MISSING:
        raise ValueError(f"there is no frame at {time:.1f} seconds, although its header says so")
    return shown


def read_sound(path: str, *, num_samples: int, content: BinaryIO | None = None, where: str) -> npt.NDArray[np.float32]:
    """Return [num_samples] of a video's sound at 16 kHz, from -1 to 1, the mean of all channels; raises as `read_video_length`.

    num_samples: as its header says; what is decoded is cut to them, or followed by silence. content: as there.
    """
    with _opened(path, content, where=where) as (container, _):
        import av

        resampler = av.AudioResampler(format="fltp", layout="mono", rate=SAMPLING_RATE)
        frames = (*container.decode(audio=0), None)  # nothing: what the resampler holds back
        parts = [part.to_ndarray()[0] for frame in frames for part in resampler.resample(frame)]
    return np.concatenate([*parts, np.zeros(num_samples, np.float32)])[:num_samples].astype(np.float32)


@contextmanager
def _opened(path: str, content: BinaryIO | None, *, where: str) -> Iterator[tuple[Any, Any]]:
    """Give a container and its stream of video; whatever fails meanwhile is a DataError."""
    require_package("av", extra="video", needed_by=path, error=ConfigError)
    import av

    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}
    try:
        with av.open(path if content is None else content, options=options) as container:
            yield container, container.streams.video[0]
    except BraidError:
        raise
    except Exception as problem:  # decoders raise errors of every kind for damaged files
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise DataError(
            f"{where}: {path} cannot be decoded as a video ({reason}); give another file, convert it, or remove the sample"
        ) from problem


def _length(stream: Any) -> VideoLength:
    seconds, start = _seconds(stream), (stream.start_time or 0) * stream.time_base
    number = stream.frames or round(seconds * float(stream.average_rate or 0))
    if not number or not seconds:
        raise ValueError("its header says no length")
    fps = float(stream.average_rate or 0) or number / seconds
    num_samples = sum(round(_seconds(sound) * SAMPLING_RATE) for sound in stream.container.streams.audio[:1])
    return VideoLength((stream.width, stream.height), number, float(start), seconds, fps, num_samples)


def _seconds(stream: Any) -> float:
    """Return how long a stream lasts by its header, or, where that does not say, how long the whole container does."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if tag := re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", "")):  # Matroska's
        return int(tag[1]) * 3600 + int(tag[2]) * 60 + float(tag[3])
    return (stream.container.duration or 0) / 10**6
