"""Claim: tensor parallel collectives that are cut into parts are waited for as the cost model says (DistTrain, section 6).

Two processes run a column and a row parallel layer with sequence parallelism as --tp-comm-overlap runs them: the same code, real
collectives of gloo, real products of small matrices. Since two cores and one memory are neither accelerators nor a network, every
product then lasts as long as a given speed would make it, and every collective until a link of a given speed would have brought
it, one after another; what only waits costs no core. What a forward waits for is set against `LayerCollectives.exposed_tensor`.
With one part it is the forward of megatron-core.

python benchmarks/tensor_parallel_overlap.py [--json]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.runtime.emulation.emulated_run import run_on_ranks
from multimodal.attention.context_parallel import all_gather_single, reduce_scatter_single
from multimodal.cost.layers.collectives import LayerCollectives
from multimodal.cost.seconds.layer_curves import Quadratic
from multimodal.model import collectives, deferrable_linear
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear

NUM_RANKS, NUM_ROWS, SIZE, NUM_REPETITIONS = 2, 960, 16, 7
PRODUCT_SECONDS = 0.1
"""Of one whole product; a layer has one in its forward and two in its backward."""
COLLECTIVE_SECONDS = (0.05, 0.1, 0.15)
NUM_PARTS = (1, 2, 4, 8)


class Held(NamedTuple):
    """A collective under way."""

    work: dist.Work
    ready_at: float

    def wait(self) -> None:
        """Wait for it, and until the link is done with it."""
        self.work.wait()
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))


class Device:
    """Makes products and collectives last as long as their share of the rows says."""

    def __init__(self, collective_seconds: float) -> None:
        self._collective_seconds = collective_seconds
        self._link_is_free_at = 0.0

    def hold(self, collective: Callable[..., Any], share_of: Callable[..., Tensor]) -> Callable[..., Held]:
        """Return the collective, held back; share_of: what of its arguments is one rank's share of the rows."""

        def start(*args: Any, **options: Any) -> Held:
            begin = max(self._link_is_free_at, time.perf_counter())
            self._link_is_free_at = begin + self._collective_seconds * len(share_of(*args)) / (NUM_ROWS // NUM_RANKS)
            return Held(collective(*args, **options), self._link_is_free_at)

        return start

    def lengthen(self, product: Callable[..., Any], rows_of: Callable[..., int]) -> Callable[..., Any]:
        """Return the product, lengthened; rows_of: how many rows it has."""

        def multiply(*args: Any, **options: Any) -> Any:
            end = time.perf_counter() + PRODUCT_SECONDS * rows_of(*args) / NUM_ROWS
            result = product(*args, **options)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return multiply


def build_layers(num_parts: int) -> list[Module]:
    """Return a column and a row parallel layer."""
    config = ModelParallelConfig(
        tensor_model_parallel_size=NUM_RANKS,
        sequence_parallel=True,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    options: dict[str, Any] = {
        "config": config,
        "init_method": None,
        "bias": False,
        "tp_group": dist.group.WORLD,
        "num_overlapped_parts": num_parts,
    }
    column = DeferrableColumnParallelLinear(SIZE, SIZE, gather_output=False, **options)
    row = DeferrableRowParallelLinear(SIZE, SIZE, input_is_parallel=True, skip_bias_add=False, **options)
    for layer in (column, row):
        torch.nn.init.normal_(layer.weight.data)
    return [column, row]


def median_seconds(layers: list[Module]) -> tuple[float, float]:
    """Return the median seconds of a forward and a backward."""
    times = []
    for _ in range(NUM_REPETITIONS):
        output = torch.randn(NUM_ROWS // NUM_RANKS, 1, SIZE, requires_grad=True)
        dist.barrier()
        start = time.perf_counter()
        for layer in layers:
            output = layer(output)[0]
        middle = time.perf_counter()
        output.backward(torch.ones_like(output))
        times.append((middle - start, time.perf_counter() - middle))
    forwards, backwards = zip(*times, strict=True)
    return statistics.median(forwards), statistics.median(backwards)


def measure(*, rank: int) -> list[dict[str, float]]:
    """One row for each collective's seconds and number of parts; collective."""
    gather, gather_whole, scatter = dist.all_gather, all_gather_single, reduce_scatter_single
    multiply, weight_gradients = deferrable_linear._multiply, deferrable_linear.weight_gradients
    rows = []
    for seconds in COLLECTIVE_SECONDS:
        device = Device(seconds)
        dist.all_gather = device.hold(gather, lambda blocks, share: share)
        scattering = device.hold(scatter, lambda share, product: share)
        multiplying = device.lengthen(multiply, lambda blocks, factor: len(blocks) * blocks.shape[1])
        weighing = device.lengthen(weight_gradients, lambda context, rows, *others: len(rows))
        gathering = device.hold(gather_whole, lambda rows, share: share)
        vars(collectives).update(all_gather_single=gathering, reduce_scatter_single=scattering)
        vars(deferrable_linear).update(reduce_scatter_single=scattering, _multiply=multiplying, weight_gradients=weighing)
        predicted = LayerCollectives(tensor=Quadratic(0.0, 2 * seconds / NUM_ROWS))
        for num_parts in NUM_PARTS:
            products = 2 * PRODUCT_SECONDS
            waiting = predicted.exposed_tensor(NUM_ROWS, 0, products_seconds=products, num_parts=num_parts)
            forward, backward = median_seconds(build_layers(num_parts))
            rows.append(
                {
                    "collective_seconds": seconds,
                    "num_parts": num_parts,
                    "forward_seconds": forward,
                    "predicted_forward_seconds": products + waiting,
                    "backward_seconds": backward,
                }
            )
    return rows


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    flags = parser.parse_args()
    rows = run_on_ranks(measure, num_ranks=NUM_RANKS)
    if flags.json:
        print(json.dumps({"product_seconds": PRODUCT_SECONDS, "rows": rows}))
        return
    names = ("collective", "forward", "predicted_forward", "backward")
    table = Table("parts", *(f"{name.replace('_', ' ')} (ms)" for name in names), box=None)
    for row in rows:
        table.add_row(str(row["num_parts"]), *(f"{1e3 * row[f'{name}_seconds']:.0f}" for name in names))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
