"""--bad-sample skip: the losses, gradients and evaluations of runs in which the samples that cannot be read are not there."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.launch import launch
from tests.distributed.small_run import LEFT_OUT, MODEL, manifest_entries, train, working_flags, write_working_files

PAINTER = {"role": "generator", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
SKIP: dict[str, object] = {"--bad-sample": "skip", "--bad-samples-per-thousand": 9}
SPREAD = {"--llm-pp": 2, "--painter-tp": 2, "--sequence-parallel": None, "--num-workers": 1}
DECODED = {"--llm-cp": 2, "--painter-cp": 2, "--lengths-from": "decode", "--num-workers": LEFT_OUT}


def write_data(folder: Path, name: str, entries: list[dict[str, Any]]) -> Path:
    path = folder / "data" / name
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two data sets, of which the second has an image to be made, and weights; an image is damaged behind its header."""
    write_working_files(tmp_path)
    image = {"patch_size": 8, "merge_size": 1, "min_pixels": 64, "max_pixels": 1024}
    model = {**MODEL, "units": {**MODEL["units"], "painter": {**PAINTER, "image": image}}}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model, sort_keys=False))
    entries = manifest_entries()
    for index, entry in enumerate(entries):
        entry["loss_weight"] = 1 + index / 2
        if index > 1:
            entry["segments"].append({**entry["segments"][0], "path": f"{3 - index}.png", "role": "assistant"})
            entry["segments"][-1] |= {"width": 32 + 16 * (3 - index)}
    gone = {**entries[0], "id": "gone", "segments": [{"type": "image", "path": "gone.png"}, entries[0]["segments"][1]]}
    write_data(tmp_path, "first.jsonl", [gone, *entries[:2]])
    write_data(tmp_path, "second.jsonl", entries[2:])
    write_data(tmp_path, "only.jsonl", [entries[0]])
    write_data(tmp_path, "rest.jsonl", [entries[3]])
    damaged = tmp_path / "data" / "1.png"  # the picture of the second sample, and what is made of the third
    damaged.write_bytes(damaged.read_bytes()[:300])
    return tmp_path


def run(folder: Path, names: tuple[str, str], flags: dict[str, object], *, num_ranks: int) -> tuple[list[list[float]], str]:
    """Return the figures of two steps and an evaluation, and what was said; every batch has all samples of both data sets."""
    paths = [folder / "data" / f"{name}.jsonl" for name in names]
    batch = {"--data-path": paths, "--valid-data-path": f"all={paths[1]}", "--eval-iters": 1, "--micro-batch-size": 1}
    _, done = train(folder, {**batch, **flags}, num_ranks=num_ranks)
    entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    figures = ("loss", "generator_loss", "grad_norm", "token_accuracy")
    found = [[*(each[name] for name in figures if name in each), *each.get("data_set_losses", {}).values()] for each in entries]
    return found, done.output


@pytest.mark.deep(when=lambda flags: flags == SPREAD)
@pytest.mark.parametrize("flags", [SPREAD, DECODED], ids=["spread", "decoded"])
def test_what_cannot_be_read_counts_nothing_on_any_plan(folder: Path, flags: dict[str, object]) -> None:
    expected, _ = run(folder, ("only", "rest"), {"--global-batch-size": 2}, num_ranks=3)
    assert list(map(len, expected)) == [5, 5, 3]
    found, said = run(folder, ("first", "second"), {**SKIP, **flags, "--global-batch-size": 4}, num_ranks=5)
    assert found == [pytest.approx(each, rel=0, abs=1e-9) for each in expected], said
    assert "left out 1 samples that cannot be read" in said and "gone.png does not exist" in said
    assert said.count("left out a sample that cannot be read") == 6 and "1.png cannot be decoded as an image" in said


def test_too_many_are_an_error_on_all_ranks(folder: Path) -> None:
    """At the start, and in a step; so is the first without the flag."""
    flags = {**working_flags(folder), "--painter-dp": 1, "--data-path": [folder / "data" / "second.jsonl"]}
    index = {**flags, **SKIP, "--data-path": [folder / "data" / "first.jsonl"], "--bad-samples-per-thousand": 0.5}
    for given, message in (
        (index, "1 of 3 samples cannot be read, and no more than 0.5 per thousand are left out"),
        ({**flags, **SKIP, "--bad-samples-per-thousand": 0}, "1 of 2 samples cannot be read, and no more than 0 per thousand"),
        ({**flags, "--data-path": [folder / "data" / "first.jsonl"]}, "gone.png does not exist; restore the file"),
        (flags, "1.png cannot be decoded as an image"),
    ):
        done = launch(given, num_ranks=3)
        assert all(done.exit_codes) and message in done.output and "Traceback" not in done.output, done.output
