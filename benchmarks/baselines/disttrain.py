"""DistTrain: every unit on its own ranks, sized by the adaptive resource allocation of DistTrain's Algorithm 1."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from multimodal.plan.planners.estimate.step_estimate import estimate_seconds
from multimodal.plan.planners.estimate.unit_options import infeasible, pareto_rows
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.allocation import (
    AllocationChoice,
    AllocationProblem,
    build_candidate,
    build_problem,
    rank_allocations,
)

BALANCE = "disttrain"
"""DistTrain reorders samples over replicas, and microbatches in a pipeline."""
TOLERANCE = 0.003
"""Steps that differ by less than this share count as equal: no formula is closer to a simulation."""
NUM_REFINED, LEAST_GAIN = 3, 0.003
"""Number of allocations whose encoders and generators are refined, and the share of the step that this must gain."""


def plan_disttrain(request: PlanningRequest) -> PlannedRun:
    """Plan as DistTrain does; generators included. Raises PlanError if nothing fits.

    The user chooses the LLM's number of virtual stages (`fixed_sizes`); the default is 1. The objective divides microbatches into
    fractions, and ignores the communication of replicas (DistTrain 4.2); with few microbatches per replica both matter. So the
    results of Alg. 1 for each parallelism of the LLM are judged by `estimate_seconds`, as long as the objective is below the best
    step; and the best of them with other sizes of encoders and generators (`_fill_sooner`). Of nearly equal ones, the least
    objective is taken.
    """
    problem = build_problem(request)
    if not (ranked := rank_allocations(problem, slack=1.0)):
        raise infeasible(request)
    shortest = ranked[0]

    def seconds(choice: AllocationChoice) -> float:
        return estimate_seconds(request, build_candidate(problem, choice))

    slack = seconds(shortest) / (1 + TOLERANCE) / shortest.seconds
    found = [shortest, *(rank_allocations(problem, slack=slack) if slack > 1 else ())]
    judged = [seconds(choice) for choice in found]
    for index in sorted(range(len(found)), key=judged.__getitem__)[:NUM_REFINED]:
        refined = _fill_sooner(problem, found[index], seconds)
        if seconds(refined) < (1 - LEAST_GAIN) * judged[index]:
            found[index], judged[index] = refined, seconds(refined)
    best = next(index for index, each in enumerate(judged) if each <= (1 + TOLERANCE) * min(judged))
    return build_candidate(problem, found[best]).to_run(request, seconds=judged[best], balance=BALANCE)


def _fill_sooner(
    problem: AllocationProblem, choice: AllocationChoice, seconds: Callable[[AllocationChoice], float]
) -> AllocationChoice:
    """Return the choice with other sizes for units that have more replicas than the LLM, if that shortens the step.

    Their microbatches are the fractional ones: the objective fills the pipeline with a part of a microbatch, and so prefers
    replicas to tensor parallelism.
    """
    llm, row = problem.llm, choice.llm_row
    for name, options in problem.others.items():
        own = choice.other_rows[name]
        if options.data[own] <= llm.data[row]:
            continue
        others = sum(int(problem.others[other].gpus[each]) for other, each in choice.other_rows.items() if other != name)
        # At least as much in flight downstream of an encoder as before; in a generator, at most as much.
        allowed = options.in_flight_downstream if name in problem.upstream else -options.data * options.pipeline
        num_left = problem.request.num_gpus - int(llm.gpus[row]) - others
        rows = np.flatnonzero((options.gpus <= num_left) & (allowed >= allowed[own]))
        chosen = options.take(rows)
        kept = rows[pareto_rows(chosen.gpus, chosen.stage_seconds / chosen.data, chosen.chain_seconds)]
        changed = (replace(choice, other_rows={**choice.other_rows, name: each}) for each in kept.tolist())
        choice = min((choice, *changed), key=seconds)
    return choice
