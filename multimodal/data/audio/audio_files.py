"""Opens sound files as one channel at 16 kHz; every fault is a DataError.

WAV files only need scipy; FLAC, OGG and MP3 need the package soundfile.
"""

import math
import os
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.io import wavfile

from multimodal.values.errors import DataError

SAMPLING_RATE = 16000
"""Samples per second of all sound that encoders receive."""
_MAX_RATE = 2**20


class _Sound(NamedTuple):
    rate: int
    num_samples: int
    read: Callable[[], npt.NDArray[Any]]
    """Returns [num_samples] or [num_samples, num_channels]."""


def read_audio_length(path: str, *, content: bytes | None = None, where: str) -> int:
    """Return the samples of a file at 16 kHz, from its header; raises DataError naming the file and the sample (`where`).

    content: the bytes of a sound that is no file; `path` is then only its name.
    """
    sound = _open(path, content, where=where)
    return -(-sound.num_samples * SAMPLING_RATE // sound.rate)


def read_audio(path: str, *, content: bytes | None = None, num_samples: int, where: str) -> npt.NDArray[np.float32]:
    """Return [num_samples] from -1 to 1, the mean of all channels.

    content: as for `read_audio_length`; num_samples: at 16 kHz, the number that the lengths were computed from. Raises DataError
    if the file is missing, damaged or of another length.
    """
    sound = _open(path, content, where=where)
    try:
        mono = _to_unit_range(np.asarray(sound.read()), path, where=where)
    except (OSError, ValueError, RuntimeError) as problem:
        raise _unreadable(path, where=where, problem=problem) from problem
    if mono.ndim > 1:
        mono = mono.mean(axis=1)
    if sound.rate != SAMPLING_RATE:
        divisor = math.gcd(sound.rate, SAMPLING_RATE)
        from scipy.signal import resample_poly  # which every rank would wait for at its start otherwise

        mono = resample_poly(mono, SAMPLING_RATE // divisor, sound.rate // divisor).astype(np.float32)
    if len(mono) != num_samples:
        raise DataError(
            f"{where}: {path} has {len(mono)} samples at 16 kHz, but had {num_samples} when the data was indexed; restore "
            "the file, or start the run again"
        )
    if not np.isfinite(mono).all():
        raise DataError(f"{where}: {path} has samples that are no numbers; replace the file or remove that line")
    return mono


def _open(path: str, content: bytes | None, *, where: str) -> _Sound:
    try:
        with open(path, "rb") if content is None else BytesIO(content) as file:
            is_wav = file.read(4) in (b"RIFF", b"RIFX", b"RF64")
            if is_wav:
                _check_wav_header(file)
        sound = _open_wav(path, content) if is_wav else _open_other(path, content)
    except ImportError as problem:
        raise DataError(
            f"{where}: {path} is no WAV file, and to read FLAC, OGG or MP3 the package soundfile is missing; install it "
            "(pip install 'braid[audio]'), convert the file (ffmpeg -i FILE FILE.wav), or remove that line"
        ) from problem
    except Exception as problem:  # damaged files raise errors of every kind
        raise _unreadable(path, where=where, problem=problem) from problem
    if not 0 < sound.rate <= _MAX_RATE or sound.num_samples < 1:
        raise DataError(
            f"{where}: {path} has {sound.num_samples} samples at a rate of {sound.rate}, expected at least one, at 1 to "
            f"{_MAX_RATE} a second; replace the file or remove that line"
        )
    return sound


def _open_wav(path: str, content: bytes | None) -> _Sound:
    """Open a WAV file; if possible, samples are only read from the disk when they are used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", wavfile.WavFileWarning)  # a file that ends too early
        warnings.filterwarnings("ignore", "Chunk .non-data. not understood", wavfile.WavFileWarning)
        try:
            rate, samples = wavfile.read(path if content is None else BytesIO(content), mmap=content is None)
        except ValueError:  # 24-bit samples, among others, cannot be mapped
            rate, samples = wavfile.read(path if content is None else BytesIO(content))
    return _Sound(int(rate), len(samples), lambda: samples)


def _check_wav_header(file: BinaryIO) -> None:
    """Raise ValueError for samples of more bits than they have bytes for, and for more samples than follow; scipy reads both."""
    file.seek(0)
    form: Literal["big", "little"] = "big" if file.read(4) == b"RIFX" else "little"
    length, large_size = file.seek(0, os.SEEK_END), None
    file.seek(12)
    while len(head := file.read(8)) == 8:
        start, size = file.tell(), int.from_bytes(head[4:], form)
        if head[:4] == b"ds64":
            large_size = int.from_bytes(file.read(16)[8:], form)
        elif head[:4] == b"fmt ":
            content = file.read(16)
            channels, frame_bytes, bits = (int.from_bytes(content[place : place + 2], form) for place in (2, 12, 14))
            sample_bytes = frame_bytes / max(channels, 1)
            if not 8 <= bits <= 8 * sample_bytes or (bits == 8 and sample_bytes > 1):
                raise ValueError(f"its header says {channels} channels of {bits} bits in {frame_bytes} bytes")
        elif head[:4] == b"data":
            size = large_size if large_size is not None else size
            if size > length - start:
                raise ValueError(f"its header says {size} bytes of sound, but {length - start} follow")
        file.seek(start + size + size % 2)


def _open_other(path: str, content: bytes | None) -> _Sound:
    import soundfile

    def source() -> str | BytesIO:
        return path if content is None else BytesIO(content)

    header = soundfile.info(source())
    return _Sound(header.samplerate, header.frames, lambda: soundfile.read(source(), dtype="float32")[0])


def _unreadable(path: str, *, where: str, problem: Exception) -> DataError:
    reason = " ".join(str(problem).split()) or type(problem).__name__
    return DataError(
        f"{where}: {path} cannot be decoded as sound ({reason}); convert it (ffmpeg -i FILE -ar 16000 FILE.wav), or "
        "remove that line"
    )


def _to_unit_range(samples: npt.NDArray[Any], path: str, *, where: str) -> npt.NDArray[np.float32]:
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    if samples.dtype == np.uint8:
        return ((samples.astype(np.float64) - 128) / 128).astype(np.float32)
    if samples.dtype.kind == "i":
        return (samples.astype(np.float64) / (float(np.iinfo(samples.dtype).max) + 1)).astype(np.float32)
    raise DataError(f"{where}: {path} has samples of type {samples.dtype}; convert it to 16-bit PCM")
