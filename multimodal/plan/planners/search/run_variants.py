"""Runs of one plan with other schedules, balancers, microbatch sizes or passes that suit it, by the facts in their rows."""

from collections.abc import Iterator
from dataclasses import replace

from multimodal.balance import BALANCERS, UNBALANCED, Placement, placements_of
from multimodal.plan.planners.allowed_sizes import micro_batch_sizes
from multimodal.plan.planners.estimate.unit_layout import fold_stages
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.passes import PASSES, Need

Form = tuple[str, str]
"""A schedule and a balancer."""
Placed = tuple[tuple[Placement, ...], bool]
"""The placements of a plan's units, and True if some stage holds several layer ranges."""


def placements(run: PlannedRun, request: PlanningRequest) -> tuple[Placement, ...]:
    """Return the placements of the units that have work."""
    return placements_of([unit for name, unit in run.plan.units.items() if name not in request.loads.idle_units])


def first_balances(placement: Placement, request: PlanningRequest) -> tuple[str, ...]:
    """List the balancers that are tried first on such plans; none if samples are alike."""
    if not request.loads.vary:
        return (UNBALANCED,)
    return tuple(name for name, row in BALANCERS.items() if placement in row.tried_first_on)


def with_first_balance(run: PlannedRun, request: PlanningRequest) -> PlannedRun:
    """Return the run with the balancer that is tried first on plans of its placement."""
    return replace(run, balance=next(iter(first_balances(placements(run, request)[0], request)), run.balance))


def other_balances(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with every other balancer that suits its plan; those that are tried first on some plan come first."""
    if not request.loads.vary:
        return
    for name, row in sorted(BALANCERS.items(), key=lambda entry: not entry[1].tried_first_on):
        is_whole = row.keeps_samples_whole or not run.has_virtual_stages
        if name != run.balance and is_whole and row.suits(placements(run, request)):
            yield replace(run, balance=name)


def other_schedules(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with every other schedule that suits its plan."""
    others = (formed(run, (name, run.balance), request) for name, _ in fitting_schedules(run, request) if name != run.schedule)
    yield from filter(None, others)


def fitting_schedules(run: PlannedRun, request: PlanningRequest) -> list[tuple[str, ScheduleRow]]:
    """List the schedules that are meant for a run's plan, those that keep least first."""
    has_several = run.has_virtual_stages
    rows = [entry for entry in BUILDERS.items() if entry[1].is_for(request.graph, has_virtual_stages=has_several)]
    return sorted(rows, key=lambda entry: (not entry[1].is_tried_first, entry[1].in_flight))


def formed(run: PlannedRun, form: Form, request: PlanningRequest) -> PlannedRun | None:
    """Return a run with a schedule, layers that run it, and a balancer; None if these do not suit the plan."""
    schedule, balance = form
    row, plan = BUILDERS[schedule], run.plan
    of_run = request.changed(sharding=run.sharding, tp_comm_overlap=run.tp_comm_overlap)
    if row.is_folded:
        plan = fold_stages(plan)
    has_shape = row.layout is None or row.layout.is_met(request.graph, plan)
    if not of_run.allows(schedule) or not has_shape or (row.needs_messages and plan.is_whole_on_every_rank):
        return None
    implementation = of_run.implementation(schedule)
    return replace(run, plan=plan, schedule=schedule, balance=balance, transformer_impl=implementation)


def overlapped(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with overlapped tensor parallel collectives, which need local layers, help large products and keep more."""
    if run.has_tensor_parallelism and request.transformer_impl != "transformer_engine" and not run.tp_comm_overlap:
        yield replace(run, transformer_impl="local", tp_comm_overlap=True)


def other_sizes(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with the next smaller and the next larger microbatch size."""
    sizes = micro_batch_sizes(request)
    for size in (run.micro_batch_size // 2, 2 * run.micro_batch_size):
        if size in sizes:
            yield replace(run, micro_batch_size=size)


def other_passes(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with one more pass, for each pass that its model and its plan's schedule need."""
    has_encoders = bool(request.graph.encoders)
    for name, row in PASSES.items():
        is_useful = has_encoders or row.need is not Need.ENCODERS
        is_open = not row.is_planned and not row.splits_backwards and name not in run.passes
        if is_open and is_useful and (row.works_with_sharded_weights or run.sharding == "optim"):
            yield replace(run, passes=(name, *run.passes))


def neighbours(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the runs of the same plan that differ in one flag: overlap, microbatch size, balancer, schedule, or one pass."""
    yield from overlapped(run, request)
    if run.tp_comm_overlap:
        yield replace(run, tp_comm_overlap=False)
    if request.micro_batch_size is None:
        size, most = run.micro_batch_size, max(micro_batch_sizes(request))
        near = sorted({size // 2, size - 2, size - 1, size + 1, size + 2, size * 3 // 2, 2 * size} - {size})
        yield from (replace(run, micro_batch_size=each) for each in near if 1 <= each <= most)
    yield from other_balances(run, request)
    yield from other_schedules(run, request)
    yield from other_passes(run, request)
    open_passes = [name for name in run.passes if not (PASSES[name].is_planned or PASSES[name].splits_backwards)]
    yield from (replace(run, passes=tuple(other for other in run.passes if other != name)) for name in open_passes)
