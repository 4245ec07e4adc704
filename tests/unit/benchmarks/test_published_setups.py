"""The comparison with published figures: its errors, its set-ups, and what it says without data."""

import json
from pathlib import Path

import pytest

from benchmarks.published_setups import cornstarch, disttrain, optimus
from benchmarks.published_setups.layer_execution import LayerExecution, SystemLayerCosts
from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.published_training import main
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths


def test_calibration_meets_the_measured_step_with_the_plan_that_was_made() -> None:
    graph = read_model("cornstarch-vlm-s")
    sizes = {unit: FixedSizes(2, 2, 1) for unit in graph.unit_names}
    sample = SampleLengths(0, (ItemLengths("vision", 1024, 256),), 512, 512)
    setup = Setup("megatron", graph, (sample,), 8, 8, sizes)
    given = read_cluster("a40")
    target = 1.7 * setup.simulate(given).iteration_seconds
    cluster = setup.calibrate(given, measured_seconds=target)
    assert setup.predict(setup.plan(given), cluster).iteration_seconds == pytest.approx(target, rel=1e-4)
    assert 1 / 2.5 < cluster.efficiency / given.efficiency < 1 / 1.7, "links are as they were, so computing slows by more"


def test_the_stated_stages_fill_the_stated_gpus() -> None:
    graph = read_model("vit-22b-gpt-175b")
    for planner in ("megatron", "megatron-balanced"):
        run = optimus.setup_of(planner, graph, data_parallel_size=24).plan(read_cluster("h100"))
        assert run.num_gpus == 1536
        assert len(run.plan.lanes) == 24 * 8
    assert all(encoder + llm <= 12 for pair in cornstarch.STAGES.values() for encoder, llm in pair)
    for model in disttrain.MEGATRON_STAGES:
        assert disttrain._sample(model).num_tokens == 8192


def test_a_system_s_way_of_running_layers_reaches_planning_and_prediction() -> None:
    graph = read_model("cornstarch-vlm-s")
    sample = SampleLengths(0, (ItemLengths("vision", 1024, 256),), 512, 512)
    execution = LayerExecution(repeated_collectives=0.5)
    setup = Setup("megatron", graph, (sample,), 8, 8, {}, execution=execution, num_overlapped_parts=4)
    request = setup.request(read_cluster("a40"))
    options = request.run_options(PlannedRun(Plan({}), transformer_impl="local"))
    predicted = options.layer_costs(graph, request.cluster, 512, None, options.num_overlapped_parts)
    for found in (request.layer_costs, predicted):
        assert isinstance(found, SystemLayerCosts)
        assert (found.execution, found.num_overlapped_parts) == (execution, 4)


def test_papers_without_data_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "entrain", "--lengths", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["entrain"]
    assert main(["--only", "entrain", "--lengths", str(tmp_path)]) == 0
    assert "give another folder with --lengths" in capsys.readouterr().out
