"""Training that continues while nodes come and go: every generation of ranks takes over where the last one was."""

import gc
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megatron.runtime.communication.gather_objects import gather_objects
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.schedule_checks import read_templates
from megatron.runtime.launch.distributed_setup import RankWatch, World, choose_device, describe_difference
from megatron.runtime.launch.failure import Ending, StopRequests, end_process
from megatron.runtime.launch.meeting import wait_until
from megatron.runtime.launch.rank_place import find_rank_place
from megatron.runtime.recovery.connections import drop, forget_groups
from megatron.runtime.recovery.ledger import Report, Verdict
from megatron.runtime.recovery.member import LeftBehindError, Member
from megatron.runtime.report.reporting import Reporter
from megatron.runtime.state.handover import hold_state, take_over
from megatron.runtime.state.held_tensors import HeldTensor
from megatron.runtime.training.describe_run import Progress, describe_end, describe_run
from megatron.runtime.training.loop import build_reporter, train_on
from megatron.runtime.training.resumption import claim_folder, release, resume
from megatron.runtime.training.run import Run, build_run, open_inputs, prepare_plan
from megatron.runtime.training.trainer import Outcome
from multimodal.cost.step_memory import optimizer_bytes
from multimodal.plan.planners.templates.reconfigure import Pipeline
from multimodal.plan.planners.templates.template_plan import NodesPlan, plan_nodes
from multimodal.values.deferred import import_deferred
from multimodal.values.errors import CheckpointError, ConfigError, PlanError

import_deferred()  # no recovery waits for an import
logger = logging.getLogger(__name__)
_END_SECONDS, _LONG_SECONDS = 10.0, 1e6
_PHASE_ENDS = ("left", "agreed", "planned", "met", "formed", "copied")
"""Names of the times at which the phases of a recovery end, in order."""


