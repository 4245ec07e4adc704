import itertools

import pytest

from multimodal.plan.planners.baselines import plan_megatron
from multimodal.plan.planners.disttrain import BALANCE, build_candidate, build_problem, plan_disttrain
from multimodal.plan.planners.estimate.allocation_search import rank_allocations
from multimodal.plan.planners.estimate.unit_options import pareto_rows
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.plan_to_fit import plan_to_fit
from multimodal.plan.planners.search.prediction import predict_run
from tests.unit.plan.planners.planning_cases import GRAPHS, THREE, TWO, random_lengths, request, with_memory


def exhaustive_seconds(problem):
    """The best objective (DistTrain, Eq. 1 and 2) over every combination of rows, one at a time."""
    best, llm = float("inf"), problem.llm
    names = list(problem.others)
    for row in range(len(llm)):
        data, in_flight = int(llm.data[row]), int(llm.data[row] * llm.pipeline[row])
        for rows in itertools.product(*(range(len(problem.others[name])) for name in names)):
            chosen = [(name, problem.others[name], index) for name, index in zip(names, rows, strict=True)]
            if llm.gpus[row] + sum(options.gpus[index] for _, options, index in chosen) > problem.num_gpus:
                continue
            behind = max(
                (
                    options.data[index] * options.pipeline[index]
                    for name, options, index in chosen
                    if name not in problem.upstream
                ),
                default=0,
            )
            if behind > llm.in_flight_downstream[row]:
                continue
            if any(
                options.in_flight_downstream[index] < in_flight + behind
                for name, options, index in chosen
                if name in problem.upstream
            ):
                continue
            warmup = llm.chain_seconds[row] / problem.virtual_stages
            slowest = llm.stage_seconds[row]
            for _, options, index in chosen:
                warmup += data * options.chain_seconds[index] / options.data[index]
                slowest = max(slowest, data * options.stage_seconds[index] / options.data[index])
            best = min(best, warmup + (problem.num_microbatches / data - 1) * slowest)
    return best


@pytest.mark.parametrize("name", ["text-only", "two", "three"])
@pytest.mark.parametrize(("num_gpus", "memory_gb"), [(4, 16.0), (7, 3.0), (8, 1.5)])
def test_the_objective_is_that_of_exhaustive_search(name, num_gpus, memory_gb):
    asked = with_memory(request(GRAPHS[name], num_gpus=num_gpus, global_batch_size=6), memory_gb)
    problem = build_problem(asked)
    found = next((choice.seconds for choice in rank_allocations(problem, slack=1.0)), float("inf"))
    assert found == pytest.approx(exhaustive_seconds(problem), rel=1e-12)


def test_two_encoders_and_context_parallel_sizes_equal_exhaustive_search():
    spread = {"num_gpus": 8, "global_batch_size": 4, "most_context_parallel": 8, "least_share_tokens": 64}
    asked = [with_memory(request(GRAPHS[name], **spread), 1.5) for name in ("two", "three")]
    for each in (request(GRAPHS["two-encoders"], num_gpus=5, global_batch_size=4), *asked):
        problem = build_problem(each)
        assert (len(set(problem.llm.context.tolist())) > 1) == (each in asked)
        assert rank_allocations(problem, slack=1.0)[0].seconds == pytest.approx(exhaustive_seconds(problem), rel=1e-12)


def test_ranked_allocations_begin_with_the_best():
    problem = build_problem(request(THREE))
    ranked = rank_allocations(problem, slack=1.5)
    best = rank_allocations(problem, slack=1.0)[0].seconds
    assert ranked[0].seconds == best and len({choice.llm_row for choice in ranked}) == len(ranked) > 1
    assert [choice.seconds for choice in ranked] == sorted(choice.seconds for choice in ranked)
    assert ranked[-1].seconds <= 1.5 * best


def test_virtual_stages_are_dealt_in_turn():
    fixed = {"llm": FixedSizes(pipeline_parallel_size=2, virtual_stages=2)}
    run = plan_disttrain(request(TWO, fixed_sizes=fixed))
    assert run.schedule == "interleaved-1f1b"
    stages = run.plan.units["llm"].replicas[0].stages
    assert [stage.layer_ranges for stage in stages] == [((0, 3), (5, 7)), ((3, 5), (7, 10))]


@pytest.mark.parametrize("name", ["three", "two-encoders"])
@pytest.mark.parametrize("num_gpus", [16, 32])
def test_few_microbatches_per_replica_leave_no_pipeline_waiting(name, num_gpus):
    """As many samples as GPUs: with a replica for each one there is nothing to fill a pipeline with, and much to reduce."""
    graph = GRAPHS[name]
    asked = request(graph, num_gpus=num_gpus, global_batch_size=num_gpus, lengths=random_lengths(graph)[:1])
    found, rigid = (plan_to_fit(plan, asked).prediction for plan in (plan_disttrain, plan_megatron))
    assert found.iteration_seconds <= 1.01 * rigid.iteration_seconds
    problem = build_problem(asked)
    alone = build_candidate(asked, problem, rank_allocations(problem, slack=1.0)[0]).to_run(asked, seconds=0.0, balance=BALANCE)
    assert found.iteration_seconds < 0.9 * predict_run(alone, asked).iteration_seconds


def test_pareto_rows_keep_what_nothing_beats():
    assert sorted(pareto_rows([1, 1, 2, 3, 3], [5, 4, 3, 3, 1]).tolist()) == [1, 2, 4]
