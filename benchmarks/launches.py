"""Claim: what an action launches grows by some 45 operations a layer in forwards and 70 in backwards, and hardly otherwise.

One process trains a small model on the digits in the real loop, and every operation of torch that computes (views, shapes and
empty tensors do not count) is counted in the third step, by the action that runs and outside of all actions. On a GPU each is a
kernel's launch or a few, but for attention (a packed microbatch is one kernel there, and an operation for each sequence here) and
the update of the weights, which is outside of actions and here takes six for each parameter.

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

import yaml
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.training.trainer import Trainer
from multimodal.values.action import Action
from pretrain_mllm import main as train

OUTSIDE = "outside of actions"
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "rotary_base": 100.0}
NUM_STEPS = 3
"""The last one is counted: the first two make what later ones reuse."""
NUM_LAYERS = 2, 4
RUN = (
    *("--data-path", "digits", "--tokenizer-type", "ByteTokenizer", "--seq-length", "128", "--num-workers", "0"),
    *("--global-batch-size", "8", "--micro-batch-size", "2", "--train-iters", str(NUM_STEPS), "--lr", "1e-3"),
    *("--colocate-units", "--log-interval", "1000", "--eval-iters", "0"),
)
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
            self.counts.setdefault(self.where, Counter())[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

    def of_action(self, name: str, run: Callable[[RunningStep, Action], None]) -> Callable[[RunningStep, Action], None]:
        """Return a method of the executor that counts under the unit and the name of its action."""

        def counted(step: RunningStep, action: Action) -> None:
            outer, self.where = self.where, f"{name} of {action.unit}"
            self.num_actions[self.where] += self.is_counting
            try:
                run(step, action)
            finally:
                self.where = outer

        return counted


def computes(function: Any) -> bool:
    """Return whether an operation reads or writes values: views and new empty tensors do not."""
    name = function.overloadpacket.__name__
    if name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "_local_scalar", "is_", "record_stream")):
        return False
    aliases = [argument.alias_info for argument in function._schema.arguments if argument.alias_info is not None]
    return not any(not alias.is_write for alias in aliases)


Counted = tuple[dict[str, int], dict[str, int]]
"""What runs -> operations, and times that it ran."""


def count_launches(num_layers: int, flags: list[str], answer: Any) -> None:
    """Train an encoder and an LLM of `num_layers` each for NUM_STEPS steps of four microbatches; put what the last one counts."""
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


def counted_in_a_process(num_layers: int, flags: list[str]) -> Counted:
    """Return what `count_launches` puts: training ends its process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=count_launches, args=(num_layers, flags, there))
    process.start()
    there.close()
    try:
        found: Counted = here.recv()
    except EOFError:
        raise SystemExit("the run ended without its last step; its message is above") from None
    process.join()
    return found


def measure(flags: list[str]) -> dict[str, dict[str, float]]:
    """Return the number of operations: of each action, of a layer more in each, and per step outside of actions."""
    (small, _), (large, times) = (counted_in_a_process(num_layers, flags) for num_layers in NUM_LAYERS)
    rows = {}
    for where, total in large.items():
        num = times.get(where, 1)
        of_a_layer = (total - small.get(where, 0)) / num / (NUM_LAYERS[1] - NUM_LAYERS[0])
        rows[where] = {"times": num, "operations": total / num, "of a layer": of_a_layer}
    return rows


def main(argv: list[str]) -> None:
    """Count, and print a table."""
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
