"""Claim: a folder of Hugging Face's form is written in about the time that safetensors takes, and read in that of a copy.

A Llama in float32 (570 MB) on one process. Written by --save-hf beside `safetensors.torch.save_file` of the same tensors; read
by --load-hf beside transformers' `from_pretrained`, and beside `load_state_dict` of what safetensors' `load_file` reads. Turns
alternate; shown are medians of processor seconds and of their ratio turn by turn. `from_pretrained` maps the files and copies
nothing, so all sum up the weights once. Braid copies them into the buffers that its optimizers share, as `load_state_dict` does
into a model that is there, and checks that they are finite. --save-hf also waits until the bytes are on the disk, which takes
seconds but none of the processor.

Run `python benchmarks/beside/hf_files.py [--turns N] [--layers N] [--json]`.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.beside.turns import compare, print_rows
from megatron.runtime.emulation.emulated_run import TIMEOUT, run_on_ranks
from megatron.runtime.hugging_face.load_weights import load_hugging_face
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from megatron.runtime.session import Session, SessionOptions
from multimodal.hugging_face.registry import read_graph
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated

VOCAB_SIZE, HIDDEN_SIZE = 32_000, 1024
PEERS = {
    "write": "`safetensors.torch.save_file`",
    "read": "transformers' `from_pretrained`, which maps the file",
    "read into a model": "`load_state_dict` of safetensors' `load_file`, which copies, as Braid does",
}


def measure(folder: Path, num_turns: int, *, rank: int) -> dict[str, dict[str, float]]:
    """Return, for writing and reading, what `compare` finds of processor seconds."""
    graph = read_graph(folder / "given")
    options = SessionOptions(graph, BuildOptions(torch.float32), VOCAB_SIZE, timeout=TIMEOUT)
    plan = plan_colocated(graph, sizes={name: UnitSizes() for name in graph.unit_names}, world_size=1)
    session = Session(options, plan=plan)
    tensors = dict(LlamaForCausalLM.from_pretrained(folder / "given", trust_remote_code=False).state_dict())
    (stage,) = session.stages.values()

    def read_here() -> None:
        load_hugging_face(folder / "given", session=session)
        sum(float(parameter.sum()) for parameter in stage.parameters())

    def read_there() -> None:
        model = LlamaForCausalLM.from_pretrained(folder / "given", trust_remote_code=False)
        sum(float(parameter.sum()) for parameter in model.parameters())

    there = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "given", trust_remote_code=False))

    def copy_there() -> None:
        there.load_state_dict(load_file(folder / "given" / "model.safetensors"))
        sum(float(parameter.sum()) for parameter in there.parameters())

    works = {
        "write": (
            lambda: save_hugging_face(folder / "here", session=session),
            lambda: save_file(tensors, folder / "there.safetensors"),
        ),
        "read": (read_here, read_there),
        "read into a model": (read_here, copy_there),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    with torch.no_grad():
        for turn in range(num_turns + 1):
            for name, sides in works.items():
                seconds = _seconds(sides[0]), _seconds(sides[1])
                if turn:  # the first ones open and allocate
                    found[name].append(seconds)
            shutil.rmtree(folder / "here")
            (folder / "there.safetensors").unlink()
    return {name: compare(*zip(*rows, strict=True)) for name, rows in found.items()}


def _seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each (7)")
    parser.add_argument("--layers", type=int, default=6, metavar="N")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=2816,
            num_hidden_layers=given.layers,
            num_attention_heads=16,
        )
        LlamaForCausalLM(config).save_pretrained(Path(name) / "given")
        size = (Path(name) / "given" / "model.safetensors").stat().st_size / 1e6
        found = run_on_ranks(measure, Path(name), given.turns, num_ranks=1)
    if given.json:
        print(json.dumps({"load": os.getloadavg()[0], "megabytes": size, **found}))
        return
    for work, row in found.items():
        print_rows({f"{work} {size:.0f} MB (Braid: {row['seconds']:.3f} processor seconds)": row}, peer=PEERS[work])


if __name__ == "__main__":
    main()
