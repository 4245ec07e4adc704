"""The part of a step that is simulated in its place: replicas, samples, and the approximate time of the simulation."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from multimodal.balance.placement import has_unequal_shares
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.plan import Plan, Replica, UnitPlan

KEPT_REPLICAS = 4
"""Fewest simulated replicas of every unit if lengths vary, since the heaviest decides."""
VARIED_FACTOR = 6
"""Factor on the largest step that is simulated whole if lengths vary, since the time of a part is then less reliable."""
FILLING = 3.0
"""Number of times that the larger of two simulated batches fills all pipelines; the smaller one fills them half as often."""
SECONDS_PER_SIMULATION, SECONDS_PER_SAMPLE, SECONDS_PER_COMPUTATION = 15e-3, 0.04e-3, 25e-6
"""Nominal seconds of assigning, building and simulating on one core of 2024, rounded from `benchmarks/planning.py`."""


class Fidelity(NamedTuple):
    """How much of a run is simulated."""

    name: str
    share: float
    """The largest simulation, as a share of `PlanningRequest.max_actions`; infinite: whole steps."""
    filling: float = FILLING
    """Fewest times that the larger of two parts of a step fills the pipelines."""
    kept_replicas: int = KEPT_REPLICAS
    """Fewest replicas of every unit if lengths vary."""
    is_final: bool = False
    """True if it covers all batches, as every plan is judged."""
    is_checked: bool = True
    """True if assignments and schedules are validated."""

    def max_actions(self, request: PlanningRequest) -> int | None:
        """Return the most computations of a step that is simulated as a whole; None: any number."""
        is_whole = self.share == math.inf or (self.is_final and request.simulates_whole_steps)
        return None if is_whole else int(request.max_actions * self.share)

    def num_batches(self, request: PlanningRequest) -> int:
        """Return the number of global batches; one if samples are alike."""
        return request.num_batches if self.is_final and request.loads.vary else 1


WHOLE = Fidelity("whole", math.inf)
"""One batch."""
QUICK = Fidelity("at a glance", 0.02, 1.0, kept_replicas=1, is_checked=False)
"""Distinguishes plans that differ by more than a tenth."""
RANKING = Fidelity("ranked", 0.1, 2.0, is_checked=False)
FINAL = Fidelity("judged", 1.0, is_final=True)


class StepPart(NamedTuple):
    """The part of a step that is simulated."""

    plan: Plan
    """The run's plan with the replicas that are kept."""
    share: int
    """Replicas, and samples, for each one that is kept."""
    sample_counts: tuple[int, ...]
    """Samples of the one batch that is simulated (all of those of the kept replicas), or of a larger and a smaller part of it."""


