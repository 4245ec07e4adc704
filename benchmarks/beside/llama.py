"""Claim: on one process a Llama trains in Braid as fast as in transformers, and faster on texts that vary.

Both have the same weights (Braid loads the peer's folder), the same texts in the same batches, float32 and one thread, and take
turns, step by step: `pretrain_mllm.py`'s loop, with its balancing, its timeline and its checks, and the loop that transformers'
documentation shows (pad, forward with labels, backward, clip, step). Seconds are of a step without reading its data. Losses that
differ are an error. Shown are the median ratio of a step, that of all steps together, and a bound of what leaving out padding
can gain: the peer's products with weights alone on the tokens that are there, forward and backward, without attention, norms,
loss and optimizer, over its whole step.

Run `python benchmarks/beside/llama.py [--steps N] [--batch N] [--layers N] [--hidden N] [--texts NAME...] [--json]`.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.beside.turns import compare, print_rows
from megatron.runtime.execution.step_messages import StepInputs
from megatron.runtime.training.trainer import Trainer
from multimodal.values.assignment import MicrobatchPlace
from pretrain_mllm import main as train

LONGEST = 1024
TEXTS = {"512 tokens": (512, 512), "32 to 1,024 tokens": (32, LONGEST)}
"""Name of the row -> the shortest and the longest text, evenly spread."""
VOCAB_SIZE = 384
NUM_FIRST, NUM_ENDS = 3, 2
"""Steps that are not counted; tokens around a text."""
LEARNING_RATE, BETAS, EPS, CLIP = 1e-4, (0.9, 0.95), 1e-8, 1.0


def run_braid(folder: Path, num_steps: int, batch_size: int, turn: Any) -> None:
    """Train in Braid's own loop; before each step wait for the turn, and send batch, loss and seconds."""
    original = Trainer.train_step

    def train_step(trainer: Trainer, step: Any, *, number: int) -> Any:
        turn.recv()
        place = MicrobatchPlace(step.graph.backbone.name, 0, 0)
        (batch,) = StepInputs(step, device=torch.device("cpu")).of(place)
        start = time.perf_counter()
        report, events = original(trainer, step, number=number)
        seconds = time.perf_counter() - start
        turn.send((seconds, report.loss, batch.lengths, batch.token_ids, batch.target_rows, batch.targets))
        return report, events

    with patch.object(Trainer, "train_step", train_step):
        flags = ("--load-hf", folder / "hf", "--data-path", folder / "texts.jsonl", "--tokenizer-type", "ByteTokenizer")
        flags += ("--seq-length", LONGEST, "--global-batch-size", batch_size, "--micro-batch-size", batch_size)
        flags += ("--train-iters", num_steps)
        flags += ("--lr", LEARNING_RATE, "--lr-decay-style", "constant", "--weight-decay", 0.0, "--clip-grad", CLIP)
        flags += ("--adam-beta1", BETAS[0], "--adam-beta2", BETAS[1], "--adam-eps", EPS)
        flags += ("--eval-iters", 0, "--log-interval", 10**6, "--split", "100,0,0")
        train([*map(str, flags)])


class Peer:
    """transformers' model and torch's optimizer."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0)

    def step(
        self, lengths: tuple[int, ...], tokens: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[float, float]:
        """Return the seconds of one step on a packed batch of Braid's, padded, and its loss."""
        labels = torch.full((len(tokens) + 1,), -100)
        labels[rows + 1] = targets  # of the next token, as transformers counts
        ends = np.cumsum(lengths).tolist()
        shape = len(lengths), max(lengths)
        padded = {"input_ids": torch.zeros(shape, dtype=torch.long), "labels": torch.full(shape, -100)}
        padded["attention_mask"] = torch.zeros(shape, dtype=torch.long)
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            padded["input_ids"][row, :length] = tokens[end - length : end]
            padded["labels"][row, 1:length] = labels[end - length + 1 : end]
            padded["attention_mask"][row, :length] = 1
        if min(lengths) == max(lengths):
            del padded["attention_mask"]
        start = time.perf_counter()
        loss = self.model(**padded).loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        value = float(loss.detach())
        return time.perf_counter() - start, value

    def products_seconds(self, num_tokens: int) -> float:
        """Return the seconds of a step's products with weights, on so many tokens."""
        shapes = [module.weight.shape for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        cases = [
            (torch.ones(num_tokens, inner), torch.ones(outer, inner), torch.ones(num_tokens, outer)) for outer, inner in shapes
        ]
        start = time.perf_counter()
        for inputs, weight, gradient in cases:
            inputs @ weight.t(), gradient @ weight, gradient.t() @ inputs
        return time.perf_counter() - start


def measure(num_layers: int, hidden_size: int, *, lengths: tuple[int, int], batch_size: int, num_steps: int) -> dict[str, float]:
    """Return what `compare` finds, the ratio of all steps' seconds, and the bound of the median one."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        max_position_embeddings=LONGEST,
    )
    model = LlamaForCausalLM(config)
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "hf")
        with (folder / "texts.jsonl").open("w") as texts:
            for number, count in enumerate(random.integers(lengths[0], lengths[1] + 1, size=batch_size * num_steps)):
                letters = random.integers(ord("a"), ord("z") + 1, size=count - NUM_ENDS)
                segment = {"type": "text", "role": "document", "text": "".join(map(chr, letters))}
                texts.write(json.dumps({"id": str(number), "segments": [segment]}) + "\n")
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=run_braid, args=(folder, num_steps, batch_size, there))
        process.start()
        there.close()
        peer, rows = Peer(model), list[tuple[float, float, float]]()
        try:
            for _ in range(num_steps):
                here.send(None)
                seconds, loss, *batch = here.recv()
                own_seconds, own_loss = peer.step(*batch)
                if abs(loss - own_loss) > 1e-3 * abs(own_loss):
                    raise SystemExit(f"losses differ: Braid has {loss}, transformers {own_loss}")
                rows.append((seconds, own_seconds, peer.products_seconds(sum(batch[0]))))
            process.join()
        finally:
            process.kill()
    counted = rows[NUM_FIRST:]
    braid, transformers, products = zip(*counted, strict=True)
    return {
        **compare(braid, transformers),
        "of_all": sum(braid) / sum(transformers),
        "bound": compare(products, transformers)["of_peer"],
    }


def main() -> None:
    """Parse the command line, compare, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=23, metavar="N", help="steps of each, with three that do not count (23)")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="texts of a step (2)")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--hidden", type=int, default=512, metavar="N")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=[*TEXTS], help="rows (all)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {
        name: measure(
            arguments.layers, arguments.hidden, lengths=TEXTS[name], batch_size=arguments.batch, num_steps=arguments.steps
        )
        for name in arguments.texts
    }
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, row in found.items():
        seen = f"{1e3 * row['seconds']:.0f} ms a step, {row['of_all']:.2f} over all steps, at least {row['bound']:.2f}"
        shape = f"Llama, {arguments.layers} x {arguments.hidden}, {arguments.batch} texts of {name} ({seen})"
        print_rows({shape: row}, peer="transformers and torch's AdamW")


if __name__ == "__main__":
    main()
