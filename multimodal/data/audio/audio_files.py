"""Opens WAV files that others made, as one channel at 16 kHz; every fault is a DataError."""

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.io import wavfile
from scipy.signal import resample_poly

from multimodal.values.errors import DataError

SAMPLING_RATE = 16000
"""Samples a second of everything that encoders are given."""
_MAX_RATE = 2**20


def read_audio_length(path: str, *, where: str) -> int:
    """Return the samples of a file at 16 kHz, from its header; raises DataError naming the file and `where` it is asked for."""
    rate, samples = _open(path, where=where)
    return -(-len(samples) * SAMPLING_RATE // rate)


def read_audio(path: str, *, num_samples: int, where: str) -> npt.NDArray[np.float32]:
    """Return [num_samples] from -1 to 1, the mean of all channels.

    num_samples: at 16 kHz, as the lengths were computed from. Raises DataError when the file is missing, damaged or of another
    length.
    """
    rate, samples = _open(path, where=where)
    mono = _to_unit_range(np.asarray(samples), path, where=where)
    if mono.ndim > 1:
        mono = mono.mean(axis=1)
    if rate != SAMPLING_RATE:
        divisor = math.gcd(rate, SAMPLING_RATE)
        mono = resample_poly(mono, SAMPLING_RATE // divisor, rate // divisor).astype(np.float32)
    if len(mono) != num_samples:
        raise DataError(
            f"{where}: {path} has {len(mono)} samples at 16 kHz, but had {num_samples} when the data was indexed; restore "
            "the file, or start the run again"
        )
    if not np.isfinite(mono).all():
        raise DataError(f"{where}: {path} has samples that are no numbers; replace the file or remove that line")
    return mono


def _open(path: str, *, where: str) -> tuple[int, npt.NDArray[Any]]:
    """Return the rate and the samples, which are not read from the disk before they are used, where that is possible."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", wavfile.WavFileWarning)  # a file that ends too early
            warnings.filterwarnings("ignore", "Chunk .non-data. not understood", wavfile.WavFileWarning)
            try:
                rate, samples = wavfile.read(path, mmap=True)
            except ValueError:  # 24-bit samples, among others, cannot be mapped
                rate, samples = wavfile.read(path)
    except Exception as problem:  # damaged files raise errors of every kind
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise DataError(
            f"{where}: {path} cannot be read as a WAV file ({reason}); convert it (ffmpeg -i FILE -ar 16000 FILE.wav), or remove "
            "that line"
        ) from problem
    if not 0 < rate <= _MAX_RATE or not len(samples):
        raise DataError(
            f"{where}: {path} has {len(samples)} samples at a rate of {rate}, expected at least one, at 1 to {_MAX_RATE} a "
            "second; replace the file or remove that line"
        )
    return int(rate), samples


def _to_unit_range(samples: npt.NDArray[Any], path: str, *, where: str) -> npt.NDArray[np.float32]:
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    if samples.dtype == np.uint8:
        return ((samples.astype(np.float64) - 128) / 128).astype(np.float32)
    if samples.dtype.kind == "i":
        return (samples.astype(np.float64) / (float(np.iinfo(samples.dtype).max) + 1)).astype(np.float32)
    raise DataError(f"{where}: {path} has samples of type {samples.dtype}; convert it to 16-bit PCM")
