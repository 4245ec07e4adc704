"""A generator of sound beside one of images: trained from files on ranks of their own, shown meanwhile, and asked."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy.io import wavfile

from megatron.runtime.generation.drawing import Sound, sound_of
from multimodal.data.audio import sound_to_pixels
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from tests.distributed.launch import launch, train
from tools import generate

SHAPE = {"hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "num_layers": 2}
PICTURES = {"patch_size": 4, "merge_size": 1, "in_channels": 1, "min_pixels": 64, "max_pixels": 256}
SPECTROGRAMS = {**PICTURES, "num_mel_bins": 16, "max_pixels": 16 * 32}


def model_of(**changes: Any) -> dict[str, Any]:
    units = {
        "llm": {"role": "backbone", **SHAPE},
        "painter": {"role": "generator", **SHAPE, "image": PICTURES, "flow": {"condition_tokens": 3}},
        "speaker": {"role": "generator", **SHAPE, "image": {**SPECTROGRAMS, **changes}, "flow": {}},
    }
    return {"units": units}


def tone(seconds: float, *, hertz: float = 440) -> Sound:
    return Sound((0.5 * np.sin(2 * np.pi * hertz * (np.arange(round(seconds * 16000)) / 16000))).astype(np.float32))


def write_run(folder: Path) -> dict[str, object]:
    """Four samples: an image, sound, both, and words."""
    (folder / "model.yaml").write_text(yaml.safe_dump(model_of()))
    Image.linear_gradient("L").resize((12, 8)).save(folder / "a.png")
    tone(0.25).save(folder / "a.wav")
    drawn, spoken = (
        {"type": kind, "role": "assistant", "path": f"a.{suffix}"} for kind, suffix in (("image", "png"), ("audio", "wav"))
    )
    lines = []
    for index, answers in enumerate(([drawn], [spoken], [drawn, spoken], [{"type": "text", "role": "assistant", "text": "yes"}])):
        segments = [{"type": "text", "role": "user", "text": f"make {index}"}, *answers]
        lines.append(json.dumps({"id": str(index), "segments": segments}) + "\n")
    (folder / "manifest.jsonl").write_text("".join(lines))
    flags = {"--model": folder / "model.yaml", "--data-path": folder / "manifest.jsonl", "--split": "100", "--num-workers": 0}
    return {**flags, "--global-batch-size": 4, "--train-iters": 2, "--lr": 1e-3, "--dtype": "float64"}


def test_sound_and_images_come_from_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {**write_run(tmp_path), "--save": tmp_path / "saved", "--report-dir": tmp_path / "report"}
    shows = {"--sample-prompts": tmp_path / "manifest.jsonl", "--eval-iters": 1, "--valid-data-path": tmp_path / "manifest.jsonl"}
    apart = {f"--{unit}-dp": 1 for unit in ("llm", "painter", "speaker")}
    *alone, shown = train({**flags, **shows, "--colocate-units": None, "--log-json": tmp_path / "1.jsonl"}, num_ranks=1)[0]
    others = train({**write_run(tmp_path), **apart, "--micro-batch-size": 2, "--log-json": tmp_path / "3.jsonl"}, num_ranks=3)[0]
    for name in ("loss", "generator_loss", "grad_norm"):
        assert [each[name] for each in others] == pytest.approx([each[name] for each in alone], rel=1e-9), name
    kinds = [next((kind for kind in ("image", "sound") if kind in each), "words") for each in shown["samples"]]
    assert kinds == ["image", "sound", "image", "sound", "words"]
    rate, samples = wavfile.read(tmp_path / "report" / shown["samples"][1]["sound"])
    assert (rate, len(samples)) == (16000, 27 * 160) and shown["samples"][1]["answer"] == "0.27 s of sound"
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count('<audio controls src="data:audio/wav;base64,') == 2
    assert base64.b64encode((tmp_path / "report" / shown["samples"][1]["sound"]).read_bytes()).decode() in page
    for name, more, said in (
        ("out.wav", ["--seconds", "0.2"], "0.19 s of sound"),
        ("out.png", ["--size", "12x8"], "an image of 12x8 pixels"),
    ):
        asked = ["--load", str(tmp_path / "saved"), "--prompt", "make 1", "--num-steps", "2", "--output", str(tmp_path / name)]
        assert generate.main([*asked, *more]) == 0 and said in capsys.readouterr().out
    assert np.abs(wavfile.read(tmp_path / "out.wav")[1]).max() > 0
    assert generate.main([*asked[:-1], str(tmp_path / "long.wav"), "--seconds", "1e9"]) != 0
    assert (
        "a clip of 1000000000.00 s gives 100000000000 frames of 16 bands, but the generator makes 512 values"
        in capsys.readouterr().err
    )


def test_a_clip_that_is_too_long_is_refused_by_every_rank(tmp_path: Path) -> None:
    flags = write_run(tmp_path)
    tone(0.5).save(tmp_path / "a.wav")
    launched = launch({**flags, "--llm-dp": 1, "--painter-dp": 1, "--speaker-dp": 1}, num_ranks=3)
    assert launched.exit_codes == (2, 2, 2)
    assert "a.wav: a clip of 0.50 s gives 52 frames of 16 bands" in launched.output


@pytest.mark.parametrize("hertz", [300, 1200])
def test_a_spectrogram_becomes_the_sound_that_it_is_of(hertz: int) -> None:
    pixels = sound_to_pixels(tone(1, hertz=hertz).samples, num_frames=100, num_mel_bins=64)
    samples = sound_of(pixels).samples
    again = sound_to_pixels(samples, num_frames=100, num_mel_bins=64)
    assert 16000 / len(samples) * np.abs(np.fft.rfft(samples)).argmax() == pytest.approx(hertz, rel=0.05)
    assert np.abs(pixels.astype(int) - again)[pixels > pixels.max() - 40].mean() < 8  # of 255, 4.4 dB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_mel_bins": 18}, "num_mel_bins 18 must be a multiple of patch_size x merge_size = 4"),
        ({"in_channels": 3}, "with in_channels 1"),
        ({"image_size": 16}, "without image_size"),
    ],
)
def test_spectrograms_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelGraph.from_dict(model_of(**change))
