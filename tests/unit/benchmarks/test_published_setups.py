"""The comparison with published figures: its errors, its set-ups, and what it says without data."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_setups import cornstarch, disttrain, optimus
from benchmarks.published_setups.layer_execution import AttentionWindow, LayerExecution, SystemLayerCosts
from benchmarks.published_setups.orchmllm import pad_items
from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.published_setups.rows import Row, single
from benchmarks.published_training import main
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.test_layer_costs import CLUSTER, GRAPH, LAYER, LOAD, PLAIN


@pytest.mark.parametrize(("simulated", "error"), [(1.26, -0.1), (1.4, 0.0), (1.6, 0.0), (1.9, 0.0), (2.09, 0.1)])
def test_the_error_is_the_distance_to_the_nearer_end(simulated: float, error: float) -> None:
    assert Row("paper", "gain", (1.4, 1.9), simulated, "abstract").error == pytest.approx(error)


def test_a_single_figure_has_no_width() -> None:
    row = Row("paper", "step", single(10.0), 9.0, "table", "s", calibrated_speed=0.5)
    assert row.error == pytest.approx(-0.1)
    assert row.is_calibrated
    assert row.to_dict()["published"] == [10.0, 10.0]


@pytest.mark.parametrize("facts", [{"calibrated_speed": 0.5}, {"is_bound": True}, {"not_counted": "its text has another figure"}])
def test_what_says_nothing_is_not_compared(facts: dict[str, Any]) -> None:
    assert Row("paper", "step", single(10.0), 9.0, "table").is_compared
    assert not Row("paper", "step", single(10.0), 9.0, "table", **facts).is_compared


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


def test_disttrain_s_microbatches_are_whole() -> None:
    base = Setup("disttrain", read_model("mllm-9b"), (disttrain._sample("mllm-9b"),), 96, 24, {})
    found = [
        {unit: each.data_parallel_size for unit, each in setup.fixed_sizes.items()}
        for setup in disttrain._with_whole_microbatches(base)
    ]
    assert len(found) == sum(len(disttrain._divisors(size)) ** 2 for size in (1, 2, 3, 4, 6, 8)) + 5**2 + 6**2
    for sizes in found:
        assert 24 % sizes["llm"] == 0
        assert all(sizes["llm"] % sizes[unit] == 0 and sizes["llm"] <= 8 * sizes[unit] for unit in ("vision", "generator"))


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


def costs_of(execution: LayerExecution) -> SystemLayerCosts:
    return SystemLayerCosts(GRAPH, CLUSTER, 512, execution=execution)


def test_recomputation_that_ends_early_leaves_the_last_all_reduce_out() -> None:
    early = costs_of(LayerExecution(repeated_collectives=0.5))
    for recompute, passes in ((None, 1.0), ("full", 1.5)):
        found = early.seconds("llm", LAYER, LOAD, tensor_parallel_size=2, recompute=recompute)
        assert found.input_gradient_waiting == pytest.approx(passes * found.forward_waiting)


@pytest.mark.parametrize("full_share", [0.0, 0.25, 1.0])
def test_windows_turn_squares_into_tokens_for_their_share_of_layers(full_share: float) -> None:
    costs = costs_of(LayerExecution(windows=(AttentionWindow("vision", 20, full_share),)))
    squares = full_share * LOAD.num_squared + (1 - full_share) * 20 * LOAD.num_tokens
    found = costs.seconds("vision", LAYER, LOAD, tensor_parallel_size=2, recompute="selective")
    expected = PLAIN.seconds("vision", LAYER, LOAD._replace(num_squared=squares), tensor_parallel_size=2, recompute="selective")
    assert found == pytest.approx(expected)
    assert costs.seconds("llm", LAYER, LOAD) == PLAIN.seconds("llm", LAYER, LOAD)


def test_items_are_padded_to_the_longest_of_their_microbatch() -> None:
    lengths = tuple(
        SampleLengths(index, (ItemLengths("vision", 5, 5), ItemLengths("audio", count, 2)), 9, 9)
        for index, count in enumerate((10, 30, 20))
    )
    audio = (((Atom(0, 1), Atom(1, 1)),), ((Atom(2, 1),),))
    padded = pad_items(lengths, Assignment({"audio": audio}), unit="audio")
    assert [sample.items[1] for sample in padded] == [ItemLengths("audio", count, 2) for count in (30, 30, 20)]
    assert all(sample.items[0] == ItemLengths("vision", 5, 5) for sample in padded)


def test_papers_without_data_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "entrain", "--lengths", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["entrain"]
    assert main(["--only", "entrain", "--lengths", str(tmp_path)]) == 0
    assert "give another folder with --lengths" in capsys.readouterr().out
