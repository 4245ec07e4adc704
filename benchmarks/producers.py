"""Claim: training waits for large images that it decodes itself, and no longer when a producer decodes them.

A small model trains on large photographs (noise of --megapixels, in JPEG): on one process that loads by itself, and with images
decoded by `tools/producer.py` in --processes beside it, which a loading process asks a step ahead. The variants take turns,
--rounds times. Printed is how long a step computed, and how long training waited for its inputs; medians over all rounds, the
first steps of each left out. Waiting ends where producers decode a step's images in less time than the step takes.

On one machine producers have only the cores that training leaves; on machines of their own they have all.

Run `python benchmarks/producers.py [--megapixels M] [--processes N] [--steps N] [--rounds N] [--json]`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
"""Steps at the start of each round that do not count."""
BATCH, NUM_IMAGES = 2, 16
SHAPE = {"num_attention_heads": 4, "hidden_size": 256, "ffn_hidden_size": 1024}
IMAGE = {"patch_size": 8, "merge_size": 2, "in_channels": 3, "min_pixels": 256, "max_pixels": 65536}
MODEL = {
    "units": {
        "vision": {"role": "encoder", "num_layers": 2, **SHAPE, "image": IMAGE},
        "llm": {"role": "backbone", "num_layers": 8, **SHAPE},
    }
}


def write_inputs(folder: Path, *, megapixels: float) -> None:
    """Write the model, the photographs, their manifest and a token."""
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    (folder / "token").write_text("a secret of this benchmark")
    side = round((megapixels * 1e6) ** 0.5)
    lines = []
    for index in range(NUM_IMAGES):
        Image.effect_noise((side, side), 60).convert("RGB").save(folder / f"{index}.jpg", quality=90)
        image = {"type": "image", "path": f"{index}.jpg", "width": side, "height": side}
        text = {"type": "text", "role": "assistant", "text": f"photograph {index}"}
        lines.append(json.dumps({"id": str(index), "segments": [image, text]}))
    (folder / "manifest.jsonl").write_text("\n".join(lines))


@contextmanager
def producer(folder: Path, *, num_processes: int) -> Iterator[str]:
    """Start a producer, which keeps nothing for a second reading, and yield its address."""
    flags = ("--listen", "127.0.0.1:0", "--num-workers", str(num_processes), "--cache-mib", "0", "--token", str(folder / "token"))
    process = subprocess.Popen([sys.executable, str(ROOT / "tools" / "producer.py"), *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[3].rstrip(",")
    finally:
        process.terminate()
        process.wait(30)


def train(folder: Path, how: Sequence[str], *, num_steps: int) -> tuple[list[float], list[float]]:
    """Train, and return the seconds of computing and of waiting of the steps that count; raises RuntimeError."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    files = ("--model", str(folder / "model.yaml"), "--data-path", str(folder / "manifest.jsonl"), "--log-json", str(log))
    flags = ("--split", "100", "--global-batch-size", str(BATCH), "--train-iters", str(num_steps), "--lr", "1e-3")
    command = [sys.executable, str(ROOT / "pretrain_mllm.py"), *files, *flags, "--no-progress-bar", *how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(how)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    entries = [json.loads(line) for line in log.read_text().splitlines()][WARM_UP:]
    return [entry["step_seconds"] for entry in entries], [entry["assign_wait_ms"] / 1e3 for entry in entries]


def main() -> None:
    """Run the variants in turns, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--megapixels", type=float, default=4.0, metavar="M", help="of a photograph (4)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that decode in the producer (1)")
    parser.add_argument("--steps", type=int, default=15, metavar="N", help="steps of a round (15)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds (2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args()
    alone, helped = "training decodes", f"a producer decodes in {given.processes}"
    taken: dict[str, list[tuple[float, float]]] = {alone: [], helped: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, megapixels=given.megapixels)
        with producer(folder, num_processes=given.processes) as address:
            by_producer = ("--producers", address, "--producer-token", str(folder / "token"))
            ways = {alone: ("--num-workers", "0"), helped: ("--num-workers", "1", *by_producer)}
            for _ in range(given.rounds):
                for variant, how in ways.items():
                    taken[variant] += zip(*train(folder, how, num_steps=given.steps), strict=True)
    seconds = {
        variant: {"computing": median(each[0] for each in steps), "waiting": median(each[1] for each in steps)}
        for variant, steps in taken.items()
    }
    if given.json:
        print(json.dumps({"megapixels": given.megapixels, "processes": given.processes, "seconds": seconds}))
        return
    table = Table("images", "step", "waited for data", box=None)
    for variant, each in seconds.items():
        table.add_row(variant, *(f"{1e3 * each[what]:.0f} ms" for what in ("computing", "waiting")))
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    main()
