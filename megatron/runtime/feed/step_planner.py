"""Makes a step from its number, with everything a rank needs to run it: samples, lengths, assignment, schedule, inputs.

Every rank computes the same decisions from the same lengths and seed; only the inputs differ. As a torch Dataset indexed by step
it runs ahead of training and off its critical path, in worker processes or a thread; errors are raised where the step is taken.
"""

import fcntl
import hashlib
import multiprocessing
import os
import pickle
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron.runtime import platform
from megatron.runtime.emulation.emulated_stage import with_emulated_inputs
from megatron.runtime.feed.agreement import assignment_digest, decision_digest
from megatron.runtime.feed.sample_exchange import SampleExchange
from megatron.runtime.feed.step_inputs import load_inputs
from megatron.runtime.launch.failure import ignore_in_worker
from megatron.runtime.step.balance_report import BalanceReport, imbalances
from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import DEFAULT_SHARING, ContextSharing
from multimodal.balance import BALANCERS, UNBALANCED, BalancerRow
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.in_order import balance_in_order
from multimodal.balance.placement import as_computed
from multimodal.balance.rearrange_nodes import NodeArrangement
from multimodal.cost.flops import step_flops
from multimodal.cost.step_costs import StepCosts
from multimodal.data.byte_cache import write_whole
from multimodal.data.global_batches import GlobalBatches
from multimodal.data.sample_source import SampleSource
from multimodal.data.source_views import ReadableItems, SourceSubset
from multimodal.model.transformer_config import BuildOptions
from multimodal.schedule.align_replicas import Joins
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.values.assignment import Assignment
from multimodal.values.errors import BraidError
from multimodal.values.sample_lengths import LengthBatch, SampleLengths
from multimodal.values.validate import validate_assignment

_MOST_KEPT = 32
"""Decisions that are kept for ranks that are behind; one that comes even later decides for itself."""


class Decision(NamedTuple):
    """The places of a step's samples, as one rank chose them for its node."""

    assignment: Assignment
    predicted_seconds: tuple[float, float] | None
    """Where it goes by predictions: those of the step in the data's order, and under this assignment."""
    seconds: float
    """In which that rank chose, without the waits of others for it."""


class NodeDecisions:
    """Assignments that take long to choose: one rank of a node chooses, and others that see the same lengths read it."""

    def __init__(self, name: str, *, subject: object) -> None:
        """name: a text that no other run has; subject: what decisions depend on besides lengths, by its `repr`."""
        self._folder = Path(tempfile.gettempdir()) / f"braid-{name}"
        self._subject = repr(subject).encode()

    def find(self, lengths: LengthBatch, decide: Callable[[], Decision]) -> Decision:
        """Return the decision that another rank made for these lengths, or that `decide` makes now.

        decide: returns the assignment of these lengths, alike on all ranks. Where the folder cannot be used, each rank decides.
        """
        try:
            digest, arrays = hashlib.blake2b(self._subject), lengths.arrays
            for each in (getattr(arrays, field.name) for field in fields(arrays)):
                digest.update(np.ascontiguousarray(each).tobytes() if isinstance(each, np.ndarray) else repr(each).encode())
            key, found = self._folder / digest.hexdigest(), None
        except (TypeError, OverflowError):  # lengths that `decide` refuses, and says why
            return decide()
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with key.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if key.exists():
                    found = pickle.loads(key.read_bytes())
                else:
                    found = decide()
                    write_whole(key, pickle.dumps(found))
                    newest_first = sorted(self._folder.iterdir(), key=os.path.getmtime, reverse=True)
                    for file in newest_first[2 * _MOST_KEPT :]:
                        file.unlink(missing_ok=True)
        return decide() if found is None else found

    def close(self) -> None:
        """Remove the folder; ranks that are behind decide for themselves."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class StepOptions:
    """The values that all steps of a rank are planned with."""

    schedules: ScheduleCache
    rank: int
    is_emulated: bool = False
    """Use sizes instead of inputs."""
    sharing: ContextSharing = DEFAULT_SHARING
    """The way in which tokens are spread, the same on every rank."""
    shards_weights: bool = False
    """True if replicas share their weights, and so have to compute together."""
    costs_of: Callable[[Assignment, Sequence[SampleLengths]], StepCosts] | None = None
    """Returns the costs of a step, the same on every rank; called if schedules need them."""
    build: BuildOptions | None = None
    """Build options of the run's stages; see `load_inputs`."""
    seed: int = 0
    """The seed of the noise from which generators learn."""
    skips_bad: bool = False
    """Give samples that cannot be read empty items, and say so in `Step.problems`."""


