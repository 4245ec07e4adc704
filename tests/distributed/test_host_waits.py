"""No step makes the host wait for a CUDA device between its first and its last action, nor a device for the host.

What would make it wait is counted on the CPU, where all of it works.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.runtime.execution.lane_run import LaneRun
from megatron.runtime.execution.running_step import RunningStep
from multimodal.schedule.passes import PASSES
from multimodal.values.action import Action
from multimodal.values.schedule import Lane
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_step
from tests.distributed.rank_pool import RankPool
from tests.distributed.spread_case import build_case, unit_plan, whole_items_case

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that give the host its values."""
WRITES = ("tensor", "as_tensor", "from_numpy", "frombuffer")
"""Functions of torch that make tensors of the host's values, which a device would have to copy."""
FACTORIES = ("arange", "empty", "full", "linspace", "ones", "randint", "randn", "randperm", "zeros")
"""Functions of torch that make tensors on the host unless they are told a device."""
OPERATIONS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "bincount",
)
"""Operations whose result, or its shape, the host must know."""


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        is_mask = name in ("index", "index_put_") and any(each is not None and each.dtype == torch.bool for each in args[1])
        has_counts = function is torch.ops.aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if name in OPERATIONS or is_mask or has_counts:
            self._found.append(_described(name))
        return function(*args, **(kwargs or {}))


@contextmanager
def counting_host_waits() -> Iterator[list[str]]:
    """Yield a list that gets a line for everything that is found inside."""
    found: list[str] = []
    with ExitStack() as patches:
        for owner, names in ((Tensor, READS), (torch, WRITES)):
            for name in names:
                patches.enter_context(patch.object(owner, name, _noted(getattr(owner, name), name, found)))
        for name in FACTORIES:
            patches.enter_context(patch.object(torch, name, _noted(getattr(torch, name), name, found, unless="device")))
        patches.enter_context(_Operations(found))
        yield found


@contextmanager
def counting_in_lanes() -> Iterator[list[str]]:
    """Count between the first and the last action of every step that runs inside."""
    found: list[str] = []
    original = LaneRun.run

    def run(self: LaneRun, lane: Lane) -> None:
        with counting_host_waits() as inside:
            original(self, lane)
        found.extend(inside)

    with patch.object(LaneRun, "run", run):
        yield found


def _noted(original: Callable[..., Any], name: str, found: list[str], *, unless: str = "") -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        if unless not in options:
            found.append(_described(name))
        return original(*args, **options)

    return noted


def _described(name: str) -> str:
    """The call, and where Braid made it."""
    stack = [frame for frame in traceback.extract_stack() if "/multimodal/" in frame.filename or "/runtime/" in frame.filename]
    return f"{name} at {stack[-1].filename.rsplit('/', 2)[-1]}:{stack[-1].lineno}" if stack else name


SPREAD = build_case(vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=2, tp=2), painter=unit_plan(2, tp=2))
PIPELINE = replace(
    build_case(vision=unit_plan(0), llm=unit_plan(1, pp=2), painter=unit_plan(3)),
    builder="zb-h1",
    passes=(PASSES["fill"], PASSES["gather-parameters"]),
)
CASES = {
    "spread over ranks": replace(SPREAD, sequence_parallel=True),
    "recomputed": replace(SPREAD, recompute="full"),
    "pipeline, split backwards": PIPELINE,
    "whole items": whole_items_case(vision=unit_plan(0, cp=2), llm=unit_plan(2, cp=2), painter=unit_plan(0, cp=2)),
    "sharded weights": replace(SPREAD, shards_weights=True),
}


def waits_on_rank(case: GradientCase, planted: bool = False) -> list[str]:
    session, step = build_session(case), plan_case(case)
    original = RunningStep.forward

    def forward(self: RunningStep, action: Action) -> None:
        original(self, action)
        float(torch.ones(()))

    with counting_in_lanes() as found, patch.object(RunningStep, "forward", forward if planted else original):
        run_step(session, step)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_none(ranks: RankPool, name: str) -> None:
    assert ranks.run(waits_on_rank, CASES[name], world_size=CASES[name].plan.num_ranks) == [[]] * CASES[name].plan.num_ranks


def test_one_is_found(ranks: RankPool) -> None:
    found = ranks.run(waits_on_rank, PIPELINE, True, world_size=PIPELINE.plan.num_ranks)
    assert all(any("__float__" in line for line in lines) for lines in found)
