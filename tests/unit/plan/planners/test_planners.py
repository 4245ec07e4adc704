"""The step that the baseline is predicted by: LLM stages that all run the encoders."""

import itertools
import time
from dataclasses import replace
from itertools import count, product
from typing import Any

import pytest

from benchmarks.baselines import COMPARED, WITHOUT_FED_ENCODERS
from benchmarks.baselines.disttrain import BALANCE, plan_disttrain
from benchmarks.baselines.encoders_replicated import repeat_encoders
from multimodal.plan.planners import TEMPLATE_PLANNERS
from multimodal.plan.planners.estimate.unit_options import list_options
from multimodal.plan.planners.megatron import plan_megatron
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search import trials
from multimodal.plan.planners.search.allocation import build_candidate, build_problem, rank_allocations
from multimodal.plan.planners.search.plan_to_fit import plan_to_fit
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import fed_encoders
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Experts
from multimodal.values.schedule import Schedule
from multimodal.values.validate import validate_plan
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.plan.planners.planning_cases import CLUSTER, GRAPHS, THREE, TWO, frozen, random_lengths, request, with_memory
from tests.unit.plan.test_plans_of_sizes import placement
from tests.unit.schedule.built_schedules import GivenCosts
from tests.unit.schedule.schedule_cases import build_graph, deal, placed_case


def is_deep(name, graph, context):
    return name != "disttrain" and (graph not in ("three", "fed") or context is not None or name == "braid")


@pytest.mark.deep(when=is_deep)
@pytest.mark.parametrize("context", [None, 2])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", COMPARED)
def test_every_plan_validates_fits_and_is_simulated(name, graph, context):
    """context: the LLM's context parallel size, if it is fixed."""
    small = (
        {"num_gpus": 4, "global_batch_size": 8, "time_budget_seconds": 0.1} if name == "braid" else {}
    )  # a search takes longest
    asked = request(GRAPHS[graph], **small)
    if context:
        asked = replace(asked, num_gpus=16, fixed_sizes={"llm": FixedSizes(context_parallel_size=context)})
    if fed_encoders(asked.graph) and name in WITHOUT_FED_ENCODERS:
        with pytest.raises(PlanError, match=f"'{name}': it is for models whose encoders all feed the LLM, but joint takes"):
            COMPARED[name](asked)
        return
    run, prediction = plan_to_fit(COMPARED[name], asked)
    validate_plan(run.plan, graph=asked.graph, world_size=run.num_gpus)
    assert context is None or run.plan.units["llm"].context_parallel_size == context
    assert run.planner == name and run.num_gpus <= asked.num_gpus
    assert 0 < prediction.ideal_seconds <= prediction.iteration_seconds * (1 + 1e-9)
    assert prediction.peak_memory_bytes <= asked.memory_bytes
    assert run.objective_seconds > 0
    for unit in run.plan.units.values():
        for stage in (stage for replica in unit.replicas for stage in replica.stages):
            assert len(stage.ranks) == unit.context_parallel_size * unit.tensor_parallel_size
            assert all(map(CLUSTER.is_one_node, unit.tensor_parallel_groups(stage))), "tensor parallelism stays within a node"


@pytest.mark.deep(when=lambda graph: graph == "two")
@pytest.mark.parametrize("graph", ["two", "text-only"])
def test_braid_finds_the_same_plan_however_slow_the_machine_is(graph, monkeypatch):
    """An hour passes whenever the planner looks at a clock."""
    asked = request(GRAPHS[graph], num_gpus=2, global_batch_size=4, time_budget_seconds=0.1)
    first = COMPARED["braid"](asked)
    seconds = count(step=3600.0)
    for clock in ("perf_counter", "process_time", "thread_time", "monotonic", "time"):
        monkeypatch.setattr(time, clock, lambda: next(seconds))
    again = COMPARED["braid"](asked)
    assert again.planning_seconds >= 3600.0
    assert replace(first, planning_seconds=0.0) == replace(again, planning_seconds=0.0)