@dataclass(eq=False)
class StepPlanner(torch.utils.data.Dataset[Step]):
    """Step number -> Step, for one rank."""

    source: SampleSource
    batches: GlobalBatches
    balancer: BalancerRow
    balance_options: BalanceOptions
    options: StepOptions
    exchange: SampleExchange | None = None
    """Decodes first, then sends samples to the ranks that need them."""
    arrangement: NodeArrangement | None = None
    """Permutes encoders' batches."""
    decisions: NodeDecisions | None = None
    """Shares the balancer's assignments with the node's other ranks."""
    is_left: Callable[[int], bool] = lambda step: False
    """Returns True for a step that is left in the data's order, without deciding."""

    def __getitem__(self, step: int) -> Step:
        """Plan and load step `step` (from 0)."""
        graph, plan = self.options.schedules.graph, self.options.schedules.plan
        drawn = {sample.sample_id: sample.source_index for sample in self.batches.batch(step)}
        readable = ReadableItems(self.source, graph=graph) if self.options.skips_bad else None
        source: SampleSource = SourceSubset(readable or self.source, drawn)
        share = self.exchange.decode(source, list(drawn)) if self.exchange else None
        lengths = LengthBatch(map((share or source).lengths, drawn))
        work, node_bytes = BatchWork(graph, lengths, self.balance_options), None
        before = balance_in_order(work, plan=plan)
        assignment, predicted_seconds, seconds = self._decide(work, before, is_left=self.is_left(step))
        start = time.perf_counter()
        if self.arrangement is not None:
            assignment, node_bytes = self.arrangement.arrange(assignment, work, plan=plan, sample_ids=list(drawn))
        balance_ms, exchanged_bytes = 1e3 * (seconds + time.perf_counter() - start), None
        if self.exchange and share:
            source = received = self.exchange.exchange(share, self.options.schedules.shape(assignment), assignment)
            exchanged_bytes = received.bytes_between_nodes
        was, now = (imbalances(each, work) for each in (before, assignment))
        report = BalanceReport(
            was, now, predicted_seconds, balance_ms, node_bytes=node_bytes, exchanged_node_bytes=exchanged_bytes
        )
        planned = plan_step(source, lengths=lengths, assignment=assignment, options=self.options)
        vocab_size = self.balance_options.vocab_size
        flops = step_flops(graph, lengths, vocab_size=vocab_size) if vocab_size else 0.0
        found = readable.problems if readable else {}
        problems = {sample_id: found[index] for sample_id, index in drawn.items() if index in found}
        return planned.changed(balance=report, flops=flops, problems=problems)

    def _decide(self, work: BatchWork, in_order: Assignment, *, is_left: bool) -> Decision:
        if is_left:
            return self._balance(BALANCERS[UNBALANCED], work, in_order)
        balance = partial(self._balance, self.balancer, work, in_order)
        return self.decisions.find(LengthBatch.of(work.lengths), balance) if self.decisions else balance()

    def _balance(self, balancer: BalancerRow, work: BatchWork, in_order: Assignment) -> Decision:
        plan, lengths, options = self.options.schedules.plan, work.lengths, self.balance_options
        start, predicted = time.perf_counter(), None
        assignment = balancer(lengths, graph=self.options.schedules.graph, plan=plan, options=options)
        if options.predictor is not None and balancer.needs_costs:
            before, after = options.predictor.predict_each((in_order, assignment), lengths)  # auto has predicted both
            predicted = before.seconds, after.seconds
        return Decision(assignment, predicted, time.perf_counter() - start)


