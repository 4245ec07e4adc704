"""The adaptive resource allocation of DistTrain's Algorithm 1: sizes of units on ranks of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np

from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_options import UnitOptions, list_options, pareto_rows
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.arrays.rows import Bools, Floats, Integers

_LARGEST_PRODUCT = 300_000
"""Pairs of choices up to which examining all is cheaper than thinning them out."""


@dataclass(frozen=True)
class AllocationProblem:
    """The input of Alg. 1."""

    request: PlanningRequest
    llm: UnitOptions
    others: Mapping[str, UnitOptions]
    virtual_stages: int = 1
    """Layer ranges per stage of the LLM, by which its warm-up is divided (DistTrain 4.3)."""

    @property
    def upstream(self) -> frozenset[str]:
        """The encoders among `others`, which keep activations for as many microbatches as the LLM has in flight."""
        return frozenset(unit.name for unit in self.request.graph.encoders)


@dataclass(frozen=True)
class AllocationChoice:
    """A solution: one row of options for every unit."""

    seconds: float
    llm_row: int
    other_rows: Mapping[str, int]


@dataclass(frozen=True)
class _Front:
    """Choices for units other than the LLM; seconds per microbatch of the LLM, divided by the LLM's dp."""

    gpus: Integers
    stage_seconds: Floats
    chain_seconds: Floats
    in_flight: Floats
    """Microbatches that encoders' memory allows downstream units to have in flight; infinite for generators."""
    behind: Floats
    """Microbatches that generators keep in flight over all their replicas, in addition to the LLM's own."""
    rows: Integers
    """[num_choices, num_units] rows of the units' options."""

    @cached_property
    def least(self) -> tuple[float, float, float]:
        """The fewest GPUs, least GPU-seconds of work and shortest `chain_seconds` of any choice."""
        return float(self.gpus.min()), float((self.gpus * self.stage_seconds).min()), float(self.chain_seconds.min())

    def take(self, rows: Integers | Bools) -> "_Front":
        """Return some of the choices."""
        return _Front(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def unbeaten(self) -> "_Front":
        """Return the choices that no other one beats."""
        return self.take(pareto_rows(self.gpus, self.stage_seconds, self.chain_seconds, -self.in_flight, self.behind))


def objective_seconds(
    problem: AllocationProblem, *, llm: tuple[float, float, float], stage_seconds: Floats | float, chain_seconds: Floats | float
) -> Floats:
    """T_warmup + T_steady (DistTrain, Eq. 1 and 2); llm: its dp, slowest stage's and all stages' seconds per microbatch.

    stage_seconds, chain_seconds: of the other units, already divided by their dp, since a unit with fewer replicas than the LLM
    processes the microbatches of several of them at once.
    """
    data, slowest, chain = llm
    count = problem.request.num_microbatches / data
    steady = (count - 1) * np.maximum(slowest, data * stage_seconds)
    return np.asarray(chain / problem.virtual_stages + data * chain_seconds + steady)


def rank_allocations(problem: AllocationProblem, *, slack: float) -> list[AllocationChoice]:
    """Return, per parallelism of the LLM, the best choice for the others; those within `slack` times the best, best first.

    The objective of the first one equals that of exhaustive search; none if nothing fits. For every (tp, cp, dp, pp) of the LLM,
    the relaxed problem (fractions of GPUs, the best tp and cp and the shortest warm-up of every other unit) is solved in closed
    form (`least_bottleneck`) and bounds the objective from below. Parallelisms are rounded in the order of that bound until it
    exceeds the best objective found. Rounding is exact: the parallelism is combined with every choice for the other units that no
    other choice beats in GPUs, seconds and memory. O(parallelisms + examined x choices).
    """
    if not all(map(len, (problem.llm, *problem.others.values()))):
        return []
    fronts = _fronts(problem)
    bounds = sorted((_row_bound(problem, fronts, row), row) for row in range(len(problem.llm)))
    choices: list[AllocationChoice] = []
    best = float("inf")
    for bound, row in bounds:
        if bound > slack * best:
            break
        choice = _round(problem, fronts, row)
        if choice is not None:
            choices.append(choice)
            best = min(best, choice.seconds)
    return sorted((choice for choice in choices if choice.seconds <= slack * best), key=lambda choice: choice.seconds)


def _fronts(problem: AllocationProblem) -> list[_Front]:
    """Return the unbeaten choices of each unit other than the LLM."""
    fronts = []
    for name, options in problem.others.items():
        count, is_encoder = len(options), name in problem.upstream
        in_flight = options.in_flight_downstream if is_encoder else np.full(count, np.inf)
        behind = np.zeros(count) if is_encoder else (options.data * options.pipeline).astype(np.float64)
        seconds = options.stage_seconds / options.data, options.chain_seconds / options.data
        fronts.append(_Front(options.gpus, *seconds, in_flight, behind, np.arange(count)[:, None]).unbeaten())
    return fronts


def _row_bound(problem: AllocationProblem, fronts: Sequence[_Front], row: int) -> float:
    """Bound the objective with one row of the LLM: the others share the GPUs that it leaves, in fractions."""
    llm = problem.llm
    data, slowest = float(llm.data[row]), float(llm.stage_seconds[row])
    gpus, works, chains = zip(*(front.least for front in fronts), strict=True) if fronts else ((), (), ())
    num_left = problem.request.num_gpus - float(llm.gpus[row])
    if sum(gpus) > num_left:
        return float("inf")
    bottleneck = max(slowest, least_bottleneck([data * work for work in works], num_gpus=num_left, minimums=gpus))
    of_llm = data, bottleneck, float(llm.chain_seconds[row])
    return float(objective_seconds(problem, llm=of_llm, stage_seconds=0.0, chain_seconds=sum(chains)))


def _round(problem: AllocationProblem, fronts: Sequence[_Front], row: int) -> AllocationChoice | None:
    """Return the best choice for the other units with one row of the LLM; None if none fits."""
    llm = problem.llm
    num_left = problem.request.num_gpus - int(llm.gpus[row])
    merged = _Front(
        np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1), np.full(1, np.inf), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    )
    for front in fronts:
        if len(merged.gpus) * len(front.gpus) > _LARGEST_PRODUCT:
            merged = merged.unbeaten()
        merged = _merge(merged, front, num_gpus=num_left)
    in_flight = float(llm.data[row] * llm.pipeline[row])
    merged = merged.take((merged.behind <= llm.in_flight_downstream[row]) & (merged.in_flight >= in_flight + merged.behind))
    if not len(merged.gpus):
        return None
    of_llm = float(llm.data[row]), float(llm.stage_seconds[row]), float(llm.chain_seconds[row])
    seconds = objective_seconds(problem, llm=of_llm, stage_seconds=merged.stage_seconds, chain_seconds=merged.chain_seconds)
    index = int(np.lexsort((merged.gpus, seconds))[0])
    rows = dict(zip(problem.others, merged.rows[index].tolist(), strict=True))
    return AllocationChoice(float(seconds[index]), row, rows)


