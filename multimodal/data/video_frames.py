"""Takes frames out of a video, as images."""

import tempfile
from pathlib import Path

from multimodal.values.errors import ConfigError, DataError


def write_frames(path: str | Path, folder: Path, *, num_frames: int) -> list[Path]:
    """Write frames in the middle of `num_frames` equal parts of a video's time as PNG files, in a new folder inside `folder`.

    Returns the files in order. A video of fewer frames gives each once. It is decoded from its beginning. Raises ConfigError
    without PyAV (extra `video`), and DataError if that cannot decode the file.
    """
    try:
        import av
    except ImportError as problem:
        raise ConfigError(f"{path}: videos need the package av: pip install 'braid[video]'") from problem
    try:
        with av.open(str(path)) as opened:
            times = [float(frame.time or 0.0) for frame in opened.decode(video=0)]
        if not times:
            raise DataError(f"{path}: has no frames; give another video")
        length = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)  # the last frame lasts as long as the others
        middles = [times[0] + (part + 0.5) * length / num_frames for part in range(num_frames)]
        shown = sorted({max(index for index, time in enumerate(times) if time <= middle or index == 0) for middle in middles})
        written, place = [], Path(tempfile.mkdtemp(dir=folder))
        with av.open(str(path)) as opened:
            for index, frame in enumerate(opened.decode(video=0)):
                if index in shown:
                    written.append(place / f"{index:08}.png")
                    frame.to_image().save(written[-1])
    except (av.FFmpegError, OSError, IndexError) as problem:
        raise DataError(f"{path}: cannot be decoded as a video ({problem}); give another file, or convert it") from problem
    return written
