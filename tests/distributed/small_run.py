"""A small run of `pretrain_mllm.py` that works, for tests that make one thing of it otherwise, or wrong."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from tests.distributed import launch
from tests.distributed.launch import Launched

NUM_RANKS = 2
MODEL: dict[str, Any] = {
    "units": {
        "vision": {
            "role": "encoder",
            "num_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "ffn_hidden_size": 32,
            "image": {"patch_size": 8, "merge_size": 2, "in_channels": 3, "min_pixels": 256, "max_pixels": 4096},
        },
        "llm": {"role": "backbone", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64},
    }
}


def working_flags(folder: Path) -> dict[str, object]:
    flags: dict[str, object] = {"--model": folder / "model.yaml", "--data-path": folder / "data" / "manifest.jsonl"}
    flags |= {"--vision-dp": 1, "--llm-dp": 1, "--global-batch-size": 2, "--train-iters": 2, "--lr": 1e-3}
    return {**flags, "--num-workers": 0, "--split": "100"}


def manifest_entries() -> list[dict[str, Any]]:
    """The samples of the run's manifest: an image each, and a text about it."""
    entries = []
    for index in range(4):
        image = {"type": "image", "path": f"{index}.png", "width": 32 + 16 * index, "height": 48}
        text = {"type": "text", "role": "assistant", "text": f"picture {index}"}
        entries.append({"id": str(index), "segments": [image, text]})
    return entries


def write_working_files(folder: Path) -> None:
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    data = folder / "data"
    data.mkdir()
    entries = manifest_entries()
    for entry in entries:
        image = entry["segments"][0]
        Image.effect_noise((image["width"], image["height"]), 50).convert("RGB").save(data / image["path"])
    (data / "manifest.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


LEFT_OUT = object()
"""In the place of the value of a flag that `train` is to leave out."""
SIZED_OTHERWISE = {"--vision-dp": LEFT_OUT, "--llm-dp": LEFT_OUT}


def train(
    folder: Path, flags: Mapping[str, object], *, num_ranks: int = NUM_RANKS, **how: Any
) -> tuple[list[dict[str, Any]], Launched]:
    """Launch the run in float64 with flags in the place of its own; returns the steps in its log, and what it said.

    Files that are not in `folder` yet are written. how: options of `launch`.
    """
    if not (folder / "model.yaml").exists():
        write_working_files(folder)
    given = {**working_flags(folder), "--dtype": "float64", "--log-json": folder / "log.jsonl", **flags}
    return launch.train({name: value for name, value in given.items() if value is not LEFT_OUT}, num_ranks=num_ranks, **how)


def losses(folder: Path, flags: Mapping[str, object], *, num_ranks: int = NUM_RANKS, **how: Any) -> list[float]:
    return [entry["loss"] for entry in train(folder, flags, num_ranks=num_ranks, **how)[0]]
