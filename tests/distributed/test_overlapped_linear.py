"""Linear layers whose collectives run in parts beside their products: when these start, and the gradients of one process."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor

from multimodal.model import deferrable_linear
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.schedule.passes.split_backward import split_backward
from tests.distributed.dealt_case import dealt_case, described, source_of
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import build_plan

CLASSES = {"column": DeferrableColumnParallelLinear, "row": DeferrableRowParallelLinear}


class LinearCase(NamedTuple):
    kind: str
    num_parts: int
    is_sequence_parallel: bool = True
    is_trained: bool = True


def build(case: LinearCase) -> Any:
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=case.is_sequence_parallel,
        params_dtype=torch.float64,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    options = {"gather_output": False} if case.kind == "column" else {"input_is_parallel": True}
    options |= {"bias": True, "tp_group": dist.group.WORLD, "num_overlapped_parts": case.num_parts, "skip_bias_add": False}
    layer = CLASSES[case.kind](12, 20, config=config, init_method=lambda weight: weight, **options)
    return layer.requires_grad_(case.is_trained)


def pass_through(case: LinearCase, *, trains_input: bool = True) -> None:
    """A forward and a backward of seven rows on each rank."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    size = dist.get_world_size()
    is_whole = case.kind == "row" or not case.is_sequence_parallel
    inputs = torch.ones(7 * size if is_whole else 7, 1, 12 // (size if case.kind == "row" else 1), dtype=torch.float64)
    output, _ = build(case)(inputs.requires_grad_(trains_input))
    if output.requires_grad:
        output.sum().backward()


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
        pass_through(case)
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
        pass_through(case._replace(is_trained=False), trains_input=False)
    return events


def test_a_part_is_on_its_way_while_another_is_multiplied(ranks: RankPool) -> None:
    column, row = (ranks.run(order_of_events, LinearCase(kind, 3), world_size=2)[0] for kind in ("column", "row"))
    assert column == ["start"] * 3 + ["wait", "product"] * 3
    assert row == ["product", "start"] * 3 + ["wait"] * 3


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
    """Microbatches of lengths that three parts do not divide."""
    biases = {"add_bias_linear": True, "add_qkv_bias": True}
    units = {
        **described("vision", num_attention_heads=4, **biases),
        **described("llm", num_attention_heads=4, activation="swiglu"),
    }
    plan = build_plan(source_of(units).graph, **SIZES[sizes])
    return dealt_case(units, plan, **{"sequence_parallel": True, "num_overlapped_parts": 3} | changes)


@pytest.mark.deep(when=lambda change: change in ("plain", "split backward"))  # planted errors are of the first kind
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
