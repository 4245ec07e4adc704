"""Sound: files opened as one channel at 16 kHz, and the frames of it that each token of an audio encoder is made of.

WAV files only need scipy; FLAC, OGG and MP3 need the package soundfile. Every fault is a DataError.

Frames follow Whisper's rule, without padding: a clip of n samples has ceil(n / 160) frames, logarithms of the energy in bands of
the mel scale, every 10 ms. Two convolutions make a token for every two frames; it depends on five. Frames before a clip are zero;
frames behind it are silence, of which the last token reads one or two, as if clips were padded to 30 s. Outside of chunks
everything is zero. Modules that take samples (wav2vec 2.0) get, for every token, the samples from which it is made.
"""

import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from io import BytesIO
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import BraidError, DataError
from multimodal.values.model_graph import AudioInput
from multimodal.values.units.items import FRAMES_PER_TOKEN, Grid, ImageInput

SAMPLING_RATE = 16000
"""Samples per second of all sound that encoders receive."""
_MAX_RATE = 2**20


class _Sound(NamedTuple):
    rate: int
    num_samples: int
    read: Callable[[], npt.NDArray[Any]]
    """Returns [num_samples] or [num_samples, num_channels]."""


def read_audio_length(path: str, *, content: BinaryIO | None = None, where: str) -> int:
    """Return the number of samples at 16 kHz, from the header; raises DataError, which names the file and the sample (`where`).

    content: a sound that is no file of this machine; `path` is then only its name.
    """
    sound = _open(path, content, where=where)
    return -(-sound.num_samples * SAMPLING_RATE // sound.rate)


def read_audio(path: str, *, content: BinaryIO | None = None, num_samples: int, where: str) -> npt.NDArray[np.float32]:
    """Return [num_samples] from -1 to 1, the mean of all channels; content: as for `read_audio_length`.

    num_samples: at 16 kHz, as indexed. Raises DataError if the file is missing, damaged or of another length.
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
        from scipy.signal import resample_poly

        mono = resample_poly(mono, SAMPLING_RATE // divisor, sound.rate // divisor).astype(np.float32)
    if len(mono) != num_samples:
        raise DataError(
            f"{where}: {path} has {len(mono)} samples at 16 kHz, but had {num_samples} when the data was indexed; restore "
            "the file, or start the run again"
        )
    if not np.isfinite(mono).all():
        raise DataError(f"{where}: {path} has samples that are no numbers; replace the file or remove that line")
    return mono


def _open(path: str, content: BinaryIO | None, *, where: str) -> _Sound:
    try:
        with open(path, "rb") if content is None else nullcontext(content) as file:
            is_wav = file.read(4) in (b"RIFF", b"RIFX", b"RF64")
            sound = _check_wav_header(file) if is_wav else None
            file.seek(0)
        if sound is None:
            sound = _open_other(path, content)
        elif content is None or isinstance(content, BytesIO):  # else that costs requests: it is checked when it is heard
            sound = _open_wav(path, content)
    except BraidError:
        raise
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


def _open_wav(path: str, content: BinaryIO | None) -> _Sound:
    """Open a WAV file; if possible, samples are only read from the disk when they are used."""
    from scipy.io import wavfile  # loaded when first used, as all of scipy is: every rank would wait for it at its start

    with warnings.catch_warnings():
        warnings.simplefilter("error", wavfile.WavFileWarning)  # a file that ends too early
        warnings.filterwarnings("ignore", "Chunk .non-data. not understood", wavfile.WavFileWarning)
        try:
            rate, samples = wavfile.read(path if content is None else content, mmap=content is None)
        except ValueError:  # 24-bit samples, among others, cannot be mapped
            rate, samples = wavfile.read(path if content is None else content)
    return _Sound(int(rate), len(samples), lambda: samples)


def _check_wav_header(file: BinaryIO) -> _Sound:
    """Return what the header says, without samples; raises ValueError for bits without bytes, or missing samples."""
    rate, frame_bytes, num_samples = 0, 1, 0
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
            rate = int.from_bytes(content[4:8], form)
            sample_bytes = frame_bytes / max(channels, 1)
            if not 8 <= bits <= 8 * sample_bytes or (bits == 8 and sample_bytes > 1):
                raise ValueError(f"its header says {channels} channels of {bits} bits in {frame_bytes} bytes")
        elif head[:4] == b"data":
            size = large_size if large_size is not None else size
            if size > length - start:
                raise ValueError(f"its header says {size} bytes of sound, but {length - start} follow")
            num_samples = size // max(frame_bytes, 1)
        file.seek(start + size + size % 2)
    return _Sound(rate, num_samples, lambda: np.empty(0))


def _open_other(path: str, content: BinaryIO | None) -> _Sound:
    import soundfile

    whole = None if content is None else content.read()

    def source() -> str | BytesIO:
        return path if whole is None else BytesIO(whole)

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


HOP = 160  # samples from one frame to the next
WINDOW = 400
"""Samples of a frame."""
_FRAMES_BEFORE = 2
"""Frames of a token before its own two."""
SILENCE = -1.5
"""Value of all bands of a frame without sound."""
LOUDEST = 2.0
"""A value that no band of a frame exceeds."""
_SMALLEST_VARIANCE = 1e-7
NOT_IN_OUTPUT = -1
"""Place in the output of a token that merging leaves out."""
_Frames = npt.NDArray[np.float32]


def audio_grid(num_samples: int, *, audio: AudioInput) -> tuple[int, int]:
    """Return (frames, 1) for a clip of so many samples at 16 kHz; raises DataError without a token, or with too many."""
    grid = (-(-num_samples // HOP) if audio.waveform is None else num_samples), 1
    if audio.num_output_tokens(grid) < 1:
        raise DataError(
            f"a clip of {num_samples} samples at 16 kHz gives {audio.num_tokens(grid)} tokens, fewer than the "
            f"{audio.merge_factor} that are merged into one; make it longer"
        )
    if audio.num_tokens(grid) > audio.max_tokens:
        raise DataError(
            f"a clip of {num_samples / 16000:.2f} s gives {audio.num_tokens(grid)} tokens, but the encoder takes "
            f"{audio.max_tokens} (max_tokens); cut it into several"
        )
    return grid


def audio_to_patches(samples: npt.NDArray[np.float32], *, audio: AudioInput) -> ItemPixels:
    """Return the input values of every token of a clip; samples: [num_samples] at 16 kHz, from -1 to 1."""
    grid = audio_grid(len(samples), audio=audio)
    if audio.waveform is not None:
        return samples_to_patches(samples, audio=audio)
    most = 2 * audio.max_tokens
    num_shown = min(grid[0] + _FRAMES_BEFORE, most)
    frames = log_mel(samples, num_frames=num_shown, most_samples=most * HOP, num_mel_bins=audio.num_mel_bins)
    return frames_to_patches(frames, grid, audio=audio)


def samples_to_patches(samples: npt.NDArray[np.float32], *, audio: AudioInput) -> ItemPixels:
    """Return the samples of every token; they overlap."""
    waveform, grid = audio.waveform, (len(samples), 1)
    assert waveform is not None
    if waveform.is_normalised:
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + _SMALLEST_VARIANCE)
    windows = np.lib.stride_tricks.sliding_window_view(samples, waveform.samples_seen)[:: waveform.samples_per_token]
    return ItemPixels(np.ascontiguousarray(windows, dtype=np.float32), grid)


def frames_to_patches(frames: _Frames, grid: tuple[int, int], *, audio: AudioInput) -> ItemPixels:
    """Return the input values of every token; frames: [at least grid[0], num_mel_bins], including those behind the clip."""
    num_frames = grid[0]
    if audio.chunk_tokens is None:
        return ItemPixels(_frames_of_tokens(frames, audio.num_tokens(grid)), grid)
    size = 2 * audio.chunk_tokens
    chunks = [frames[start : min(start + size, num_frames)] for start in range(0, num_frames, size)]
    return ItemPixels(np.concatenate([_frames_of_tokens(chunk, audio.num_tokens((len(chunk), 1))) for chunk in chunks]), grid)


def audio_positions(grid: Grid, *, audio: AudioInput) -> npt.NDArray[np.int64]:
    """Return [num_tokens, 3]: place, frames (1 where a chunk ends, else 2), and place in the output, or NOT_IN_OUTPUT."""
    num_frames, num_tokens = grid[0], audio.num_tokens(grid)
    places = np.arange(num_tokens)
    num_own = np.full(num_tokens, 2)
    if audio.chunk_tokens is not None and num_frames % 2:
        num_own[-1] = 1
    outputs = places // audio.merge_factor
    outputs[outputs >= audio.num_output_tokens(grid)] = NOT_IN_OUTPUT
    return np.stack((places, num_own, outputs), axis=1).astype(np.int64)


def sound_grid(num_samples: int, *, image: ImageInput) -> tuple[int, int]:
    """Return the (rows, columns) of patches of a spectrogram, up to a whole patch; raises DataError beyond `max_pixels`."""
    assert image.num_mel_bins is not None
    side = image.patch_size * image.merge_size
    least, num_frames = -(-image.min_pixels // image.num_mel_bins), -(-num_samples // HOP)
    columns = -(-max(num_frames, least) // side) * side
    if columns * image.num_mel_bins > image.max_pixels:
        raise DataError(
            f"a clip of {num_samples / SAMPLING_RATE:.2f} s gives {columns} frames of {image.num_mel_bins} bands, but the "
            f"generator makes {image.max_pixels} values of them (max_pixels); raise it or make the clip shorter"
        )
    return image.num_mel_bins // image.patch_size, columns // image.patch_size


def sound_to_pixels(samples: npt.NDArray[np.float32], *, num_frames: int, num_mel_bins: int) -> npt.NDArray[np.uint8]:
    """Return the spectrogram of a clip and of silence behind it as an image, [num_mel_bins, num_frames] bytes."""
    frames = log_mel(samples, num_frames=num_frames, most_samples=num_frames * HOP, num_mel_bins=num_mel_bins)
    return (255 * (frames.T - SILENCE) / (LOUDEST - SILENCE)).clip(0, 255).round().astype(np.uint8)


def log_mel(samples: npt.NDArray[np.float32], *, num_frames: int, most_samples: int, num_mel_bins: int) -> _Frames:
    """Return [num_frames, num_mel_bins] for a clip followed by silence, as Whisper's feature extractor computes them.

    most_samples: of the longest clip, which has no silence behind it: a frame that extends beyond it reads it mirrored.
    """
    from scipy.fft import rfft

    num_needed = min((num_frames - 1) * HOP + WINDOW // 2 + 1, most_samples)
    padded = np.pad(samples, (0, max(0, num_needed - len(samples))))
    padded = np.pad(padded, WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:num_frames]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
    energies = np.abs(rfft(windows * hann, axis=1)) ** 2
    logarithms = np.log10(np.maximum(energies @ mel_filters(num_mel_bins), 1e-10))
    return ((np.maximum(logarithms, logarithms.max() - 8) + 4) / 4).astype(np.float32)


def _frames_of_tokens(frames: _Frames, num_tokens: int) -> _Frames:
    """Return [num_tokens, 5 * num_mel_bins]; missing frames are zero."""
    missing = 2 * num_tokens + 1 - len(frames)
    padded = np.pad(frames, ((_FRAMES_BEFORE, max(0, missing)), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, FRAMES_PER_TOKEN, axis=0)[::2][:num_tokens]
    return np.ascontiguousarray(windows.transpose(0, 2, 1)).reshape(num_tokens, -1)


@lru_cache(maxsize=4)
def mel_filters(num_mel_bins: int) -> _Frames:
    """Return [201, num_mel_bins]: triangles of equal area over frequencies up to 8 kHz, on Slaney's mel scale."""
    # The scale is linear below 1000 Hz, which is 15 mel, and logarithmic above.
    mels = np.linspace(0, 15 + np.log(8000.0 / 1000) * 27 / np.log(6.4), num_mel_bins + 2)
    corners = np.where(mels >= 15, 1000 * np.exp(np.log(6.4) / 27 * (np.maximum(mels, 15) - 15)), 200 * mels / 3)
    slopes = corners[None, :] - np.linspace(0, 8000, WINDOW // 2 + 1)[:, None]
    widths = np.diff(corners)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return (triangles * 2 / (corners[2:] - corners[:-2])).astype(np.float32)
