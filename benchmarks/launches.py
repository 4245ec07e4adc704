"""Claim: what an action launches grows by some 40 operations a layer in forwards and 70 in backwards, and hardly otherwise.

One process trains a small model on the digits in the real loop, and every operation of torch that computes (views, shapes and
empty tensors do not count) is counted in the third step, by the action that runs and outside of all actions. On a GPU each is a
kernel's launch or a few, but for attention (a packed microbatch is one kernel there, and an operation for each sequence here) and
the update of the weights, which is outside of actions and here takes six for each parameter. The loss of 8k tokens and its
gradient, over 152k token ids that two ranks share, is counted without values: by torch's operations, and as it runs on CUDA.

Run `python benchmarks/launches.py [--json] [FLAGS of pretrain_mllm.py]`, such as `--recompute-granularity full`.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import yaml
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.training.trainer import Trainer
from multimodal.model.layers import backbone_ends
from multimodal.values.schedule import Entry
from pretrain_mllm import main as train

OUTSIDE = "outside of actions"
LOSS_SHAPE = 8192, 152064 // 2
"""Target tokens, and a rank's columns: Qwen2.5's vocabulary."""
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "rotary_base": 100.0}
NUM_STEPS = 3
"""The last one is counted: the first two make what later ones reuse."""
NUM_LAYERS = 2, 4
RUN = (
    *("--data-path", "digits", "--tokenizer-type", "ByteTokenizer", "--seq-length", "128", "--num-workers", "0"),
    *("--global-batch-size", "8", "--micro-batch-size", "2", "--train-iters", str(NUM_STEPS), "--lr", "1e-3"),
    *("--colocate-units", "--log-interval", "1000", "--eval-iters", "0"),
)
LOSSES = {"loss of 8k tokens by torch": False, "loss of 8k tokens on CUDA": True}
ACTIONS = ("forward", "backward", "input_gradient", "weight_gradient", "gather_parameters", "reduce_gradients")


class Launches(TorchDispatchMode):
    """Counts operations under the action that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.is_counting = OUTSIDE, False
        self.counts: dict[str, Counter[str]] = {}
        self.num_actions: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run."""
        if computes(function):
            self.count(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        """Count one operation."""
        self.counts.setdefault(self.where, Counter())[name] += 1

    def of_action(self, name: str, run: Callable[[RunningStep, Entry], None]) -> Callable[[RunningStep, Entry], None]:
        """Return a method of the executor that counts under the unit and the name of its action."""

        def counted(step: RunningStep, entry: Entry) -> None:
            outer, self.where = self.where, f"{name} of {entry.action.unit}"
            self.num_actions[self.where] += self.is_counting
            try:
                run(step, entry)
            finally:
                self.where = outer

        return counted


def computes(function: Any) -> bool:
    """Return True if an operation reads or writes values: views and new empty tensors do not."""
    name = function.overloadpacket.__name__
    if name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "_local_scalar", "is_", "record_stream")):
        return False
    aliases = [argument.alias_info for argument in function._schema.arguments if argument.alias_info is not None]
    return not any(not alias.is_write for alias in aliases)


def count_launches(num_layers: int, flags: list[str], answer: Any) -> None:
    """Train an encoder and an LLM of `num_layers` each for NUM_STEPS steps of four microbatches.

    Puts what the last one counts: what runs -> operations, and times that it ran.
    """
    os.dup2(2, 1)  # what the run prints is not the answer
    launches = Launches()
    original = Trainer.train_step

    def train_step(trainer: Trainer, step: Any, *, number: int) -> Any:
        if number < NUM_STEPS:
            return original(trainer, step, number=number)
        launches.is_counting = True
        with launches:
            report = original(trainer, step, number=number)
        answer.send(({where: found.total() for where, found in launches.counts.items()}, dict(launches.num_actions)))
        return report

    image = {"patch_size": 4, "merge_size": 2, "in_channels": 1, "min_pixels": 256, "max_pixels": 2560}
    units: dict[str, dict[str, Any]] = {"vision": {"role": "encoder", "image": image}, "llm": {"role": "backbone"}}
    units = {name: SHAPE | {"num_layers": num_layers} | unit for name, unit in units.items()}
    model = {"units": units, "edges": [["vision", "llm"]]}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        path = Path(folder) / "model.yaml"
        path.write_text(yaml.safe_dump(model, sort_keys=False))
        patches.enter_context(patch.object(Trainer, "train_step", train_step))
        for name in ACTIONS:
            counted = launches.of_action(name, getattr(RunningStep, name))
            patches.enter_context(patch.object(RunningStep, name, counted))
        train(["--model", str(path), *RUN, *flags])


class CountedKernel:
    """Stands for a kernel of Triton, which it counts and does not run."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: self.launches.count("kernel of Triton")


def count_loss(by_kernels: bool, answer: Any) -> None:
    """Put the number of operations of the loss, on a device that computes nothing."""
    from multimodal.model.layers import cross_entropy_kernels

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    launches = Launches()
    logits = torch.empty(LOSS_SHAPE, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(len(logits), dtype=torch.int64, device="meta")
    with ExitStack() as patches:
        patches.enter_context(patch.object(backbone_ends, "takes_kernels", lambda _: by_kernels))
        for name in ("row_sums_kernel", "gradient_kernel"):
            patches.enter_context(patch.object(cross_entropy_kernels, name, CountedKernel(launches)))
        with launches:
            losses = backbone_ends.vocab_parallel_cross_entropy(logits, targets, group=dist.group.WORLD)
            torch.autograd.grad(losses, logits, torch.empty_like(losses))
    answer.send(launches.counts[OUTSIDE].total())


def counted_in_a_process(count: Callable[..., None], *args: Any) -> Any:
    """Return what a function puts into a pipe: training ends its process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=count, args=(*args, there))
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        raise SystemExit("the run ended without its last step; its message is above") from None
    process.join()
    return found


def measure(flags: list[str]) -> dict[str, dict[str, float]]:
    """Return the number of operations: of each action, of a layer more in each, and per step outside of actions."""
    (small, _), (large, times) = (counted_in_a_process(count_launches, num_layers, flags) for num_layers in NUM_LAYERS)
    rows = {}
    for where, total in large.items():
        num = times.get(where, 1)
        of_a_layer = (total - small.get(where, 0)) / num / (NUM_LAYERS[1] - NUM_LAYERS[0])
        rows[where] = {"times": num, "operations": total / num, "of a layer": of_a_layer}
    for name, by_kernels in LOSSES.items():
        rows[name] = {"times": 1, "operations": counted_in_a_process(count_loss, by_kernels), "of a layer": 0}
    return rows


def main(argv: list[str]) -> None:
    """Count, and print a table."""
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        return
    as_json = "--json" in argv
    rows = measure([flag for flag in argv if flag != "--json"])
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("what runs", "times a step", "operations each", "a layer more")
    for where, row in sorted(rows.items()):
        table.add_row(where, f"{row['times']:.0f}", f"{row['operations']:.0f}", f"{row['of a layer']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
