"""Claim: a loop of Megatron's takes less time with Braid's plan and balance where images vary, at the same losses.

Four data parallel ranks train megatron-core's MIMO (`examples/balance/megatron_mimo.py`) in a loop written for Megatron: as it
is, on Megatron's own forward-backward function, every rank encoding the images that it drew; with `patches.apply(model, plan,
balance)`, on Braid's schedule, whole microbatches dealt anew; and with a plan alone and images balanced over the ranks by the
public exchange. Steps take turns in the same processes. An encoder's computation is timed waits beside the real one, so that
ranks wait for each other and not for cores; planning and exchanges are in the time of a step. Where all images are alike, they
are all that the balance adds.

Run `python benchmarks/drop_in.py [--json] [--iterations N]`.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.beside.turns import Waited, show, take_turns
from examples.balance import megatron_mimo as mimo
from examples.balance.torch_ddp import MERGED, PIXELS, Encoder
from megatron.runtime import patches
from megatron.runtime.emulation.emulated_run import run_on_ranks
from megatron.runtime.platform import CpuTorch
from multimodal.balance.exchange.module_exchange import DrawnItems, ModuleExchange, PendingRows, plan_exchange
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated
from multimodal.values.model_graph import ModelGraph

NUM_RANKS, NUM_MICROBATCHES, SECONDS_PER_PATCH = 4, 3, 2e-3
FEATURES = {"uniform": (18, 18), "varied": (2, 64)}
"""Features per image, drawn evenly in their logarithm: as many in the mean."""
UNITS = {
    "vision": {"role": "encoder", "num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256},
    "llm": {"role": "backbone", "num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256},
}
UNITS["vision"]["image"] = {"patch_size": 4, "merge_size": 2, "in_channels": 3, "min_pixels": 64, "max_pixels": 65536}


class TimedEncoder(Encoder):
    """The example's encoder, slower."""

    def forward(  # type: ignore[override]
        self, patches: Tensor, lengths: list[int], exchange: ModuleExchange | None
    ) -> Tensor:
        """Encode what falls to this rank; returns the features of what it drew."""
        features = Waited.apply(super().forward(patches, lengths), SECONDS_PER_PATCH * len(patches))
        return features if exchange is None else exchange.send_outputs(features, "features")


class Microbatch(NamedTuple):
    """Inputs of one forward."""

    tokens: Tensor
    patches: Tensor | PendingRows
    lengths: list[int]
    exchange: ModuleExchange | None


class LoopTraining:
    """One rank of a loop written for Megatron."""

    def __init__(self, images: str, *, is_balanced: bool, forward_backward: Any) -> None:
        torch.manual_seed(0)
        self.features, self.is_balanced, self.forward_backward = FEATURES[images], is_balanced, forward_backward
        self.model = mimo.build_model(torch.float64, TimedEncoder)
        self.model.module.model_type = ModelType.encoder_or_decoder  # as Megatron's `get_model` does
        get_model_config(self.model).finalize_model_grads_func = finalize_model_grads
        self.group = dist.new_group()

    def prepare(self, number: int) -> int:
        """Return the step's number, by which its images are drawn."""
        return number

    def train_step(self, number: int) -> float:
        """Train on a step; returns this rank's loss."""
        self.model.zero_grad_buffer()
        sizes = {"seq_length": mimo.SEQUENCE_LENGTH, "micro_batch_size": mimo.BATCH_SIZE, "num_microbatches": NUM_MICROBATCHES}
        found = self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=self._microbatches(number),
            model=self.model,
            forward_only=False,
            **sizes,
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.1 * parameter.main_grad
        return sum(float(report["loss"]) for report in found) / NUM_MICROBATCHES / NUM_RANKS

    def _microbatches(self, number: int) -> Iterator[Microbatch]:
        ahead = self._start(number, 0)
        for index in range(NUM_MICROBATCHES):
            current, ahead = ahead, self._start(number, index + 1) if index + 1 < NUM_MICROBATCHES else None
            yield current

    def _start(self, number: int, index: int) -> Microbatch:
        """Draw a microbatch; balanced, plan its exchange and send its images."""
        random = torch.Generator().manual_seed(10_000 * number + 100 * index + dist.get_rank())
        least, most = self.features
        counts = [int(least * (most / least) ** float(torch.rand((), generator=random))) for _ in range(mimo.BATCH_SIZE)]
        patches = torch.rand(MERGED * sum(counts), PIXELS, generator=random, dtype=torch.float64)
        tokens = torch.randint(1, mimo.VOCABULARY, (mimo.BATCH_SIZE, mimo.SEQUENCE_LENGTH), generator=random)
        for row, count in zip(tokens, counts, strict=True):
            row[:count] = mimo.IMAGE
        lengths = [MERGED * count for count in counts]
        if not self.is_balanced:
            return Microbatch(tokens, patches, lengths, None)
        images = DrawnItems(lengths=lengths, rows={"features": counts})
        exchange = plan_exchange({"vision": images}, group=self.group)["vision"]
        return Microbatch(tokens, exchange.send_inputs(patches), exchange.rows_here(), exchange)


def forward_step(batches: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
    """Run the loop's forward step."""
    batch = next(batches)
    positions = torch.arange(mimo.SEQUENCE_LENGTH).expand_as(batch.tokens)
    is_hidden = torch.ones(1, 1, mimo.SEQUENCE_LENGTH, mimo.SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
    patches = batch.patches if isinstance(batch.patches, Tensor) else batch.patches.wait()
    images = {"vision": {mimo.ENCODERS: {"patches": patches, "lengths": batch.lengths, "exchange": batch.exchange}}}
    logits, _ = model(batch.tokens, positions, is_hidden, modality_inputs=images)
    return logits, partial(loss_of, batch.tokens)


def loss_of(tokens: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of next tokens, and the report."""
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return loss, {"loss": loss.detach()}


def measure(num_iterations: int, *, rank: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return images -> loop -> seconds of a step, of Megatron's, and the largest difference of a loss."""
    warnings.simplefilter("ignore")  # MIMO's, of being experimental
    mimo.prepare()
    graph = ModelGraph.from_dict({"units": UNITS})
    sizes = {name: UnitSizes(data_parallel_size=NUM_RANKS) for name in UNITS}
    found = {}
    with patch.object(schedules, "torch", CpuTorch(torch)):
        for images in FEATURES:
            alone = LoopTraining(images, is_balanced=False, forward_backward=schedules.forward_backward_no_pipelining)
            patches.apply(schedule="1f1b", model=graph, plan=plan_colocated(graph, sizes=sizes, world_size=NUM_RANKS))
            exchanged = LoopTraining(images, is_balanced=True, forward_backward=schedules.get_forward_backward_func())
            patches.apply(schedule="1f1b", balance="whole-sample", length=lambda microbatch: len(microbatch.patches))
            dealt = LoopTraining(images, is_balanced=False, forward_backward=schedules.get_forward_backward_func())
            runs = {"as it is": alone, "microbatches balanced": dealt, "images balanced": exchanged}
            found[images] = take_turns(runs, int, num_iterations)
            patches.undo()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--iterations", type=int, default=10, help="steps of each")
    given = parser.parse_args()
    found = run_on_ranks(measure, given.iterations, num_ranks=NUM_RANKS)
    show(found, of="images", peer="the loop as it is", as_json=given.json)


if __name__ == "__main__":
    main()
