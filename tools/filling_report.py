"""Measures and reports the share of encoder work that a schedule puts into bubbles: for plan files, tables and `--json`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from multimodal.cost.step_costs import PieceCosts, StepCosts
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import prepare_step
from multimodal.plan.planners.search.simulated_part import choose_share, keep_replicas
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS, Builder
from multimodal.schedule.list_schedule import place_reductions
from multimodal.schedule.passes import Pass
from multimodal.schedule.simulate import Simulation, simulate_schedule
from multimodal.values.arrays.rows import Bools, Integers, row_starts
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import COMPUTE, FORWARD, REDUCTION, StepWork, step_work


class Filling(NamedTuple):
    """Shares of the encoders' time that lie in bubbles: their seconds in all lanes, less the time that they add to the step."""

    eff_coarse: float
    """With all encoder forwards before the LLM's work, and all encoder backwards after it (`order_coarsely`)."""
    eff_fine: float
    """In the order of the schedule."""
    alone: Simulation
    """The step if encoders took no time."""
    filled: Simulation
    """The step in the order of the schedule."""


def measure_filling(builder: Builder, shape: StepShape, costs: StepCosts, *, passes: Sequence[Pass] = ()) -> Filling | None:
    """Simulate a step without encoders, with them around the LLM's work, and in order; None if they compute nothing."""
    ordered = builder(shape)
    coarse = order_coarsely(ordered)
    encoders = frozenset(unit.name for unit in shape.graph.encoders)

    def simulate(schedule: Schedule, costs: StepCosts) -> Simulation:
        return simulate_schedule(build_schedule(lambda _: schedule, shape, passes=passes, is_checked=False), costs)

    alone = simulate(coarse, _WithoutEncoders(costs, encoders))
    filled = simulate(ordered, costs)
    work, pieces = step_work(filled.compiled.schedule.shape), filled.compiled.computed.pieces
    of_pieces = filled.compiled.computed_seconds * np.diff(work.lanes_of(pieces)[0])
    encoding = float(of_pieces[of_units(work, pieces, encoders)].sum())
    if not encoding:
        return None

    def share(found: Simulation) -> float:
        added = found.num_lanes * (found.iteration_seconds - alone.iteration_seconds)
        return min(1.0, max(0.0, 1 - added / encoding))

    return Filling(share(simulate(coarse, costs)), share(filled), alone, filled)


def order_coarsely(schedule: Schedule) -> Schedule:
    """Return a schedule of the compute dialect with the encoders' forwards first in every lane, and their backwards last.

    They go stage by stage, backwards from the last stage on, and all microbatches through each: their stages hardly wait for each
    other, nor for weights that are still being gathered.
    """
    work, pieces = schedule.work, schedule.pieces
    kept = np.flatnonzero(work.kinds[pieces] != REDUCTION)
    pieces, lanes = pieces[kept], schedule.lane_of_slot[kept]
    encodes = of_units(work, pieces, frozenset(unit.name for unit in schedule.shape.graph.encoders))
    phases = np.where(encodes, np.where(work.kinds[pieces] == FORWARD, -1, 1), 0)
    names = schedule.shape.graph.unit_names
    depths = np.array([(names.index(unit), stage) for unit, _, stage in work.stages], np.int64)[work.computed_stages[pieces]]
    units, stages = -phases * depths.T
    order = np.lexsort((np.where(encodes, work.microbatches[pieces], 0), stages, units, phases, lanes))
    starts = row_starts(np.bincount(lanes, minlength=schedule.num_lanes))
    return place_reductions(Schedule.in_line(schedule.shape, starts, pieces[order]))


def of_units(work: StepWork, pieces: Integers, units: frozenset[str]) -> Bools:
    """Return which of these computations belong to the units."""
    return np.array([unit in units for unit, _, _ in work.stages], bool)[work.computed_stages[pieces]]


