"""What a planner is asked, and what becomes of its answer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.orchestrator.choose_plan import Choice, build_request, choose_plan, planned_config
from megatron.runtime.orchestrator.measure_machine import profiled_sizes
from multimodal.cost.cluster import Cluster
from multimodal.data.length_table import uniform_lengths
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from tests.distributed.launch import REPOSITORY

DIGITS = REPOSITORY / "examples" / "digits"
GRAPH = ModelGraph.from_file(DIGITS / "model.yaml")
CLUSTER = Cluster.from_file(REPOSITORY / "examples" / "clusters" / "cpu.yaml")
LENGTHS = uniform_lengths(GRAPH, tokens={"vision": 60, "llm": 40}, num_samples=4)


def configured(*flags: str) -> RunConfig:
    """Parse the digits' configuration with these flags."""
    given = ("--config", str(DIGITS / "config.yaml"), "--plan", "auto", "--plan-time-budget", "0.5", *flags)
    return parse_arguments(given, environ={})


def asked(config: RunConfig, *, num_ranks: int = 2) -> PlanningRequest:
    """Return the request of such a run."""
    return build_request(config, graph=GRAPH, cluster=CLUSTER, lengths=LENGTHS, vocab_size=384, num_ranks=num_ranks)


def test_sizes_that_were_given_are_fixed() -> None:
    request = asked(configured("--llm-tp", "2", "--llm-vpp", "3", "--vision-dp", "1", "--micro-batch-size", "4"))
    assert request.fixed_sizes == {
        "llm": FixedSizes(tensor_parallel_size=2, virtual_stages=3),
        "vision": FixedSizes(data_parallel_size=1),
    }
    assert (request.micro_batch_size, request.sharding, request.transformer_impl) == (4, "optim", "local")
    assert asked(configured()).micro_batch_size is None and not asked(configured()).fixed_sizes
    for flag in ("--llm-ep", "--expert-model-parallel-size"):
        assert asked(configured(flag, "2")).fixed_sizes["llm"] == FixedSizes(expert_parallel_size=2)


@pytest.fixture(scope="module")
def choice() -> Choice:
    """Return what is chosen for two processes."""
    return choose_plan(asked(configured()), may_share_weights=True, made_for={"model": "digits"}, cluster_name="cluster.yaml")


def test_a_choice_is_planned_told_and_run(choice: Choice) -> None:
    assert choice.run.num_gpus == 2 and choice.seconds > 0
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


def test_durations_of_the_machine_are_given_to_runs_that_go_by_them(choice: Choice) -> None:
    plan = choice.run.plan
    files = {"plan": Path("plan.yaml"), "cluster": Path("cluster.yaml"), "layer_costs": Path("layers.json")}
    by_order = planned_config(configured(), PlannedRun(plan, balance="none"), **files)
    by_durations = planned_config(configured(), PlannedRun(plan, balance="auto"), **files)
    assert [(each.training.cluster, each.training.layer_costs) for each in (by_order, by_durations)] == [
        (None, None),
        (files["cluster"], files["layer_costs"]),
    ]


def test_a_plan_that_would_leave_processes_idle_is_refused_with_the_number_that_works() -> None:
    sizes = [part for unit in ("llm", "vision") for size in ("dp", "pp", "tp") for part in (f"--{unit}-{size}", "1")]
    request = asked(configured(*sizes), num_ranks=3)
    with pytest.raises(PlanError, match=r"the best plan for 3 processes uses [12] of them .*; start [12] processes"):
        choose_plan(request, may_share_weights=False, made_for={}, cluster_name="")


def test_layers_are_profiled_at_sizes_that_the_data_has_and_that_take_no_long_time() -> None:
    request = asked(configured())
    for unit in GRAPH.units:
        sizes = profiled_sizes(request, unit)
        assert sorted(set(sizes)) == list(sizes) and len(sizes) == 4
        assert sizes[0] <= request.loads.mean[unit.name][0] <= sizes[-1]
    slow = asked(configured()).changed(cluster=replace(CLUSTER, peak_tflops=1e-5))
    slow.__dict__.pop("layer_costs", None)
    assert profiled_sizes(slow, GRAPH.backbone)[-1] < profiled_sizes(request, GRAPH.backbone)[-1]
