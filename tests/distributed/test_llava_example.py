"""examples/llava in small: its inputs, its two stages, the second from the first; and data that is wrong, on every rank."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

import torch
from safetensors.torch import load_file

from multimodal.data.index.index_cache import FOLDER_NAME
from tests.distributed.launch import REPOSITORY, launch

EXAMPLE = REPOSITORY / "examples" / "llava"
SMALL = {"--train-iters": 2, "--global-batch-size": 4, "--num-workers": 0, "--lr-warmup-iters": 0, "--log-interval": 1}
_spec = importlib.util.spec_from_file_location("make_inputs", EXAMPLE / "make_inputs.py")
assert _spec is not None and _spec.loader is not None
make_inputs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_inputs)


def write_inputs(folder: Path, kind: str) -> tuple[Path, Path]:
    make_inputs.write_model(folder / "model", kind=kind)
    return folder / "model", make_inputs.write_data(folder / "data", num_samples=24)


def train(stage: str, flags: dict[str, Any]) -> str:
    given = {"--config": EXAMPLE / f"{stage}.yaml", **SMALL, **flags}
    done = launch([part for pair in given.items() for part in pair], num_ranks=2)
    assert done.exit_codes == (0, 0), done.output
    return done.output


def changed(before: Path, after: Path) -> set[str]:
    first, second = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert first.keys() == second.keys()
    return {key for key in first if not torch.equal(first[key], second[key])}


def test_llava_in_two_stages(tmp_path: Path) -> None:
    """The projector alone, then all; the second run finds the index of the first."""
    model, data = write_inputs(tmp_path, "llava")
    first, written = tmp_path / "projector", tmp_path / "first"
    train("projector", {"--load-hf": model, "--data-path": data, "--save": first, "--save-hf": written})
    assert changed(model, written) and all("projector" in key for key in changed(model, written))
    (index,) = (data.parent / FOLDER_NAME).iterdir()
    before = index.stat().st_mtime_ns
    trained = tmp_path / "trained"
    model_flags = {"--model": model, "--tokenizer-model": model, "--load": first, "--save-hf": trained}
    assert "starting at step 0 from the weights of" in train("all", {**model_flags, "--data-path": data, "--eval-iters": 1})
    assert index.stat().st_mtime_ns == before and [*(data.parent / FOLDER_NAME).iterdir()] == [index]
    assert len(changed(model, trained)) > len(changed(model, written))
    assert (trained / "chat_template.jinja").read_text() == make_inputs.LLAVA_TEMPLATE


def test_qwen2_5_vl_begins(tmp_path: Path) -> None:
    model, data = write_inputs(tmp_path, "qwen2_5_vl")
    assert "step 2/2" in train("projector", {"--load-hf": model, "--data-path": data})


def cut_off(data: Path, model: Path) -> None:
    text = data.read_text()
    data.write_text(text[: len(text) // 2])


def damage_an_image(data: Path, model: Path) -> None:
    for path in (data.parent / "images").iterdir():
        path.write_bytes(path.read_bytes()[:60])  # the header is right, so that it shows when the image is decoded


WRONG: dict[Callable[[Path, Path], None], str] = {
    cut_off: "conversations.json, line ",
    damage_an_image: ".png cannot be decoded as an image",
}


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_with_data_ends_every_rank(spoil: Callable[[Path, Path], None], tmp_path: Path) -> None:
    model, data = write_inputs(tmp_path, "llava")
    spoil(data, model)
    flags = {"--config": EXAMPLE / "projector.yaml", **SMALL, "--load-hf": model, "--data-path": data}
    done = launch([part for pair in flags.items() for part in pair], num_ranks=2, timeout_seconds=90)
    assert all(code not in (0, None) for code in done.exit_codes), done.output
    assert done.output.count(WRONG[spoil]) == 1, done.output
    assert "Traceback" not in done.output