class ElasticRun:
    """One process of the run, in one generation after another."""

    def __init__(self, config: RunConfig, *, ending: Ending, stop_requests: StopRequests) -> None:
        """Prepare everything that this process can do alone; raises BraidErrors."""
        if "BRAID_NODE" not in os.environ:
            raise ConfigError("--elastic needs supervisors that outlive ranks; start the run by scripts/elastic.sh")
        self._stop_requests, self._ending = stop_requests, ending
        self._member = Member(os.environ, timeout_seconds=config.parallelism.elastic_timeout, ending=ending)
        ending.spares_others = True
        place = find_rank_place(os.environ)
        choose_device(place.local_rank)
        meeting = self._member.open_meeting(place)
        if self._member.identity.incarnation == 0:
            ending.meeting = meeting
        timeout = timedelta(minutes=config.training.distributed_timeout_minutes)
        watch = RankWatch(meeting, ending=ending, timeout_seconds=timeout.total_seconds())
        self._world = World(place.rank, place.size, meeting, timeout, watch)
        self._prepared = prepare_plan(config, self._world, open_inputs(config, self._world))
        self._templates = read_templates(config, self._prepared.options.graph)
        values = self._prepared.start_values
        first, theirs = json.loads(self._member.ledger.first_to_say("start", json.dumps([place.rank, values])))
        if difference := describe_difference(theirs, there=values, rank=place.rank):
            raise ConfigError(difference.replace("rank 0", f"rank {first}"))
        gc.collect()
        gc.freeze()  # imported modules and files read so far stay: no recovery needs to search them for garbage
        self._run: Run | None = None
        self._reporter: Reporter | None = None
        self._progress: Progress | None = None
        self._held: list[HeldTensor] | None = None
        """The state, from when this rank has left a generation until all ranks of the next one have theirs."""
        self._is_whole = False
        """True if the session has the state."""
        self._formed, self._pipelines = 0, tuple[Pipeline, ...]()
        self._waits = self._is_spare = False
        self._times: dict[str, float] = {}
        self._old_groups: list[object] = []
        """Process groups of generations that have ended."""

    def run(self) -> NoReturn:
        """Train to the end; ends the process."""
        self._member.go_on = self._go_on
        try:
            while not self._take_part():
                pass
        except LeftBehindError:
            is_left_behind = True
        except BaseException:
            self._close()
            raise
        else:
            is_left_behind = False
        while is_left_behind:  # without anything that was built for the generation
            with suppress(LeftBehindError):  # it may be raised twice
                time.sleep(_LONG_SECONDS)
        self._member.finish()
        end_process(0)

    def _go_on(self) -> None:
        """Continue training in place of a thread that waits in vain."""
        logger.warning("rank %d waited for a message that nobody will send, in a thread that is left behind", self._world.rank)
        try:
            self.run()
        except Exception as problem:
            self._ending.fail(problem)

    def _take_part(self) -> bool:
        """Take part in a generation until it ends; returns True if training has ended."""
        try:
            outcome = self._run.trainer.outcome if self._run else None
            done_steps = self._done_steps if self._is_whole or self._held is not None else None
            told, pipelines = None if outcome is None else asdict(outcome), tuple(asdict(each) for each in self._pipelines)
            verdict = self._member.arrive(Report(done_steps, told, self._formed, pipelines, self._waits, self._is_spare))
            self._times = {"left": self._member.left_seconds, "agreed": time.time()}
            # Others have begun to update the weights, and this rank has not.
            if self._run is not None and self._is_whole and verdict.done_steps == self._done_steps + 1:
                assert verdict.outcome is not None
                self._run.trainer.finish(Outcome(**verdict.outcome))
            plan = self._plan(verdict)
            if plan is None:
                return False
            self._let_go()
            with self._member.connections.opening():
                self._form(verdict, plan)
            self._train(verdict, plan)
            return True
        except Exception as problem:
            self._member.leave(problem)
            return False

    @property
    def _done_steps(self) -> int:
        outcome = self._run.trainer.outcome if self._run else None
        assert self._progress is not None
        return max(self._progress.step, outcome.number if outcome else 0)

    def _plan(self, verdict: Verdict) -> NodesPlan | None:
        """Return the plan for the available nodes; None if this one has to wait."""
        before = tuple(Pipeline(tuple(each["nodes"]), each["num_microbatches"]) for each in verdict.pipelines)
        graph = self._prepared.options.graph
        self._waits = self._is_spare = False
        try:
            found = plan_nodes(self._templates, verdict.nodes, graph=graph, before=before, holding=verdict.holding)
        except PlanError as problem:
            if len(verdict.nodes) >= self._templates.fewest_nodes:
                raise
            self._waits = True
            if self._member.identity.local_rank == 0:
                logger.warning("node %d: waiting: %s", self._member.identity.node, problem)
            self._stop_requests.wait_for_nodes()
            return None
        self._times["planned"] = time.time()
        if self._member.identity.node not in found.nodes:
            self._let_go()
            self._held, self._is_spare = None, True
            self._stop_requests.is_training = True  # who trains stops after a step, and the run with them
            return None
        return found

    def _let_go(self) -> None:
        """Leave the last generation's groups, with the state in host memory."""
        if self._run is not None:
            if self._is_whole:
                self._held, self._is_whole = hold_state(self._run.session.state), False
            self._run.session.abandon()
        self._old_groups += forget_groups()

    def _form(self, verdict: Verdict, found: NodesPlan) -> None:
        """Meet the ranks of this generation, and build this rank's part of the plan with the state in it."""
        identity, gpus = self._member.identity, self._templates.gpus_per_node
        rank = found.nodes.index(identity.node) * gpus + identity.local_rank
        self._world = world = replace(self._world, rank=rank, size=len(found.nodes) * gpus)
        store = PrefixStore(f"groups/{verdict.generation}", self._member.open_store())
        world.connect(backend=self._prepared.config.training.distributed_backend, store=store)
        self._times["met"] = time.time()
        self._ending.meeting = world.meeting
        if self._run is None:
            self._run = build_run(self._prepared, world, found.plan, stop_requests=self._stop_requests)
            self._run.trainer.updates_alone = True
            self._run.trainer.check = self._member.connections.check
            self._member.place_in_step = self._run.trainer.place_in_step
            self._run.nodes_have_joined = lambda: self._member.nodes_have_joined
            self._run.note_reported = lambda step: self._member.ledger.set_flag("reported", str(step))
        else:
            self._run.world = world
            self._run.session.enter(found.plan)
            self._run.trainer.meet()
        self._times["formed"] = time.time()
        if verdict.done_steps is None:
            self._start(self._run)
        else:
            self._take_state(self._run, verdict)
        dist.barrier()
        self._held, self._is_whole = None, True
        self._formed, self._pipelines = verdict.generation, found.pipelines
        self._times["copied"] = time.time()
        drop(self._old_groups)
        self._old_groups = []

    def _take_state(self, run: Run, verdict: Verdict) -> None:
        """Take over weights, optimizer state and progress from the ranks that have them."""
        try:
            take_over(self._held or [], run.session.state)
        except CheckpointError as problem:
            self._go_back(run, problem)
            return
        mine = None
        if self._held is not None and self._progress is not None:
            scheduler = run.trainer.scheduler.state_dict()
            mine = self._progress, run.done_steps, scheduler, run.described_data, run.measured
        progress, run.done_steps, scheduler, run.described_data, run.measured = next(filter(None, gather_objects(mine)))
        if mine is None:
            run.trainer.scheduler.num_steps = 0  # loading adds to it
            run.trainer.scheduler.load_state_dict(scheduler)
            run.trainer.outcome = Outcome(**verdict.outcome) if verdict.outcome else None
        evaluation = (None, None) if self._progress is None else self._progress.evaluation
        self._progress = replace(progress, step=verdict.done_steps, evaluation=evaluation)
        run.trainer.meet()
        if run.config.checkpoint.save is not None:
            claim_folder(run, attempt=verdict.generation)

    def _go_back(self, run: Run, problem: CheckpointError) -> None:
        """Restart from the newest checkpoint, as a part of the state is lost; all ranks call this together."""
        told = gather_objects(self._progress.saved_step if self._progress else None)
        self._held = self._progress = None
        if self._world.rank == 0:
            logger.warning("more nodes are lost than have copies of each other: going back to a checkpoint (%s)", problem)
        self._close_reporter()
        self._start(run, has_saved=any(each is not None for each in told))

    def _start(self, run: Run, *, has_saved: bool = False) -> None:
        """Start like any run, from new weights or from a checkpoint; has_saved: from one of this run's own."""
        run.trainer.scheduler.num_steps, run.measured = 0, None  # loading adds to the first
        resume(run, has_saved=has_saved)
        run.trainer.outcome = None
        self._progress = Progress(run.done_steps, run.done_steps)

    def _train(self, verdict: Verdict, found: NodesPlan) -> None:
        run, progress = self._run, self._progress
        assert run is not None and progress is not None
        reporter = self._open_reporter(run, progress)
        if verdict.done_steps is None:
            reporter.begin(f"{describe_run(run)}\n{self._describe_tolerance(run, found)}")
        else:
            self._tell(reporter, verdict, found, progress.step)
        train_on(run, reporter, progress)
        dist.barrier()
        ledger, counter, size = self._member.ledger, f"done/{verdict.generation}", run.world.size
        if ledger.count(counter) < size:  # so that no rank sees a broken connection
            wait_until(lambda: ledger.count(counter, by=0) >= size, seconds=_END_SECONDS)
        self._close()
        reporter.say(describe_end(run, progress))

    def _open_reporter(self, run: Run, progress: Progress) -> Reporter:
        """Report on rank 0; a new rank 0 continues the log where the last one ended."""
        is_first = run.world.rank == 0
        if self._reporter is not None and isinstance(self._reporter, Reporter) is is_first:
            return self._reporter
        self._close_reporter()
        if is_first:
            told = self._member.ledger.flag("reported")
            progress.reported_step = min(progress.step, int(told)) if told else progress.reported_step
        self._reporter = build_reporter(run, done_steps=progress.reported_step)
        return self._reporter

    def _tell(self, reporter: Reporter, verdict: Verdict, found: NodesPlan, step: int) -> None:
        """Report the duration of the recovery; the figures of each node are also appended to the keeper's list."""
        times = {**verdict.seconds, **self._times}
        left, agreed, planned, met, formed, copied = (times[name] for name in _PHASE_ENDS)
        reporter.say(
            f"goes on after step {step} with {len(found.nodes)} nodes ({found.how}): agreed in {agreed - left:.2f} s, planned in "
            f"{planned - agreed:.2f}, met in {met - planned:.2f}, formed groups and stages in {formed - met:.2f}, copied in "
            f"{copied - formed:.2f}"
        )
        if self._member.identity.local_rank == 0:
            place = {"node": self._member.identity.node, "rank": self._world.rank}
            self._member.ledger.tell("recovered", generation=verdict.generation, step=step, **place, **times)

    def _describe_tolerance(self, run: Run, found: NodesPlan) -> str:
        """Describe how many nodes may be lost, and the cost of that."""
        templates, count = self._templates, len(found.pipelines)
        optimizers = run.session.optimizers.values()
        kept = sum(each.numel() for optimizer in optimizers for each in optimizer.get_parameters())
        trained = (each for stage in run.session.stages.values() for each in stage.parameters() if each.requires_grad)
        whole = sum(each.numel() for each in trained)
        size = optimizer_bytes(getattr(torch, run.config.training.dtype).itemsize) / 2**20
        copies = min(count, templates.num_state_copies)
        how = f"{copies} copies of the optimizer state, each shared by {count // copies} or more of {count} replicas"
        if copies == count:
            how = f"{count} replica{'s each keep' if count > 1 else ' keeps'} all of the optimizer state"
        tolerated = templates.tolerance.fault_tolerance
        return (
            f"elastic: {tolerated} node{'s' * (tolerated != 1)} may be lost at once, down to {templates.fewest_nodes}; {how}: "
            f"{kept * size:.1f} MiB on rank 0, {whole * size / count:.1f} if all shared one"
        )

    def _close_reporter(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None

    def _close(self) -> None:
        self._close_reporter()
        if self._run is not None:
            release(self._run)