def _merge(front: _Front, other: _Front, *, num_gpus: int) -> _Front:
    """Return all pairs of choices that leave the LLM its GPUs."""
    left, right = np.nonzero(front.gpus[:, None] + other.gpus[None, :] <= num_gpus)
    return _Front(
        front.gpus[left] + other.gpus[right],
        np.maximum(front.stage_seconds[left], other.stage_seconds[right]),
        front.chain_seconds[left] + other.chain_seconds[right],
        np.minimum(front.in_flight[left], other.in_flight[right]),
        np.maximum(front.behind[left], other.behind[right]),
        np.concatenate([front.rows[left], other.rows[right]], axis=1),
    )


def least_bottleneck(work: Sequence[float], *, num_gpus: float, minimums: Sequence[float]) -> float:
    """Return the least max_i(work_i / x_i) with sum(x) <= num_gpus and minimum_i <= x_i (DistTrain, Eq. 2 and 4.3).

    At the optimum t, every unit has x_i = max(minimum_i, work_i / t): units above their minimum are equally slow, so t = (their
    work) / (the GPUs that the others' minimums leave). As t falls from infinity, units rise above their minimum in the order of
    work_i / minimum_i, which gives one candidate t per number of risen units. Exact; O(units log units). work: in GPU-seconds,
    not negative. minimums: positive, at most `num_gpus` together.
    """
    order = sorted(range(len(work)), key=lambda unit: -work[unit] / minimums[unit])
    risen, left = 0.0, float(num_gpus) - sum(minimums)
    for unit, following in zip_longest(order, order[1:]):
        risen += work[unit]
        left += minimums[unit]
        if following is None or risen / left >= work[following] / minimums[following]:
            break
    return risen / left if order else 0.0


def build_candidate(problem: AllocationProblem, choice: AllocationChoice) -> Candidate:
    """Turn a solution into layouts with layers cut evenly."""
    graph = problem.request.graph
    layouts = {name: each.layout(choice.other_rows[name], graph.unit(name)) for name, each in problem.others.items()}
    layouts[graph.backbone.name] = problem.llm.layout(choice.llm_row, graph.backbone, virtual_stages=problem.virtual_stages)
    return Candidate({name: layouts[name] for name in graph.unit_names})


def build_problem(request: PlanningRequest, *, virtual_stages: int | None = None, leaves_ranks: bool = True) -> AllocationProblem:
    """List the parallelisms for Alg. 1; virtual_stages: unless fixed; leaves_ranks: True if every other unit needs own ranks."""
    backbone = request.graph.backbone.name
    virtual_stages = request.fixed(backbone).virtual_pipeline_size or virtual_stages or 1
    names = request.graph.unit_names
    max_gpus = request.num_gpus - (len(names) - 1 if leaves_ranks else 0)
    options = {name: list_options(request, name, max_gpus=max_gpus) for name in names}
    llm = options.pop(backbone)
    most_stages = request.graph.backbone.num_inner_layers // virtual_stages
    can_interleave = (llm.pipeline <= most_stages) & ((llm.pipeline > 1) | (virtual_stages == 1))
    return AllocationProblem(request, llm.take(can_interleave), options, virtual_stages)
