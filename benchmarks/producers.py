"""Claim: training waits for large images that it decodes itself, but not when a producer does; and producers tokenise faster.

A small model trains on large photographs (noise of --megapixels, in JPEG): on one process that loads by itself, and with images
decoded by `tools/producer.py` in --processes beside it, which a loading process asks a step ahead. The variants take turns,
--rounds times. Printed is how long a step computed, and how long training waited for its inputs; medians over all rounds, the
first steps of each left out. Waiting ends where producers decode a step's images in less time than the step takes.

Then --texts samples of --words words each are indexed, with a byte-pair tokenizer trained on them: by the rank that builds the
index, and by the producer that it hands them to. Printed is the median of the seconds until the data is open.

On one machine producers have only the cores that training leaves; on machines of their own they have all.

Run `python benchmarks/producers.py [--only images|texts] [--megapixels M] [--processes N] [--steps N] [--rounds N] [--texts N]
[--words N] [--json]`.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table

from megatron.runtime.feed.data_sets import build_data_sets
from megatron.runtime.flags.arguments import choose_trained, parse_arguments
from multimodal.cost.layers.registry import read_model
from multimodal.data.index.index_cache import FOLDER_NAME

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
    """Start a producer, which caches nothing for a second reading, and yield its address."""
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


def write_texts(folder: Path, *, num_texts: int, num_words: int) -> None:
    """Write samples of text alone, and a tokenizer that was trained on some of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(20_000)]
    texts = [" ".join(draw.choices(words, k=num_words)) for _ in range(num_texts)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts[:200], trainers.BpeTrainer(vocab_size=4000, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    samples = (
        {"id": str(index), "segments": [{"type": "text", "role": "assistant", "text": text}]} for index, text in enumerate(texts)
    )
    (folder / "texts").mkdir()
    (folder / "texts" / "manifest.jsonl").write_text("\n".join(map(json.dumps, samples)))


def index_seconds(folder: Path, how: Sequence[str]) -> float:
    """Return the seconds until data without an index is open."""
    shutil.rmtree(folder / "texts" / FOLDER_NAME, ignore_errors=True)
    files = ("--model", str(folder / "model.yaml"), "--data-path", str(folder / "texts" / "manifest.jsonl"))
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer.json"))
    flags = ("--split", "100", "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--seq-length", "100000")
    config = parse_arguments([*files, *tokenizer, *flags, *how], environ={})
    start = time.perf_counter()
    build_data_sets(config, choose_trained(read_model(config.model.model), config.model))
    return time.perf_counter() - start


def main() -> None:
    """Run the variants in turns, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--megapixels", type=float, default=4.0, metavar="M", help="of a photograph (4)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that decode in the producer (1)")
    parser.add_argument("--steps", type=int, default=15, metavar="N", help="steps of a round (15)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds (2)")
    parser.add_argument("--texts", type=int, default=2000, metavar="N", help="samples of text that are tokenised (2000)")
    parser.add_argument("--words", type=int, default=1000, metavar="N", help="of each (1000)")
    parser.add_argument("--only", choices=("images", "texts"), help="one of both")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    given = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, megapixels=given.megapixels)
        with producer(folder, num_processes=given.processes) as address:
            by_producer = ("--producers", address, "--producer-token", str(folder / "token"))
            if given.only != "texts":
                found["images"] = measure_images(folder, by_producer, given)
            if given.only != "images":
                found["texts"] = measure_texts(folder, by_producer, given)
    if given.json:
        print(json.dumps({"processes": given.processes, "seconds": found}))
        return
    for what, variants in found.items():
        columns = next(iter(variants.values()))
        table = Table(what, *columns, box=None)
        for variant, seconds in variants.items():
            table.add_row(variant, *(f"{1e3 * each:.0f} ms" for each in seconds.values()))
        Console(width=120, highlight=False).print(table)


def measure_images(folder: Path, by_producer: Sequence[str], given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return decoder of the images -> seconds of computing and of waiting in a step."""
    alone, helped = "training decodes", f"a producer decodes in {given.processes}"
    taken: dict[str, list[tuple[float, float]]] = {alone: [], helped: []}
    ways = {alone: ("--num-workers", "0"), helped: ("--num-workers", "1", *by_producer)}
    for _ in range(given.rounds):
        for variant, how in ways.items():
            taken[variant] += zip(*train(folder, how, num_steps=given.steps), strict=True)
    return {
        variant: {"step": median(each[0] for each in steps), "waited for data": median(each[1] for each in steps)}
        for variant, steps in taken.items()
    }


def measure_texts(folder: Path, by_producer: Sequence[str], given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return tokenising process -> seconds of indexing."""
    write_texts(folder, num_texts=given.texts, num_words=given.words)
    ways = {"the rank tokenises": (), f"a producer tokenises in {given.processes}": by_producer}
    taken: dict[str, list[float]] = {variant: [] for variant in ways}
    for _ in range(given.rounds):
        for variant, how in ways.items():
            taken[variant].append(index_seconds(folder, how))
    return {variant: {"index": median(seconds)} for variant, seconds in taken.items()}


if __name__ == "__main__":
    main()
