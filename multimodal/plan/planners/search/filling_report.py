"""Reports the share of encoder work that a planned schedule puts into bubbles: for the plan file, the tables and `--json`."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import SEED, prepare_step
from multimodal.plan.planners.search.simulated_part import choose_share, keep_replicas
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.measure_filling import measure_filling
from multimodal.values.sample_lengths import draw_length_batches


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
    notes = (*planned.run.notes, report.note, *_unfilled(planned.run, request))
    return planned._replace(run=replace(planned.run, notes=notes)), report


def _unfilled(run: PlannedRun, request: PlanningRequest) -> Iterator[str]:
    """Yield a note if the LLM's waits for tensor parallel collectives cannot be filled."""
    if run.plan.units[request.graph.backbone.name].tensor_parallel_size == 1:
        return
    if run.tp_comm_overlap:
        yield "waits for tensor parallel collectives are not filled: overlapped collectives do not tell of them"
        return
    if run.sharding == "optim_grads_params":
        yield "waits for tensor parallel collectives are not filled: replicas that share weights must gather them in one order"
        return
    others = [unit.name for unit in request.graph.encoders if run.plan.units[unit.name].context_parallel_size > 1]
    if others:
        names = ", ".join(others)
        yield f"waits for tensor parallel collectives are not filled by {names}: context parallel ranks exchange keys and values"


def report_filling(run: PlannedRun, request: PlanningRequest) -> FillingReport | None:
    """Order a whole step, and measure the filling on a share of its replicas (`choose_share`), which are alike."""
    if not BUILDERS[run.schedule].needs_costs:
        return None
    (batch,) = draw_length_batches(request.lengths, batch_size=request.global_batch_size, num_batches=1, seed=SEED)
    whole = prepare_step(run, request, run.plan, batch)
    started = time.process_time()
    whole.builder(whole.shape)
    scheduler_seconds = time.process_time() - started
    share = choose_share(run, request, max_actions=request.max_actions, kept_replicas=1)
    part = prepare_step(run, request, keep_replicas(run.plan, share) or run.plan, batch[::share])
    filling = measure_filling(part.builder, part.shape, part.costs, passes=part.passes)
    if filling is None:
        return None
    units, counts, partition = whole.shape.plan.units, whole.shape.counts, {}
    ranks = frozenset(units[request.graph.backbone.name].replicas[0].ranks)
    for unit in (unit.name for unit in request.graph.encoders):
        inside = [index for index, replica in enumerate(units[unit].replicas) if ranks.issuperset(replica.ranks)]
        partition[unit] = tuple(counts[unit].counts[inside].tolist())
    return FillingReport(filling.eff_coarse, filling.eff_fine, scheduler_seconds, partition)