@dataclass(frozen=True)
class _WithoutEncoders:
    """The costs of a step whose encoders take no time."""

    costs: StepCosts
    encoders: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.costs, name)

    def of_pieces(self, work: StepWork, pieces: Integers) -> PieceCosts:
        """Costs of pieces of work."""
        found = self.costs.of_pieces(work, pieces)
        is_computed = pieces < work.num_computed
        is_free = np.zeros(len(pieces), bool)
        computed = pieces[is_computed]
        is_free[is_computed] = of_units(work, computed, self.encoders) & (work.resources[computed] == COMPUTE)
        for seconds in (found.seconds, found.tensor_parallel_seconds):
            seconds[is_free] = 0.0
        return found


@dataclass(frozen=True)
class FillingReport:
    """One step of a schedule that fills bubbles."""

    eff_coarse: float
    eff_fine: float
    """Both as defined in `Filling`."""
    scheduler_seconds: float
    """Seconds of processor time that ordering one whole step takes."""
    partition: Mapping[str, tuple[int, ...]]
    """Encoder -> microbatches of each of its pipelines on the ranks of the LLM's first replica."""

    @property
    def note(self) -> str:
        """One line for the user."""
        counts = "; ".join(f"{unit} {', '.join(map(str, each))}" for unit, each in self.partition.items())
        return (
            f"of the encoders' time, {self.eff_fine:.1%} is in bubbles ({self.eff_coarse:.1%} with all of it before and after "
            f"the LLM's); a step is ordered in {self.scheduler_seconds:.2g} s; microbatches of the encoder pipelines over one of "
            f"the LLM's: {counts}"
        )


def with_filling(planned: PredictedRun, request: PlanningRequest) -> tuple[PredictedRun, FillingReport | None]:
    """Return a run with a note on the bubbles that it fills, and the report; None if its schedule does not use durations."""
    report = report_filling(planned.run, request)
    if report is None:
        return planned, None
    run, reason = planned.run, ""
    others = [unit.name for unit in request.graph.encoders if run.plan.units[unit.name].context_parallel_size > 1]
    if run.tp_comm_overlap:
        reason = ": overlapped collectives do not tell of them"
    elif run.sharding == "optim_grads_params":
        reason = ": replicas that share weights must gather them in one order"
    elif others:
        reason = f" by {', '.join(others)}: context parallel ranks exchange keys and values"
    notes = [*run.notes, report.note]
    if reason and run.plan.units[request.graph.backbone.name].tensor_parallel_size > 1:
        notes.append(f"waits for tensor parallel collectives are not filled{reason}")
    return planned._replace(run=replace(run, notes=tuple(notes))), report


def report_filling(run: PlannedRun, request: PlanningRequest) -> FillingReport | None:
    """Order a whole step, and measure the filling on a share of its replicas (`choose_share`), which are alike."""
    if not BUILDERS[run.schedule].needs_costs:
        return None
    size = request.global_batch_size
    whole = prepare_step(run, request, run.plan, request.loads.drawn_batches(size, 1, 1)[0])
    started = time.process_time()
    whole.builder(whole.shape)
    scheduler_seconds = time.process_time() - started
    share = choose_share(run, request, max_actions=request.max_actions, kept_replicas=1)
    lengths = request.loads.drawn_batches(size, 1, share)[0]
    part = prepare_step(run, request, keep_replicas(run.plan, share) or run.plan, lengths)
    filling = measure_filling(part.builder, part.shape, part.costs, passes=part.passes)
    if filling is None:
        return None
    units, counts, partition = whole.shape.plan.units, whole.shape.counts, {}
    ranks = frozenset(units[request.graph.backbone.name].replicas[0].ranks)
    for unit in (unit.name for unit in request.graph.encoders):
        inside = [index for index, replica in enumerate(units[unit].replicas) if ranks.issuperset(replica.ranks)]
        partition[unit] = tuple(counts[unit].counts[inside].tolist())
    return FillingReport(filling.eff_coarse, filling.eff_fine, scheduler_seconds, partition)
