"""Frames of sound and their number, against the feature extractor and the length formulas of transformers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from multimodal.data import audio
from multimodal.data.audio import SILENCE, audio_grid, audio_positions, audio_to_patches, log_mel, read_audio, read_audio_length
from multimodal.data.length_table import read_length_table
from multimodal.values.errors import DataError
from multimodal.values.model_graph import AudioInput, ModelGraph
from multimodal.values.units.items import Waveform

WHISPER = AudioInput(num_mel_bins=80)
SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}


def noise(num_samples: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(num_samples) * 0.1).astype(np.float32)


def extractor() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")
    return transformers.WhisperFeatureExtractor(feature_size=80)


SAMPLES = AudioInput(
    waveform=Waveform(widths=(10, 3, 3, 3, 3, 2, 2), steps=(5, 2, 2, 2, 2, 2, 2), is_normalised=True), max_tokens=6000
)
"""As wav2vec 2.0 has it: 400 samples a token, every 320."""


def test_samples_and_their_tokens_are_those_of_transformers():
    """Of 1,000 random durations; samples as the feature extractor normalises them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "conv_dim": (8,) * 7}
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**shape, num_conv_pos_embedding_groups=1))
    lengths = np.random.default_rng(1).integers(400, 1_900_000, size=1000)
    expected = model._get_feat_extract_output_lengths(torch.from_numpy(lengths))
    assert [SAMPLES.num_tokens((int(length), 1)) for length in lengths] == expected.tolist()
    found = audio_to_patches(noise(4000), audio=SAMPLES).patches
    (whole,) = transformers.Wav2Vec2FeatureExtractor()(noise(4000), sampling_rate=16000)["input_values"]
    assert found.shape == (12, 400)
    np.testing.assert_allclose(found, [whole[320 * index : 320 * index + 400] for index in range(12)], atol=1e-6)
    with pytest.raises(DataError, match="a clip of 399 samples at 16 kHz gives 0 tokens"):
        audio_grid(399, audio=SAMPLES)


