"""What a planner is asked, what becomes of its answer and how it is held against measurements, and values in the user's cache."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.orchestrator import plan_review as module
from megatron.runtime.orchestrator.choose_plan import Choice, build_request, choose_plan, planned_config
from megatron.runtime.orchestrator.machine import find_value, keep_value, key_of, place_file
from megatron.runtime.orchestrator.orchestrate import Planned
from megatron.runtime.orchestrator.plan_review import PlanReview, PlanTrial, watch_plan
from megatron.runtime.orchestrator.profile_layers import profiled_sizes
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.data.length_table import uniform_lengths
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated
from multimodal.values.action import Action, ActionKind
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.timeline import Timeline, TimelineEvent
from tests.distributed.launch import REPOSITORY
from tests.unit.plan.planners.planning_cases import few_planners

DIGITS = REPOSITORY / "examples" / "digits"
GRAPH = ModelGraph.from_file(DIGITS / "model.yaml")
CLUSTER = Cluster.from_file(REPOSITORY / "examples" / "clusters" / "cpu.yaml")
LENGTHS = uniform_lengths(GRAPH, tokens={"vision": 60, "llm": 40}, num_samples=4)


def configured(*flags: str) -> RunConfig:
    given = ("--config", str(DIGITS / "config.yaml"), "--plan", "auto", "--plan-time-budget", "0.2", *flags)
    return parse_arguments(given, environ={})


def asked(config: RunConfig, *, num_ranks: int = 2) -> PlanningRequest:
    return build_request(config, graph=GRAPH, cluster=CLUSTER, lengths=LENGTHS, vocab_size=384, num_ranks=num_ranks)


def test_sizes_that_were_given_are_fixed():
    request = asked(configured("--llm-tp", "2", "--llm-vpp", "3", "--vision-dp", "1", "--micro-batch-size", "4"))
    assert request.fixed_sizes == {
        "llm": FixedSizes(tensor_parallel_size=2, virtual_pipeline_size=3),
        "vision": FixedSizes(data_parallel_size=1),
    }
    assert (request.micro_batch_size, request.sharding, request.transformer_impl) == (4, "optim", "local")
    assert asked(configured()).micro_batch_size is None and not asked(configured()).fixed_sizes
    for flag in ("--llm-ep", "--expert-model-parallel-size"):
        assert asked(configured(flag, "2")).fixed_sizes["llm"] == FixedSizes(expert_parallel_size=2)


@pytest.fixture(scope="module")
def choice() -> Choice:
    with few_planners():
        return choose_plan(asked(configured()), may_share_weights=True, made_for={"model": "digits"}, cluster_name="cluster.yaml")


def test_a_choice_is_planned_told_and_run(choice):
    assert choice.run.num_gpus == 2 and choice.seconds > 0
    copies = plan_colocated(GRAPH, sizes=dict.fromkeys(GRAPH.unit_names, UnitSizes(data_parallel_size=2)), world_size=2)
    of_cores = (replace(asked(configured()), cluster=replace(CLUSTER, cores_per_node=cores)) for cores in (None, 2))
    assert ["reduce-by-layer" in request.passes(copies) for request in of_cores] == [True, False]
    assert [line.partition(":")[0] for line in choice.lines] == ["plan", "predicted", "why"]
    assert "#   model: digits" in choice.text
    told = Choice.from_dict(json.loads(json.dumps(choice.to_dict())))
    assert told == replace(choice, run=replace(choice.run))

    config = planned_config(configured(), told.run, plan=Path("plan.yaml"), cluster=Path("cluster.yaml"), layer_costs=None)
    training = config.training
    assert (training.schedule, training.balance, training.micro_batch_size) == (
        choice.run.schedule,
        choice.run.balance,
        choice.run.micro_batch_size,
    )
    assert config.parallelism.plan == Path("plan.yaml") and not config.parallelism.plans_itself
    assert "plan_time_budget" not in config.given


def test_durations_of_the_machine_are_given_to_runs_that_go_by_them(choice):
    plan = choice.run.plan
    files = {"plan": Path("plan.yaml"), "cluster": Path("cluster.yaml"), "layer_costs": Path("layers.json")}
    by_order = planned_config(configured(), PlannedRun(plan, balance="none"), **files)
    by_durations = planned_config(configured(), PlannedRun(plan, balance="auto"), **files)
    assert [(each.training.cluster, each.training.layer_costs) for each in (by_order, by_durations)] == [
        (None, None),
        (files["cluster"], files["layer_costs"]),
    ]


@few_planners()
def test_a_plan_that_would_leave_processes_idle_is_refused_with_the_number_that_works():
    sizes = [part for unit in ("llm", "vision") for size in ("dp", "pp", "tp") for part in (f"--{unit}-{size}", "1")]
    request = asked(configured(*sizes), num_ranks=3)
    with pytest.raises(PlanError, match=r"the best plan for 3 processes uses [12] of them .*; start [12] processes"):
        choose_plan(request, may_share_weights=False, made_for={}, cluster_name="")


@few_planners()
def test_no_process_is_left_idle_where_a_slower_plan_uses_all():
    request = asked(configured("--llm-tp", "1", "--vision-tp", "1"), num_ranks=5)
    fastest = PLANNERS["braid"].plan_best(request)
    choice = choose_plan(request, may_share_weights=False, made_for={}, cluster_name="")
    assert (fastest.run.num_gpus, choice.run.num_gpus) == (4, 5)
    assert fastest.prediction.iteration_seconds < choice.seconds < 1.2 * fastest.prediction.iteration_seconds


def test_layers_are_profiled_at_sizes_that_the_data_has_and_that_take_no_long_time():
    request = asked(configured())
    for unit in GRAPH.units:
        sizes = profiled_sizes(request, unit)
        assert sorted(set(sizes)) == list(sizes) and len(sizes) == 4
        assert sizes[0] <= request.loads.mean[unit.name][0] <= sizes[-1]
    slow = asked(configured()).changed(cluster=replace(CLUSTER, peak_tflops=1e-5))
    slow.__dict__.pop("layer_costs", None)
    assert profiled_sizes(slow, GRAPH.backbone)[-1] < profiled_sizes(request, GRAPH.backbone)[-1]


PLAN = Plan({"llm": UnitPlan((Replica((Stage((0,), ((0, 4),)),)),))})
NODE = Cluster(1, 1.0, 8.0, NodeLink(1.0, 1.0), Network(1.0, 1.0, 1))
CHOICE = Choice(PlannedRun(PLAN), NODE, 0.2, ("plan: this", "predicted: that", "why: so"), "units: {}\n")


def reviewed(**changes: Any) -> PlanReview:
    """Return a review of three steps, which has seen two that took twice what was profiled."""
    planned = SimpleNamespace(choice=CHOICE, request=None)
    made = PlanReview(planned, 3, **{"may_change": True, **changes})  # type: ignore[arg-type]
    made._costs = lambda step: SimpleNamespace(compute=lambda action: SimpleNamespace(seconds=0.05))  # type: ignore[method-assign]
    events = [
        TimelineEvent(Action(ActionKind.FORWARD, "llm", 0, 0, 0), 0, 0.0, 0.1),
        TimelineEvent(Action(ActionKind.FORWARD, "llm", 0, 0, 1), 0, 0.1, 0.2),
    ]
    for seconds in (0.5, 0.3):
        made.add(SimpleNamespace(), Timeline(((0,),), tuple(events)), seconds=seconds, tflops=1.0)  # type: ignore[arg-type]
    return made


def test_steps_up_to_the_review_are_measured_but_for_the_first():
    review = reviewed(first_step=10)
    assert list(review.measured) == [12, 13]
    alone = PlanReview(reviewed().planned, 1, may_change=False)
    assert list(alone.measured) == [1]


@pytest.mark.parametrize(
    ("seconds", "may_change", "said", "is_taken"),
    [
        (0.39, True, "no plan was found to be more than 5% better", False),
        (0.2, False, "plan: this would take 0.2 s a step, the current plan 0.4 s; --replan would go on under it", False),
        (0.2, True, "plan: this would take 0.2 s a step, the current plan 0.4 s; going on under it", True),
    ],
)
def test_a_better_plan_is_told_of_and_taken(monkeypatch, seconds, may_change, said, is_taken):
    review = reviewed(may_change=may_change)
    better = Choice(CHOICE.run, NODE, seconds, CHOICE.lines, CHOICE.text)
    review._plan_again = lambda: (0.4, better)  # type: ignore[method-assign]
    review.planned.request = SimpleNamespace()  # type: ignore[misc]
    kept: list[Choice] = []
    monkeypatch.setattr(module, "keep_choice", lambda request, choice: kept.append(choice))
    verdict = review.conclude(3)
    assert said in verdict.line and verdict.line.startswith("plan review after step 3: a step takes 0.4 s, predicted 0.2 s")
    assert "computations take 2.00 times as long in llm" in verdict.line
    assert (verdict.choice == better) == is_taken == bool(kept)
    assert verdict.choice == (better if is_taken else None)


def test_a_plan_that_was_taken_is_held_against_the_one_before():
    review = reviewed()
    assert review.after(review.planned, number=3) is None
    after = review.after(reviewed().planned, number=3)
    assert after is not None and after.measured[-1] == 6 and not after.may_change
    again = reviewed(seconds_before=after.seconds_before, may_change=False)
    assert again.conclude(6).line.endswith("; under the plan before it took 0.4 s")


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_trial_settles_on_the_faster_plan_for_good(monkeypatch, is_faster):
    kept: list[Choice] = []
    monkeypatch.setattr(module, "keep_choice", lambda request, choice: kept.append(choice))
    other = replace(CHOICE, seconds=0.21)
    first = Planned(configured(), replace(CHOICE, second=other), SimpleNamespace())  # type: ignore[arg-type]
    trial = watch_plan(first, configured().parallelism)
    assert isinstance(trial, PlanTrial)
    for numbers, rate in ((range(2, 5), 2.0), (range(6, 9), 3.0 if is_faster else 1.0)):
        assert trial.measured == numbers
        for _ in numbers:
            trial.add(SimpleNamespace(), SimpleNamespace(), seconds=1.0, tflops=rate)  # type: ignore[arg-type]
        verdict = trial.conclude(numbers[-1])
        watched = trial.after(first if verdict.choice is None else first._replace(choice=verdict.choice), number=numbers[-1])
        trial = watched if isinstance(watched, PlanTrial) else trial
    assert kept == [other if is_faster else CHOICE] and verdict.choice == (None if is_faster else CHOICE)
    assert isinstance(watched, PlanReview) and watched.first_step == 8 and watched.measured[-1] == 28


def test_a_profile_is_scaled_unit_by_unit():
    curves = LayerCurves(Quadratic(1.0, 2.0), Quadratic(), Quadratic(0.0, 1.0))
    profile = LayerProfile("CPU", "float32", {("llm", "transformer", 1, 1): curves, ("vision", "transformer", 1, 1): curves})
    scaled = profile.times({"llm": 3.0}).curves
    assert scaled["llm", "transformer", 1, 1].forward == Quadratic(3.0, 6.0)
    assert scaled["vision", "transformer", 1, 1] == curves


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "braid"


def test_what_was_kept_is_found_under_all_that_it_depends_on(cache):
    keep_value("layers", key_of(("CPU", 2)), {"seconds": 0.1})
    assert find_value("layers", key_of(("CPU", 2)), dict) == {"seconds": 0.1}
    assert find_value("layers", key_of(("CPU", 3)), dict) is None
    assert find_value("machines", key_of(("CPU", 2)), dict) is None
    assert key_of(("ab", "c")) != key_of(("a", "bc"))


@pytest.mark.parametrize("damaged", ["", "{", "[1]", "\xff"])
def test_what_cannot_be_read_was_not_kept(cache, damaged):
    keep_value("layers", "a", {})
    (cache / "layers" / "a.json").write_text(damaged, encoding="latin-1")
    assert find_value("layers", "a", dict) is None


def test_a_file_is_placed_whole_where_it_can_be(cache, monkeypatch):
    path = place_file("plans/x", "plan.yaml", "units: {}\n")
    assert path == cache / "plans" / "x" / "plan.yaml" and path.read_text() == "units: {}\n"
    assert place_file("plans/x", "plan.yaml", "other\n").read_text() == "other\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.yaml"]
    (cache / "blocked").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "blocked"))
    elsewhere = place_file("plans/x", "plan.yaml", "third\n")
    assert elsewhere.read_text() == "third\n" and cache not in elsewhere.parents
    keep_value("layers", "a", {"lost": True})
    assert find_value("layers", "a", dict) is None
