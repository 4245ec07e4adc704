"""The samples that examples/speech makes of recordings, and how it counts wrong words."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("soundfile", reason="soundfile is not installed (pip install 'braid[audio]')")
pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

import soundfile

EXAMPLE = Path(__file__).parents[2] / "examples" / "speech"


@pytest.fixture
def make_sounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE)
    return import_module("make_sounds")


def test_transcripts_name_the_digits_that_are_heard(make_sounds: ModuleType) -> None:
    voice = [np.full(80, (digit + 1) / 16, np.float32) for digit in range(10)]
    for index in range(20):
        sample = make_sounds.say_digits(voice, str(index), speeds=(20,))
        starts = np.flatnonzero(np.diff(sample.sound, prepend=0) > 0)
        heard = [make_sounds.DIGITS[round(float(sample.sound[start]) * 16) - 1] for start in starts]
        assert sample.transcript.split() == heard


def test_held_out_digits_are_of_another_voice(make_sounds: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    for digit in range(10):
        sound = np.concatenate([np.zeros(160), np.full(80, 0.9), np.zeros(160)])
        soundfile.write(tmp_path / "digits" / f"{digit}.wav", sound, make_sounds.RATE)
    monkeypatch.setattr(make_sounds, "unpack_sounds", lambda packages, scratch: tmp_path)
    monkeypatch.setattr(make_sounds, "speak_digits", lambda: iter([[np.full(80, 0.2, np.float32)] * 10]))
    train, held_out = make_sounds.make_digits(tmp_path, tmp_path)
    assert (len(train), len(held_out)) == (make_sounds.NUM_STRINGS, make_sounds.NUM_HELD_OUT)
    assert max(np.abs(sample.sound).max() for sample in train) < 0.4
    for sample in held_out:
        assert np.count_nonzero(sample.sound) == 80 * len(sample.transcript.split()), "silence at the ends of recordings is cut"
        assert np.abs(sample.sound).max() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("said", "meant", "wrong"),
    [
        ("One, two.", "one two", 0),
        ("", "one two three", 3),
        ("one three", "one two three", 1),
        ("one two two three", "one two three", 1),
        ("nine two three", "five two three", 1),
        ("two three one", "one two three", 2),
    ],
)
def test_wrong_words(said: str, meant: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    transcribe = import_module("transcribe")
    assert transcribe.num_errors(transcribe.words(said), transcribe.words(meant)) == wrong
