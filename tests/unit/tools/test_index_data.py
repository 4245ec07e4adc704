"""The tool that indexes a run's data ahead of it, and reads everything once."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.distributed.launch import REPOSITORY
from tools.index_data import main

ANSWER = {"role": "assistant", "content": "a 7"}


def test_what_is_broken_is_listed_once_and_the_rest_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "b.png", "cut.png", "text.png"):
        Image.effect_noise((32, 32), 60).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-200])
    samples = [
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": [f"{name}.png"]}
        for name in ("a", "text", "cut", "cut", "gone", "b")
    ]
    data = tmp_path / "data.json"
    flags = ["--config", str(REPOSITORY / "examples/digits/config.yaml"), "--data-path", str(data)]

    data.write_text("\n".join(map(json.dumps, samples)))
    assert main(["--check", *flags]) == 2
    said = capsys.readouterr()
    for name, problem in (("text", "cannot be decoded as an image"), ("cut", "cannot be decoded"), ("gone", "does not exist")):
        assert len([line for line in said.out.splitlines() if f"{name}.png {problem}" in line]) >= 1, said.out
    assert "4 items are broken, listed above" in said.err

    data.write_text("\n".join(map(json.dumps, (samples[0], samples[-1]))))
    assert main(["--check", *flags]) == 0
    assert "2 samples, all of whose items can be read" in capsys.readouterr().out
    assert main(flags) == 0
    assert (tmp_path / ".braid-index").is_dir() and capsys.readouterr().out.endswith("2 samples\n")
