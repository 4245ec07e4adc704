"""Runs a schedule for real, with timed waits as computations, which need no core: real processes, messages, reductions."""

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megatron.runtime import platform
from megatron.runtime.communication.create_groups import connect_world
from megatron.runtime.emulation.emulated_stage import Cost, EmulatedStage, with_emulated_inputs
from megatron.runtime.session import Session, SessionOptions
from megatron.runtime.step.step import Step
from multimodal.cost.step_costs import ComputeCost, StepCosts
from multimodal.model.transformer_config import BuildOptions
from multimodal.schedule.build_schedule import settle_fillers
from multimodal.schedule.compile_schedule import compile_schedule
from multimodal.values.action import Action
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths, pass_items
from multimodal.values.schedule import Schedule
from multimodal.values.timeline import Timeline

TIMEOUT = timedelta(minutes=5)
_VOCAB_SIZE = 128
_ANSWER = "answer"
"""File with the result of rank 0."""


@dataclass(frozen=True)
class EmulatedRun:
    """A schedule to run, with the values that the simulator takes, too."""

    schedule: Schedule
    """Lowered and validated."""
    assignment: Assignment
    costs: StepCosts
    num_iterations: int = 5
    num_tokens: int = 8
    """Tokens of every item and of every sample's text, which determine message sizes."""


def emulate(run: EmulatedRun) -> tuple[Timeline, ...]:
    """Run it in processes of this machine, one per rank; returns measured timelines after a warm-up. Raises if a rank fails."""
    return run_on_ranks(emulate_on_rank, run, num_ranks=run.schedule.shape.plan.num_ranks)


def run_on_ranks(function: Callable[..., Any], *args: Any, num_ranks: int) -> Any:
    """Fork a gloo world, call `function(*args, rank=rank)` on every rank, and return rank 0's result (it must pickle)."""
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is in use in this process, so no ranks can be forked from it; emulate in a process of its own")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, Path(folder), function, args)
        multiprocessing.start_processes(_serve_rank, arguments, nprocs=num_ranks, start_method="fork")  # type: ignore[attr-defined]
        return pickle.loads((Path(folder) / _ANSWER).read_bytes())


def _serve_rank(rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    platform.install()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    store = dist.FileStore(str(folder / "store"), num_ranks)  # type: ignore[attr-defined]
    connect_world("gloo", store=store, rank=rank, size=num_ranks, timeout=TIMEOUT)
    answer = function(*args, rank=rank)
    if rank == 0:
        (folder / _ANSWER).write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def emulate_on_rank(run: EmulatedRun, *, rank: int) -> tuple[Timeline, ...]:
    """Run this rank's part in an initialised world; collective. Returns the timelines on rank 0, nothing elsewhere."""
    run = replace(run, schedule=settle_fillers(run.schedule, run.costs))
    graph, plan = run.schedule.shape.graph, run.schedule.shape.plan
    session = emulated_session(graph, plan, cost=_cost_of(run))
    step = emulated_step(run.schedule, run.assignment, num_tokens=run.num_tokens, rank=rank)
    timelines = []
    for _ in range(run.num_iterations + 1):
        dist.barrier()
        result = session.forward_backward(step)
        session.finish_gradients()
        timelines.append(session.gather_timeline(result.events))
    return tuple(timeline for timeline in timelines[1:] if timeline is not None)


def _cost_of(run: EmulatedRun) -> Cost:
    """Return the costs of a lane's computations in the simulator's form: inside a wait, or with filled waits."""
    are_inside = frozenset[Action]()
    num_waits: dict[Action, int] = {}  # carrier -> number of its waits up to the last one that is filled
    outlasted: dict[Action, float] = {}  # carrier -> seconds by which collectives of the work inside outlast their intervals
    if run.schedule.has_inside:
        compiled = compile_schedule(run.schedule).with_costs(run.costs)
        inside, times, action_of = compiled.inside, compiled.carrier_times, run.schedule.work.action
        assert inside is not None and times is not None
        are_inside = frozenset(map(action_of, np.unique(inside.pieces).tolist()))
        outlasted = {action_of(piece): late for piece, late in zip(times.carriers.tolist(), times.late.tolist(), strict=True)}
        for piece, wait in zip(inside.carriers.tolist(), inside.waits.tolist(), strict=True):
            num_waits[action_of(piece)] = max(num_waits.get(action_of(piece), 0), wait + 1)

    @cache
    def compute(action: Action) -> ComputeCost:
        """Return the cost of a computation; a collective at the end of one that runs inside another runs beside that."""
        cost = run.costs.compute(action)
        if action in are_inside:
            return ComputeCost(cost.seconds - cost.tensor_parallel_seconds)
        missing = num_waits.get(action, 0) - len(cost.waits)
        waits = (*cost.waits, *(0.0,) * max(0, missing))
        return cost._replace(seconds=cost.seconds + outlasted.get(action, 0.0), waits=waits)

    return compute


def emulated_session(graph: ModelGraph, plan: Plan, *, cost: Cost) -> Session:
    """Return a session whose stages wait instead of computing; nothing is updated."""
    build = BuildOptions(torch.float32)
    options = SessionOptions(graph, build, _VOCAB_SIZE, timeout=TIMEOUT, build_stage=partial(EmulatedStage, cost=cost))
    return Session(options, plan=plan)


def emulated_step(schedule: Schedule, assignment: Assignment, *, num_tokens: int, rank: int) -> Step:
    """Return a step without data: every sample has one target token, every item and text `num_tokens` tokens."""
    lengths = _lengths(schedule.shape.graph, assignment, num_tokens)
    step = Step(schedule=schedule, assignment=assignment, lengths={sample.sample_id: sample for sample in lengths}, inputs={})
    route_rows = step.placement.rows_of_routes(rank=rank)
    return with_emulated_inputs(step.changed(route_rows=route_rows), rank=rank)


def _lengths(graph: ModelGraph, assignment: Assignment, num_tokens: int) -> Sequence[SampleLengths]:
    backbone, placed = graph.backbone.name, assignment.placed
    unit_of: dict[int, dict[int, str]] = {sample: {} for sample in sorted(placed[backbone].sample_ids.tolist())}
    for unit in graph.item_encoders:
        columns = placed[unit.name].sample_ids.tolist(), placed[unit.name].item_indices.tolist()
        for sample, index in zip(*columns, strict=True):
            unit_of[sample][index] = unit.name
    found = []
    for sample, units in unit_of.items():
        num_items = max(units, default=-1) + 1
        names = [units.get(index, backbone) for index in range(num_items)]
        items = [ItemLengths(name, num_tokens, num_tokens) for name in names]
        items += [ItemLengths(unit.name, num_tokens, 0) for unit in graph.generators]
        found.append(SampleLengths(sample, pass_items(graph, items), num_tokens, 1))
    return found