def plan_step(source: SampleSource, *, lengths: Sequence[SampleLengths], assignment: Assignment, options: StepOptions) -> Step:
    """Return the step of an assignment, with this rank's inputs; raises AssignmentError, ScheduleError or DataError."""
    schedules, rank, costs_of = options.schedules, options.rank, options.costs_of
    graph, plan = schedules.graph, schedules.plan
    validate_assignment(assignment, lengths, graph=graph, plan=plan)
    assignment = as_computed(assignment, lengths, graph=graph, plan=plan)
    costs = costs_of(assignment, lengths) if costs_of is not None else None
    built = schedules.find(schedules.shape(assignment), costs)
    joins: Joins = ()
    if options.shards_weights:
        schedule, joins = built.together
    else:
        schedule = built.schedule if costs is None else built.to_run(costs)
    own, by_id = schedule.spelled_out(plan.lane_of_rank[rank]), {sample.sample_id: sample for sample in lengths}
    digest = assignment_digest(assignment) if costs is None else decision_digest(assignment, schedule)
    step = Step(own, assignment, by_id, inputs={}, digest=digest, sharing=options.sharing, joins=joins)
    step = step.changed(route_rows=step.placement.rows_of_routes(rank=rank))
    if options.is_emulated:
        return with_emulated_inputs(step, rank=rank)
    inputs, target_samples = load_inputs(source, step, rank=rank, options=options.build, seed=options.seed)
    return step.changed(inputs=inputs, target_samples=target_samples)


STEPS_AHEAD = 2
"""Steps that each worker, or the thread, prepares in advance."""


def num_begun(num_workers: int | None) -> int:
    """Return how many steps behind the one that is trained may have been begun at most; None: by `load_steps_in_thread`."""
    return STEPS_AHEAD + 1 if num_workers is None else STEPS_AHEAD * num_workers


class StepPlanners(Dataset[Step | BraidError]):
    """Makes steps by what is known when they are asked for: builds another planner where that has changed."""

    def __init__(self, build: Callable[[Any], StepPlanner], known: Any) -> None:
        """known: what the first steps go by."""
        self._build, self._known, self._planner = build, known, build(known)

    def plan(self, step: int, known: Any) -> Step:
        """Return step `step` (from 0), packed."""
        if known != self._known:
            self._known, self._planner = known, self._build(known)
        return self._planner[step].packed()

    def __getitem__(self, asked: tuple[int, Any]) -> Step | BraidError:
        """Return exceptions as values: torch wraps a worker's in a traceback, while wrong input needs only a message."""
        try:
            return self.plan(*asked)
        except BraidError as problem:
            return problem


def load_steps(
    planners: StepPlanners, steps: range, *, known_at: Callable[[int], Any], num_workers: int
) -> Generator[Step, None, None]:
    """Yield the steps in order, each by what is known at it, which may not change for the next `num_begun(num_workers)` steps.

    With `num_workers` 0 each is prepared when it is taken. Raises errors of planning and loading.
    """
    loader = DataLoader(
        planners,
        batch_size=None,
        sampler=((step, known_at(step)) for step in steps),
        num_workers=min(num_workers, len(steps)),
        prefetch_factor=STEPS_AHEAD if num_workers and len(steps) else None,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_start_worker,
    )
    for loaded in loader:
        if isinstance(loaded, BraidError):
            raise loaded
        yield loaded


def load_steps_in_thread(planners: StepPlanners, steps: range, *, known_at: Callable[[int], Any]) -> Generator[Step, None, None]:
    """Do the same in a thread, for planners that communicate, as no forked worker can; raises errors at their step."""
    prepared: queue.Queue[Step | BaseException] = queue.Queue(maxsize=STEPS_AHEAD)

    def prepare() -> None:
        for number in steps:
            try:
                step = planners.plan(number, known_at(number))
                prepared.put(step.pin_memory() if torch.cuda.is_available() else step)
            except BaseException as problem:
                prepared.put(problem)
                return

    threading.Thread(target=prepare, name="steps ahead", daemon=True).start()
    for _ in steps:
        step = prepared.get()
        if isinstance(step, BaseException):
            raise step
        yield step


def _start_worker(worker: int) -> None:
    platform.keep_freed_memory()
    torch.set_num_threads(1)
    ignore_in_worker()
    sys.excepthook = _report_unless_orphaned


def _report_unless_orphaned(*problem: Any) -> None:
    """Report an exception of a worker's thread, unless its training process is gone, which others report better."""
    parent = multiprocessing.parent_process()
    for _ in range(10):
        if parent is not None and os.getppid() != parent.pid:
            return
        time.sleep(0.1)  # its connections close slightly before a process is gone
    sys.__excepthook__(*problem)
