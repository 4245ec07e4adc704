"""No step makes the host wait for a CUDA device between its first action and its update, nor a device for the host.

What would make it wait is counted on the CPU, where all of it works.
"""

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.nccl_replay import Replayed, hosts_of, run_kernels
from benchmarks.recorded_calls import Call, EventKind, Recorded, recording_calls
from megatron.runtime.execution.lane_run import LaneRun
from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients.unit_optimizer import AdamInBlocks, build_optimizer_config
from megatron.runtime.session import Session
from megatron.runtime.training.trainer import Trainer, build_scheduler
from multimodal.schedule.passes import PASSES
from multimodal.values.action import Action
from multimodal.values.plan import Plan
from multimodal.values.schedule import Entry
from tests.distributed import test_plan_change, test_reduce_by_layer
from tests.distributed.dealt_case import UNITS, dealt_case, described
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_on_rank
from tests.distributed.rank_pool import RankPool
from tests.distributed.spread_case import build_case, unit_plan, whole_items_case
from tests.distributed.test_inside_waits import PAIRS
from tests.distributed.test_inside_waits import build_case as build_inside
from tests.distributed.test_planted_errors import case_of_any_plan
from tests.distributed.training_case import TrainingCase
from tests.unit.cost.cost_cases import EVEN_CLUSTER

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that give the host its values."""
WRITES = ("tensor", "as_tensor", "from_numpy", "frombuffer")
"""Functions of torch that make tensors of the host's values, which a device would have to copy."""
FACTORIES = ("arange", "empty", "full", "linspace", "ones", "randint", "randn", "randperm", "zeros")
"""Functions of torch that make tensors on the host unless they are told a device."""
OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
OPERATIONS += ("equal", "bincount")
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
def counting_until_updated() -> Iterator[list[str]]:
    """Count between the first action of a step inside and its update, but for Adam, which waits on the CPU alone."""
    found: list[str] = []
    run, step_optimizers = LaneRun.run, Session.step_optimizers

    with ExitStack() as counting:

        def counted(self: LaneRun, lane: Sequence[Entry]) -> None:
            inside = counting.enter_context(counting_host_waits())
            counting.callback(lambda: found.extend(inside))
            run(self, lane)

        def last(self: Session, *args: Any, **options: Any) -> None:
            step_optimizers(self, *args, **options)
            counting.close()

        replaced = (LaneRun, "run", counted), (Session, "step_optimizers", last), (AdamInBlocks, "step", lambda self: None)
        with ExitStack() as patches:
            for each in replaced:
                patches.enter_context(patch.object(*each))
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
    config = {"lr": 0.1, "min_lr": 0.1, "weight_decay": 0.0}
    optimizer = build_optimizer_config(**config, betas=(0.9, 0.9), eps=1e-8, clip_grad=1.0, dtype=case.dtype)
    session, step, settings = build_session(case, optimizer=optimizer), plan_case(case), OptimizerSettings(**config)
    trainer = Trainer(session, scheduler=build_scheduler(settings, session, train_iters=1), settings=settings, peak_tflops=1.0)
    original = RunningStep.forward

    def forward(self: RunningStep, action: Action) -> None:
        original(self, action)
        float(torch.ones(()))

    with counting_until_updated() as found, patch.object(RunningStep, "forward", forward if planted else original):
        trainer.train_step(step, number=1)
    return found


@pytest.mark.deep(when=lambda name: name == "recomputed")
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_none(ranks: RankPool, name: str) -> None:
    assert ranks.run(waits_on_rank, CASES[name], world_size=CASES[name].plan.num_ranks) == [[]] * CASES[name].plan.num_ranks


def test_one_is_found(ranks: RankPool) -> None:
    found = ranks.run(waits_on_rank, PIPELINE, True, world_size=PIPELINE.plan.num_ranks)
    assert all(any("__float__" in line for line in lines) for lines in found)


NUM_MULTIPROCESSORS = 132
BLOCKS_OF_CALL = 24
"""An H100's multiprocessors, and those that a call of NCCL may hold."""
Run = tuple[int, Callable[..., Any], tuple[Any, ...]]


def plan_changes(name: str) -> Run:
    graph, sizes = test_plan_change.CHANGES[name]
    plans = test_plan_change.plans_of(graph, sizes)
    case = TrainingCase(graph, plans[0], shards_weights=name == test_plan_change.SHARDED)
    return max(plan.num_ranks for plan in plans), test_plan_change.train, (case, plans, 1)


def step_of(case: GradientCase, **changes: Any) -> Run:
    return case.plan.num_ranks, run_on_rank, (replace(case, **changes),)