@pytest.mark.parametrize("num_samples", [1, 160, 161, 16001, 479_841, 480_000])
def test_frames_are_those_of_transformers(num_samples):
    """Those of the clip, and the two behind it that the last token sees where there are so many."""
    samples = noise(num_samples)
    expected = extractor()(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="np")
    num_frames = int(expected["attention_mask"].sum())
    assert num_frames == -(-num_samples // 160)
    num_shown = min(num_frames + 2, 3000)
    found = log_mel(samples, num_frames=num_shown, most_samples=480_000, num_mel_bins=80)
    np.testing.assert_allclose(found, expected["input_features"][0].T[:num_shown], atol=1e-4)


def test_a_clip_without_sound_is_silent_throughout():
    patches = audio_to_patches(np.zeros(3200, dtype=np.float32), audio=WHISPER).patches
    assert patches.shape == (10, 5 * 80) and not patches[0, : 2 * 80].any()
    np.testing.assert_allclose(patches.flatten()[2 * 80 :], SILENCE, rtol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [None, 100])
def test_lengths_are_those_of_transformers(chunk_tokens, tmp_path):
    """Of 1,000 random durations; from seconds in a table, too."""
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

    audio = AudioInput(chunk_tokens=chunk_tokens)
    counts = np.random.default_rng(0).integers(321, 480_000, 1000)
    frames = torch.from_numpy(-(-counts // 160))
    inside, outside = Qwen2AudioEncoder._get_feat_extract_output_lengths(None, frames)
    grids = [audio_grid(int(count), audio=audio) for count in counts]
    assert [audio.num_tokens(grid) for grid in grids] == inside.tolist()
    assert [audio.num_output_tokens(grid) for grid in grids] == outside.tolist()
    assert outside.tolist() == _get_feat_extract_output_lengths(frames).tolist()
    ear = {"role": "encoder", **SHAPE, "audio": {}}
    graph = ModelGraph.from_dict({"units": {"ear": ear, "llm": {"role": "backbone", **SHAPE}}})
    (tmp_path / "a.csv").write_text("audio_seconds\n" + "".join(f"{count / 16000}\n" for count in counts))
    items = [sample.items[0] for sample in read_length_table(tmp_path / "a.csv", graph=graph)]
    assert [item[1:3] for item in items] == list(zip(inside.tolist(), outside.tolist(), strict=True))


@pytest.mark.parametrize(("num_samples", "message"), [(320, "fewer than the 2 that are merged"), (480_001, "30.00 s gives 1501")])
def test_clips_without_a_token_or_with_too_many_are_refused(num_samples, message):
    with pytest.raises(DataError, match=message):
        audio_grid(num_samples, audio=WHISPER)


def test_places_say_what_is_left_over_and_where_chunks_end():
    """Nine frames, four tokens of two and one of one; chunks of three tokens do not look beyond."""
    audio = AudioInput(num_mel_bins=1, chunk_tokens=3, max_tokens=50)
    assert audio_positions((9, 1), audio=audio).tolist() == [[0, 2, 0], [1, 2, 0], [2, 2, 1], [3, 2, 1], [4, 1, -1]]
    whole = AudioInput(num_mel_bins=1)
    assert audio_positions((9, 1), audio=whole)[:, 1].tolist() == [2] * 5
    samples = noise(9 * 160)
    frames = log_mel(samples, num_frames=11, most_samples=480_000, num_mel_bins=1)[:, 0].tolist()
    assert audio_to_patches(samples, audio=whole).patches.tolist()[-1] == frames[6:11]
    patches = audio_to_patches(samples, audio=audio).patches.tolist()
    assert patches[2] == [*frames[2:6], 0] and patches[3] == [0, 0, *frames[6:9]] and patches[4] == [*frames[6:9], 0, 0]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32])
def test_files_become_one_channel_at_16_khz(dtype, data, tmp_path):
    path = str(tmp_path / data.audio("a.wav", 1001, rate=8000, dtype=dtype, channels=2))
    length = read_audio_length(path, where="here")
    assert length == 2002
    found = read_audio(path, num_samples=length, where="here")
    assert found.shape == (2002,) and found.dtype == np.float32
    same = str(tmp_path / data.audio("b.wav", 1001, dtype=dtype))
    expected = np.random.default_rng(0).uniform(-0.5, 0.5, (1001, 1))[:, 0]
    np.testing.assert_allclose(read_audio(same, num_samples=1001, where="here"), expected, atol=0.02)


def test_lengths_are_read_from_headers(data, tmp_path, monkeypatch):
    path = str(tmp_path / data.audio("a.wav", 5000))
    monkeypatch.setattr(audio, "_to_unit_range", None)
    assert read_audio_length(path, where="here") == 5000
    assert isinstance(wavfile.read(path, mmap=True)[1], np.memmap)


@pytest.mark.parametrize("content", [b"RIFF", b"RIFFnot a wave file at all", None])
def test_damaged_files_are_refused(content, data, tmp_path):
    path = tmp_path / data.audio("a.wav", 100)
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    with pytest.raises(DataError, match=r"line 3: .*a.wav cannot be decoded as sound .* convert it"):
        read_audio_length(str(path), where="line 3")


def test_other_forms_need_a_package(tmp_path, monkeypatch):
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"line 3: .*a.flac is no WAV file, .* the package soundfile is missing; install it"):
        read_audio_length(str(tmp_path / "a.flac"), where="line 3")


@pytest.mark.parametrize("form", ["FLAC", "OGG"])
def test_other_forms_are_read(form, tmp_path):
    soundfile = pytest.importorskip("soundfile", reason="the optional package 'soundfile' is not installed")
    path, samples = str(tmp_path / f"a.{form.lower()}"), noise(4001)
    soundfile.write(path, samples, 8000, format=form)
    assert read_audio_length(path, where="here") == 8002
    found = read_audio(path, num_samples=8002, where="here")
    assert np.corrcoef(found[::2], samples)[0, 1] > 0.9
    Path(path).write_bytes(Path(path).read_bytes()[:300])
    with pytest.raises(DataError, match="cannot be decoded as sound|has .* samples"):
        read_audio(path, num_samples=8002, where="here")


def test_a_file_that_changed_is_refused(data, tmp_path):
    path = str(tmp_path / data.audio("a.wav", 100))
    with pytest.raises(DataError, match="has 100 samples at 16 kHz, but had 99 when the data was indexed"):
        read_audio(path, num_samples=99, where="here")