def choose_part(run: PlannedRun, request: PlanningRequest, fidelity: Fidelity) -> StepPart:
    """Choose the part of a step to simulate.

    If a step has more computations than `Fidelity.max_actions` (if lengths vary: `VARIED_FACTOR` times as many), it is a part of
    the step. First, as many replicas (and the same share of each batch) are left out as the common divisor of the data
    parallel sizes allows: replicas of one unit are alike and meet only in collectives, so only the spread between replicas and
    their contention for network cards is lost. If that is not enough, there are two smaller batches.
    """
    max_actions = fidelity.max_actions(request)
    if max_actions is not None and request.loads.vary:
        max_actions *= VARIED_FACTOR
    share = choose_share(run, request, max_actions=max_actions, kept_replicas=fidelity.kept_replicas)
    plan = kept_plan(run.plan, request, share) or run.plan
    units, whole = _busy_units(plan, request), -(-request.global_batch_size // share)
    if max_actions is None or _num_actions(run, units, whole) <= max_actions:
        return StepPart(plan, share, (whole,))
    # Both parts give every replica of every unit equally many microbatches: whole turns, after which all have their shares.
    shares = [unit.microbatch_shares or (1,) for unit in units]
    turns = (unit.data_parallel_size * sum(each) // len(each) for unit, each in zip(units, shares, strict=True))
    even = 2 * run.micro_batch_size * math.lcm(*turns)
    in_flight = sum(len(unit.replicas[0].stages) * unit.data_parallel_size for unit in units)
    filling = math.ceil(fidelity.filling * run.micro_batch_size * in_flight)
    wanted = max(filling, int(whole * max_actions / _num_actions(run, units, whole)))
    count = -(-wanted // even) * even
    return StepPart(plan, share, (count, count // 2) if count < 0.8 * whole else (whole,))


def nominal_seconds(run: PlannedRun, request: PlanningRequest, fidelity: Fidelity) -> float:
    """Return the nominal seconds of `predict_run`, from sizes alone: the same on every machine, fast or slow, busy or not."""
    part = choose_part(run, request, fidelity)
    units = _busy_units(part.plan, request)
    seconds = sum(
        SECONDS_PER_SIMULATION + SECONDS_PER_SAMPLE * count + SECONDS_PER_COMPUTATION * _num_actions(run, units, count)
        for count in part.sample_counts
    )
    return fidelity.num_batches(request) * seconds


def _busy_units(plan: Plan, request: PlanningRequest) -> list[UnitPlan]:
    """Return the units with work; units without work in the data share their ranks."""
    return [unit for name, unit in plan.units.items() if name not in request.loads.idle_units]


def _num_actions(run: PlannedRun, units: Sequence[UnitPlan], num_samples: int) -> int:
    num_stages = sum(unit.num_virtual_stages for unit in units)
    return 2 * num_stages * -(-num_samples // run.micro_batch_size)


def choose_share(run: PlannedRun, request: PlanningRequest, *, max_actions: int | None, kept_replicas: int) -> int:
    """Return the least common divisor of the busy units' data parallel sizes (of groups that share experts) that is enough."""
    sizes = [unit.data_parallel_size // unit.expert_parallel_size for unit in _busy_units(run.plan, request)]
    common = math.gcd(request.global_batch_size, *sizes)
    num_actions = _num_actions(run, _busy_units(run.plan, request), request.global_batch_size)
    if max_actions is None or common == 1 or num_actions <= max_actions or run.sharding != "optim":
        return 1  # replicas that share weights meet in every layer
    if has_unequal_shares(request.graph, run.plan):
        return 1  # no replica represents another one
    most = max(1, min(sizes) // kept_replicas) if request.loads.vary else common
    divisors = (share for share in range(1, min(common, most) + 1) if common % share == 0)
    shares = [share for share in divisors if kept_plan(run.plan, request, share) is not None]
    return next((share for share in shares if num_actions / share <= max_actions), shares[-1])


def kept_plan(plan: Plan, request: PlanningRequest, share: int) -> Plan | None:
    """Keep one of `share` replicas of busy units; others move onto the LLM's ranks. None if they overlap, or find no room."""
    alone = [name for name in request.loads.idle_units if plan.units[name].data_parallel_size == 1]
    if share == 1 or not alone:
        return keep_replicas(plan, share)
    kept = keep_replicas(Plan({name: unit for name, unit in plan.units.items() if name not in alone}), share)
    if kept is None:
        return None
    units = dict(kept.units)
    places = [stage.ranks for replica in units[request.graph.backbone.name].replicas for stage in replica.stages]
    for name in alone:
        unit = plan.units[name]
        stages = unit.replicas[0].stages
        if len(places) < len(stages) or len(places[0]) < len(stages[0].ranks):
            return None
        moved = (replace(stage, ranks=ranks[: len(stage.ranks)]) for stage, ranks in zip(stages, places, strict=False))
        units[name] = replace(unit, replicas=(Replica(tuple(moved)),))
    return Plan({name: units[name] for name in plan.units})


def keep_replicas(plan: Plan, share: int) -> Plan | None:
    """Keep one of every `share` replicas of each unit, on their ranks.

    The first replicas of one unit are kept, and those of units that share ranks with it on kept ranks. None if that is not one of
    every `share`, whichever unit is first, because replicas of different units overlap in part.
    """
    if share == 1:
        return plan
    by_size = sorted(plan.units, key=lambda name: plan.units[name].data_parallel_size)
    attempts = (_keep(plan, share, (first, *(name for name in by_size if name != first))) for first in by_size)
    return next((kept for kept in attempts if kept is not None), None)


def _keep(plan: Plan, share: int, order: Sequence[str]) -> Plan | None:
    units: dict[str, UnitPlan] = {}
    kept_ranks: set[int] = set()
    dropped_ranks: set[int] = set()
    for name in order:
        unit = plan.units[name]
        count = unit.data_parallel_size // share
        is_shared = not (kept_ranks | dropped_ranks).isdisjoint(unit.ranks)
        kept = [each for each in unit.replicas if kept_ranks.issuperset(each.ranks)] if is_shared else unit.replicas[:count]
        units[name] = replace(unit, replicas=tuple(kept))
        left_out = set(unit.ranks).difference(units[name].ranks)
        if len(kept) != count or not kept_ranks.isdisjoint(left_out):
            return None
        kept_ranks.update(units[name].ranks)
        dropped_ranks.update(left_out)
    return Plan({name: units[name] for name in plan.units})