EXPERTS = {**UNITS, "llm": {**UNITS["llm"], "experts": {"num_experts": 4}}}
SHARING = Plan({"vision": unit_plan(0), "llm": replace(unit_plan(1, dp=2, pp=2), expert_parallel_size=2)})
SIXTEEN = "16 ranks"
WIDE = Plan({"vision": unit_plan(0, dp=2, tp=2), "llm": unit_plan(4, dp=3, tp=2, pp=2)})
BY_DURATIONS = {"builder": "zb-h1", "cluster": EVEN_CLUSTER}
RUNS: dict[str, Callable[[], Run]] = {
    "reductions inside backwards": lambda: step_of(test_reduce_by_layer.build_case("1f1b", num_stages=2)),
    "collectives that are held back": lambda: step_of(build_inside(2, PAIRS, sequence_parallel=True)),
    "experts shared, receives by durations": lambda: step_of(
        dealt_case({name: EXPERTS[name] for name in SHARING.units}, SHARING, **BY_DURATIONS)
    ),
    SIXTEEN: lambda: step_of(dealt_case(described(*WIDE.units), WIDE, sequence_parallel=True, **BY_DURATIONS)),
    "samples exchanged, receives by durations": lambda: step_of(case_of_any_plan(), exchanges_samples=True, cluster=EVEN_CLUSTER),
    "weights shared, gradients reduced once": lambda: step_of(case_of_any_plan(), shards_weights=True, reduces_once=True),
    **{name: partial(plan_changes, name) for name in test_plan_change.CHANGES},
}


def record(function: Callable[..., Any], *args: Any) -> Recorded:
    with recording_calls() as events:
        function(*args)
    return events


@pytest.mark.deep(when=lambda name: name in (SIXTEEN, "samples exchanged, receives by durations", *test_plan_change.CHANGES))
@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_calls_ends_with_nccl(ranks: RankPool, name: str) -> None:
    num_ranks, function, given = RUNS[name]()
    with closing(RankPool(num_ranks)) if name == SIXTEEN else nullcontext(ranks) as pool:
        recorded = pool.run(record, function, *given, world_size=num_ranks)
    calls = [event.call for events in recorded for event in events if event.kind is EventKind.CALL]
    assert any(call.messages for call in calls) and any(not call.messages for call in calls)
    for num_queues, creates_lazily in ((1, False), (33, True)):
        stuck, seconds = replayed(recorded, num_queues=num_queues, creates_lazily=creates_lazily)
        assert not stuck, (num_queues, creates_lazily, stuck)
        assert seconds >= max(sum(event.seconds for event in events) for events in recorded) * (1 - 1e-9)


def replayed(
    recorded: Sequence[Recorded], *, num_queues: int = 33, creates_lazily: bool = False, blocks: int = BLOCKS_OF_CALL
) -> Replayed:
    hosts = hosts_of(recorded, creates_lazily=creates_lazily, blocks_of_call=blocks, bytes_per_second=5e10)
    return run_kernels(hosts, num_queues=num_queues, num_blocks=NUM_MULTIPROCESSORS)


@pytest.fixture(scope="module")
def recorded(ranks: RankPool) -> list[Recorded]:
    num_ranks, function, given = RUNS["collectives that are held back"]()
    return ranks.run(record, function, *given, world_size=num_ranks)


def collectives_of(events: Recorded) -> list[tuple[int, Call]]:
    return [(place, event.call) for place, event in enumerate(events) if event.kind is EventKind.CALL and not event.call.messages]


def test_a_receive_that_is_waited_for_before_its_sender_can_send_is_stuck(recorded: list[Recorded]) -> None:
    """The last one of rank 0, of a gradient of what it sends first."""
    last = max(event.number for event in recorded[0] if event.call.messages and not event.call.messages[0][1])
    early = [event for event in recorded[0] if event.number == last]
    assert [event.kind for event in early] == [EventKind.CALL, EventKind.WAIT]
    stuck = replayed([[*early, *(event for event in recorded[0] if event.number != last)], *recorded[1:]]).stuck
    assert 0 in stuck and len(stuck) > 1


def test_calls_of_one_group_that_are_not_alike_are_named(recorded: list[Recorded]) -> None:
    places = collectives_of(recorded[0])
    first, second = next(
        (one, other)
        for (one, call), (other, next_call) in itertools.combinations(places, 2)
        if call.communicator == next_call.communicator and not call.is_alike(next_call) and len(call.ranks) > 1
    )
    swapped = list(recorded[0])
    for place, other in ((first, second), (second, first)):
        swapped[place] = swapped[place]._replace(call=recorded[0][other].call)
    with pytest.raises(ValueError, match=r"^rank 0: .* bytes, group .*; rank \d: .* bytes, group"):
        replayed([swapped, *recorded[1:]])


def test_calls_that_hold_all_multiprocessors_while_they_wait_are_stuck(recorded: list[Recorded]) -> None:
    assert replayed(recorded, blocks=NUM_MULTIPROCESSORS).stuck
