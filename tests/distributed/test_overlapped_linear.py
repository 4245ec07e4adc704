"""Linear layers whose collectives run in parts beside their products: outputs and gradients of the same layers without."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor

from multimodal.model import deferrable_linear
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.model.weight_gradient_queue import WeightGradientQueue, defer_weight_gradients
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import build_plan

CLASSES = {"column": DeferrableColumnParallelLinear, "row": DeferrableRowParallelLinear}


class LinearCase(NamedTuple):
    """A linear layer and what it is given."""

    kind: str
    num_parts: int
    is_sequence_parallel: bool = True
    num_rows: int = 7
    """That each rank holds under sequence parallelism."""
    batch: int = 1
    defers: bool = False
    skip_bias_add: bool = False
    is_trained: bool = True
    input_is_trained: bool = True
    dtype: torch.dtype = torch.float64


def build(case: LinearCase, *, overlaps: bool) -> Any:
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=case.is_sequence_parallel,
        params_dtype=case.dtype,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    options = {"gather_output": False} if case.kind == "column" else {"input_is_parallel": True}
    layer = CLASSES[case.kind](
        12,
        20,
        config=config,
        init_method=lambda weight: weight,
        bias=True,
        skip_bias_add=case.skip_bias_add,
        tp_group=dist.group.WORLD,
        num_overlapped_parts=case.num_parts if overlaps else 1,
        **options,
    )
    with torch.no_grad():
        layer.weight.copy_(drawn(layer.weight.shape, seed=dist.get_rank()))
        layer.bias.copy_(drawn(layer.bias.shape, seed=100 + (dist.get_rank() if case.kind == "column" else 0)))
    return layer.requires_grad_(case.is_trained)


def drawn(shape: tuple[int, ...], *, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pass_through(case: LinearCase, *, overlaps: bool) -> list[Tensor | None]:
    """Output, bias handed on, and gradients of input, weight and bias; the input and what comes back are not contiguous."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    layer, size = build(case, overlaps=overlaps), dist.get_world_size()
    shared = case.kind == "column" and case.is_sequence_parallel
    num_rows = case.num_rows if shared else case.num_rows * size
    same = case.kind == "column" and not shared
    rows = drawn((12 // (size if case.kind == "row" else 1), case.batch, num_rows), seed=50 if same else 50 + dist.get_rank())
    inputs = rows.to(case.dtype).permute(2, 1, 0).requires_grad_(case.input_is_trained)
    queue = WeightGradientQueue() if case.defers else None
    with defer_weight_gradients(queue):
        output, handed_on = layer(inputs)
    if output.requires_grad:
        scale = drawn(
            output.shape[::-1], seed=70 if case.kind == "row" and not case.is_sequence_parallel else 70 + dist.get_rank()
        )
        output.backward(scale.to(case.dtype).permute(2, 1, 0))
    if queue is not None:
        assert len(queue) == case.is_trained and layer.weight.grad is None
        queue.compute()
    return [output.detach(), None if handed_on is None else handed_on.detach(), inputs.grad, layer.weight.grad, layer.bias.grad]


def compare(case: LinearCase) -> None:
    expected, found = pass_through(case, overlaps=False), pass_through(case, overlaps=True)
    tolerance = 1e-12 if case.dtype == torch.float64 else 2e-2
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("is_sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {"batch": 3},
        {"defers": True},
        {"skip_bias_add": True},
        {"is_trained": False},
        {"input_is_trained": False},
        {"input_is_trained": False, "is_trained": False},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_whole_collectives(
    ranks: RankPool, kind: str, is_sequence_parallel: bool, change: dict[str, Any]
) -> None:
    ranks.run(compare, LinearCase(kind, 4, is_sequence_parallel, **change), world_size=2)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_four_ranks_and_more_parts_than_rows(ranks: RankPool, kind: str) -> None:
    for num_parts in (1, 3, 50):
        ranks.run(compare, LinearCase(kind, num_parts), world_size=4)


def collectives(case: LinearCase) -> list[str]:
    """Those started in a forward and a backward, all of them asynchronously."""
    found: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert options["async_op"]
            found.append(name)
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", noting("all_gather", dist.all_gather))
        patch.setattr(dist, "all_reduce", noting("all_reduce", dist.all_reduce))
        patch.setattr(
            deferrable_linear, "reduce_scatter_single", noting("reduce_scatter", deferrable_linear.reduce_scatter_single)
        )
        pass_through(case, overlaps=True)
    return found


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (LinearCase("column", 3), 3 * ["all_gather"] + 3 * ["all_gather"] + 3 * ["reduce_scatter"]),
        (LinearCase("column", 3, is_trained=False), 3 * ["all_gather"] + 3 * ["reduce_scatter"]),
        (LinearCase("row", 3), 3 * ["reduce_scatter"] + 3 * ["all_gather"]),
        (LinearCase("column", 3, is_sequence_parallel=False), 3 * ["all_reduce"]),
        (LinearCase("row", 3, is_sequence_parallel=False), 3 * ["all_reduce"]),
        (LinearCase("row", 9), 7 * ["reduce_scatter"] + 7 * ["all_gather"]),
    ],
    ids=["column", "frozen column", "row", "column of sums", "row of sums", "row in more parts than it has"],
)
def test_every_collective_is_cut_and_asynchronous(ranks: RankPool, case: LinearCase, expected: list[str]) -> None:
    assert ranks.run(collectives, case, world_size=2) == [expected, expected]


class Watched(NamedTuple):
    """A collective that notes when it is waited for."""

    work: Any
    events: list[str]

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def order_of_events(case: LinearCase) -> list[str]:
    """Collectives started and waited for, and products, in a forward."""
    events: list[str] = []
    where, name = (dist, "all_gather") if case.kind == "column" else (deferrable_linear, "reduce_scatter_single")
    start, multiply = getattr(where, name), deferrable_linear._multiply

    def starting(*args: Any, **options: Any) -> Watched:
        events.append("start")
        return Watched(start(*args, **options), events)

    def multiplying(*args: Any, **options: Any) -> Tensor:
        events.append("product")
        return multiply(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, starting)
        patch.setattr(deferrable_linear, "_multiply", multiplying)
        pass_through(case._replace(is_trained=False, input_is_trained=False), overlaps=True)
    return events


def test_a_part_is_on_its_way_while_another_is_multiplied(ranks: RankPool) -> None:
    column, row = (ranks.run(order_of_events, LinearCase(kind, 3), world_size=2)[0] for kind in ("column", "row"))
    assert column == ["start"] * 3 + ["wait", "product"] * 3
    assert row == ["product", "start"] * 3 + ["wait"] * 3


SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 16, "init_method_std": 0.3}
BIASES = {"add_bias_linear": True, "add_qkv_bias": True}
IMAGE = {"patch_size": 2, "in_channels": 1, "merge_size": 1}
SAMPLES = (
    SampleShape((("vision", 1, 2),), 5, 3),
    SampleShape((("vision", 2, 2), ("vision", 1, 1)), 6, 1),
    SampleShape((("vision", 3, 1),), 4, 2),
    SampleShape((), 3, 2),
    SampleShape((), 6, 2),
    SampleShape((("vision", 1, 1),), 2, 2),
)
SAMPLE_GROUPS = [[(0, -1), (1, -1)], [(2, -1), (3, -1)], [(4, -1), (5, -1)]]
ITEM_GROUPS = [[(0, 0), (1, 0)], [(1, 1)], [(2, 0), (5, 0)]]
SIZES: dict[str, dict[str, Any]] = {
    "tp 2 and 4": {"vision": (2, 1, 1), "llm": (4, 1, 1)},
    "tp 4, pp 2": {"vision": (2, 1, 4), "llm": (4, 2, 1), "colocated": True},
    "tp 2, cp 2": {"vision": (2, 1, 1, 2), "llm": (2, 1, 1, 2)},
    "tp 2, two replicas": {"vision": (2, 1, 1), "llm": (2, 1, 2)},
}
"""Name -> (tp, pp, dp, cp) of each unit."""
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zb-h1": {"builder": "zb-h1"},
    "zb-h1 with recomputation": {"builder": "zb-h1", "recompute": "full", "sequence_parallel": False},
    "split backward": {"passes": (split_backward,), "recompute": "selective"},
    "weights shared": {"shards_weights": True},
}


