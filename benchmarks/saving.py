"""Claim: with --async-save, training stands still for a copy in host memory, not for the disk.

Two processes hold an LLM of 71 million parameters in bfloat16 and halves of its optimizer state (1 GB in all, as on the disk),
and save it as a run does, at once and in the background, taking turns. Shown are medians of the seconds until training may go on,
and until the checkpoint has its name. On GPUs the copy is one from the device into pinned memory.

Run `python benchmarks/saving.py [--json] [--iterations N] [--folder DIR]`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron.runtime.checkpoint.checkpoint import BackgroundSave, save_checkpoint
from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from megatron.runtime.emulation.emulated_run import TIMEOUT, run_on_ranks
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.session import Session, SessionOptions
from megatron.runtime.state.held_tensors import make_room, model_tensors
from multimodal.model.transformer_config import BuildOptions
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan

SHAPE = {"num_layers": 4, "num_attention_heads": 8, "hidden_size": 1024, "ffn_hidden_size": 4096}
KINDS = {"at once": False, "in the background": True}
NUM_RANKS, VOCAB_SIZE = 2, 2048


def build_session() -> Session:
    """Return the LLM on two replicas, with optimizer state as after a step."""
    graph = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **SHAPE}}})
    replicas = tuple(Replica((Stage((rank,), ((0, len(graph.backbone.layers)),)),)) for rank in range(NUM_RANKS))
    dtype = torch.bfloat16
    optimizer = build_optimizer_config(
        lr=1e-3, min_lr=0.0, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0, dtype=dtype
    )
    options = SessionOptions(graph, BuildOptions(dtype), VOCAB_SIZE, timeout=TIMEOUT, optimizer=optimizer)
    session = Session(options, plan=Plan({"llm": UnitPlan(replicas)}))
    names = [tensor.key.removeprefix("model.") for tensor in model_tensors(session.state)]
    make_room(session.state, saved={f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in names})
    return session


def measure(folder: Path, num_iterations: int, *, rank: int) -> dict[str, dict[str, float]]:
    """Return, of each kind, medians of the seconds that training stands still and that a save takes, and bytes on the disk."""
    session, background = build_session(), BackgroundSave(TIMEOUT)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for step in range(num_iterations + 1):
        for name, is_background in KINDS.items():
            dist.barrier()
            start = time.perf_counter()
            save_checkpoint(
                folder,
                step=step,
                session=session,
                schedulers_state={},
                run_state={},
                keep_last=1,
                background=background if is_background else None,
            )
            still_seconds = time.perf_counter() - start
            background.finish()
            if step:  # the first one makes room in memory
                found[name].append((still_seconds, time.perf_counter() - start))
    newest = find_newest_checkpoint(folder)
    assert newest is not None
    size_bytes = sum(file.stat().st_size for file in newest.iterdir())
    return {
        name: {
            "stands_still_seconds": statistics.median(still for still, _ in seconds),
            "saved_seconds": statistics.median(saved for _, saved in seconds),
            "megabytes": size_bytes / 1e6,
        }
        for name, seconds in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=5, help="saves of each kind")
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = run_on_ranks(measure, Path(folder), given.iterations, num_ranks=NUM_RANKS)
    if given.json:
        print(json.dumps({**rows, "load": os.getloadavg()[0]}))
        return
    table = Table("save", "training stands still (s)", "saved after (s)", "MB", title=f"load {os.getloadavg()[0]:.1f}")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