def test_an_interrupted_search_gives_the_best_plan_so_far(monkeypatch):
    said = []
    asked = request(GRAPHS["two"], time_budget_seconds=2.0, on_progress=said.append)
    calls = iter(range(100_000))

    def until_interrupted(*arguments, **options):
        if next(calls) == 20:
            raise KeyboardInterrupt
        return predict_run(*arguments, **options)

    monkeypatch.setattr(trials, "predict_run", until_interrupted)
    run = COMPARED["braid"](asked)
    assert "interrupted: the best so far" in run.notes[0]
    validate_plan(run.plan, graph=asked.graph, world_size=run.num_gpus)
    assert said and all("best so far" in line for line in said)


def test_frozen_aware_partition_gives_a_frozen_encoder_fewer_stages():
    """Cornstarch, figure 7: without a backward, an encoder's layers are cheap."""
    graph = frozen(TWO, "vision", "llm")
    fixed = {"llm": FixedSizes(tensor_parallel_size=1, data_parallel_size=1)}
    aware, unaware = (
        COMPARED[name](request(graph, fixed_sizes=fixed)).plan.units for name in ("cornstarch", "cornstarch-unaware")
    )
    aware_ratio, unaware_ratio = (len(plan["vision"].ranks) / len(plan["llm"].ranks) for plan in (aware, unaware))
    assert aware_ratio < unaware_ratio


def plan(document: dict[str, Any]) -> str | None:
    """Say how a planner places a model's units and what they run; experts: of the LLM; `fault_tolerance` is one of templates."""
    given = {name: value for name, value in document.items() if name not in ("planner", "fault_tolerance", "experts", "graph")}
    given["fixed_sizes"] = {unit: FixedSizes(**sizes) for unit, sizes in given.get("fixed_sizes", {}).items()}
    graph = GRAPHS[document.get("graph", "text-only" if "experts" in document else "two")]
    if "experts" in document:
        mixed = replace(graph.backbone, transformer=replace(graph.backbone.transformer, experts=Experts(document["experts"])))
        graph = replace(graph, units=tuple(mixed if unit is graph.backbone else unit for unit in graph.units))
    asked = request(graph, **given)
    if document.get("fault_tolerance") is not None:
        TEMPLATE_PLANNERS[document["planner"]](asked, fault_tolerance=document["fault_tolerance"])
        return None
    run = COMPARED[document["planner"]](asked)
    context, experts = (
        {unit: getattr(each, name) for unit, each in run.plan.units.items() if getattr(each, name) > 1}
        for name in ("context_parallel_size", "expert_parallel_size")
    )
    told = [run.schedule, *run.passes, run.sharding, f"cp {context}" * bool(context), f"experts {experts}" * bool(experts)]
    return f"{' '.join(filter(None, told))}; {placement(run.plan)}"


REQUESTS: Kinds = {
    "request": ({"planner": "megatron"}, plan),
    "request for templates": ({"planner": "oobleck", "num_gpus": 8, "fault_tolerance": 1}, plan),
    "request for Optimus": (
        {"planner": "optimus", "fixed_sizes": {"llm": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "vision": {}}},
        plan,
    ),
}
test_every_request_is_answered_as_written = golden_test("requests.txt", REQUESTS)


def test_alpa_finds_the_least_latency_of_all_meshes():
    asked = request(TWO, num_gpus=6)
    options = [list_options(asked, name, max_gpus=5) for name in asked.graph.unit_names]

    def seconds(rows):
        chosen = list(zip(options, rows, strict=True))
        total = sum(each.chain_seconds[row] / each.data[row] for each, row in chosen)
        return total + (asked.num_microbatches - 1) * max(each.stage_seconds[row] / each.data[row] for each, row in chosen)

    pairs = product(*(range(len(each)) for each in options))
    least = min(seconds(rows) for rows in pairs if sum(each.gpus[row] for each, row in zip(options, rows, strict=True)) <= 6)
    assert COMPARED["alpa"](asked).objective_seconds == pytest.approx(least, rel=0.02)  # limits that are close are left out


NUM_SAMPLES = 6