def build_case(sizes: str, **changes: Any) -> GradientCase:
    """Microbatches of one and two atoms, of lengths that three parts do not divide."""
    units = {
        "vision": {"role": "encoder", "image": IMAGE, **SHAPE, **BIASES},
        "llm": {"role": "backbone", **SHAPE, "activation": "swiglu"},
    }
    graph = ModelGraph.from_dict({"units": units})
    plan = build_plan(graph, **SIZES[sizes])
    groups = {"vision": ITEM_GROUPS, "llm": SAMPLE_GROUPS}
    counts = {name: unit.data_parallel_size for name, unit in plan.units.items()}
    assignment = Assignment.from_dict(
        {name: [groups[name][index::count] for index in range(count)] for name, count in counts.items()}
    )
    case = GradientCase(graph, plan, assignment, RandomSource(graph, SAMPLES, 12), sequence_parallel=True, num_overlapped_parts=3)
    return replace(case, **changes)


@pytest.mark.parametrize(
    ("sizes", "change"),
    [
        ("tp 2 and 4", "plain"),
        ("tp 4, pp 2", "zb-h1 with recomputation"),
        ("tp 2, cp 2", "split backward"),
        ("tp 2, two replicas", "weights shared"),
    ],
)
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, sizes: str, change: str) -> None:
    assert_matches(build_case(sizes, **CHANGES[change]), ranks)