def repeated_step(
    num_stages: int, *, dp: int = 1, encoders: tuple[str, ...] = ("vision",), **graph: list[str]
) -> tuple[Assignment, Schedule]:
    """Encoders beside every stage of `dp` LLM replicas; their microbatches are dealt over all copies."""
    groupings = dict.fromkeys(encoders, deal(NUM_SAMPLES, dp * num_stages)) | {"llm": deal(NUM_SAMPLES, dp)}
    sizes = dict.fromkeys(encoders, (dp * num_stages, 1, 1)) | {"llm": (dp, num_stages, 1)}
    shape, original = placed_case(build_graph(*encoders, **graph), sizes, groupings, colocated=True)
    assignment, build = repeat_encoders(shape, original)
    return assignment, build_schedule(build, assignment.shape(shape.graph, shape.plan))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_every_stage_computes_every_encoder_microbatch_that_its_replica_takes(num_stages: int, dp: int) -> None:
    placed, schedule = repeated_step(num_stages, dp=dp)
    taken = [{atom.sample_id for microbatch in replica for atom in microbatch} for replica in placed.units["llm"]]
    for lane, actions in enumerate(lane.actions for lane in schedule.lanes):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            places = [action.place for action in actions if action.unit == "vision" and action.kind is kind]
            samples = [placed.units["vision"][place.replica][place.microbatch][0].sample_id for place in places]
            assert len(set(samples)) == len(samples)
            assert set(samples) >= taken[lane // num_stages]


def test_it_takes_the_time_of_a_pipeline_whose_stages_hold_all_encoders() -> None:
    """On the way in and out the LLM alone counts, as copies start at once and end beside.

    The last stage takes longest, so that the first one, to which others send what they encode, is not late.
    """
    num_stages, encoders = 3, ("vision", "audio")

    def seconds(action: Action) -> float:
        length = 0.5 if action.unit in encoders else 4.0 if action.stage == num_stages - 1 else 1.0
        return {ActionKind.FORWARD: length, ActionKind.BACKWARD: 2 * length}.get(action.kind, 0.0)

    found = simulate_schedule(repeated_step(num_stages, encoders=encoders)[1], GivenCosts(seconds=seconds))
    of_encoders = len(encoders) * 1.5
    assert found.busy_seconds == pytest.approx([NUM_SAMPLES * (of_encoders + own) for own in (3.0, 3.0, 12.0)])
    longest = NUM_SAMPLES * (of_encoders + 12.0)
    assert longest < found.iteration_seconds <= longest + 2 * (num_stages - 1) * (of_encoders + 3.0)


def exhaustive_seconds(problem):
    """The best objective (DistTrain, Eq. 1 and 2) over every combination of rows, one at a time."""
    best, llm = float("inf"), problem.llm
    names = list(problem.others)
    for row in range(len(llm)):
        data, in_flight = int(llm.data[row]), int(llm.data[row] * llm.pipeline[row])
        for rows in itertools.product(*(range(len(problem.others[name])) for name in names)):
            chosen = [(name, problem.others[name], index) for name, index in zip(names, rows, strict=True)]
            if llm.gpus[row] + sum(options.gpus[index] for _, options, index in chosen) > problem.request.num_gpus:
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
            best = min(best, warmup + (problem.request.num_microbatches / data - 1) * slowest)
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


@pytest.mark.parametrize("name", ["three", "two-encoders"])
@pytest.mark.parametrize("num_gpus", [16, 32])
def test_few_microbatches_per_replica_leave_no_pipeline_waiting(name, num_gpus):
    """As many samples as GPUs: with a replica for each one there is nothing to fill a pipeline with, and much to reduce."""
    graph = GRAPHS[name]
    asked = request(graph, num_gpus=num_gpus, global_batch_size=num_gpus, lengths=random_lengths(graph)[:1])
    found, rigid = (plan_to_fit(plan, asked).prediction for plan in (plan_disttrain, plan_megatron))
    assert found.iteration_seconds <= 1.01 * rigid.iteration_seconds
    problem = build_problem(asked)
    alone = build_candidate(problem, rank_allocations(problem, slack=1.0)[0]).to_run(asked, seconds=0.0, balance=BALANCE)
    assert found.iteration_seconds < 0.9 * predict_run(alone, asked).iteration_seconds
