"""Encoders with sizes of their own on the LLM's ranks: which plans are found, and how they are written down."""

from dataclasses import replace

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.training.prediction import build_predictor
from multimodal.balance.encoder_pipelines import keep_beside_llm
from multimodal.plan.planners import PLANNERS, optimus
from multimodal.plan.planners.optimus import SCHEDULES
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.run_variants import fitting_schedules, formed
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan
from tests.sanity.repository import ROOT
from tests.unit.plan.planners.planning_cases import THREE, TWO, TWO_ENCODERS, request, with_memory
from tools.filling_report import with_filling

PIPELINE = FixedSizes(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)


def planned(graph=TWO, **changes) -> PlannedRun:
    return PLANNERS["optimus"](request(graph, **changes))


def num_inside(plan: Plan, unit: str) -> list[int]:
    """The LLM replica around each replica of an encoder."""
    owners = {rank: index for index, replica in enumerate(plan.units["llm"].replicas) for rank in replica.ranks}
    found = [{owners[rank] for rank in replica.ranks} for replica in plan.units[unit].replicas]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


def test_a_generator_of_one_piece_is_whole_on_every_rank():
    generator = ModelGraph.from_file(ROOT / "examples" / "models" / "mllm-9b.yaml").unit("generator")
    assert generator.module is not None
    graph = replace(THREE, units=(*THREE.units[:2], generator))
    plans = optimus._Search(request(graph, fixed_sizes={"llm": PIPELINE}))._llm_plans()
    layouts = {plan.candidate.layouts["generator"] for plan in plans}
    assert {(*each.size, each.pipeline_parallel_size, each.data_parallel_size) for each in layouts} == {(1, 1, 1, 8)}


@pytest.mark.parametrize("graph", [TWO, TWO_ENCODERS], ids=["one encoder", "two encoders"])
def test_every_rank_holds_the_llm_and_encoders_whose_sizes_divide_its_own(graph):
    run = planned(graph, fixed_sizes={"llm": PIPELINE})
    plan, llm = run.plan, run.plan.units["llm"]
    validate_plan(plan, graph=graph, world_size=8)
    assert run.schedule in SCHEDULES
    for unit in graph.encoders:
        own = plan.units[unit.name]
        assert set(own.ranks) == set(llm.ranks) == set(range(8))
        assert 2 % own.tensor_parallel_size == 0 and 2 % len(own.replicas[0].stages) == 0
        dealt = [index % 2 for index in range(own.data_parallel_size)]
        assert num_inside(plan, unit.name) == dealt, "microbatches dealt in turn stay beside the LLM"


def test_where_no_rank_waits_for_another_there_is_nothing_to_fill():
    alone = FixedSizes(1, 1)
    run = planned(fixed_sizes={"llm": alone, "vision": alone}, num_gpus=2)
    assert run.plan.is_whole_on_every_rank and run.schedule == "1f1b"
    assert not BUILDERS["optimus"].is_for(replace(TWO, units=TWO.units[1:], edges=()), has_virtual_stages=False)
    assert "optimus" in dict(fitting_schedules(run, request()))
    assert formed(run, ("optimus", "none"), request()) is None


def test_a_plan_says_what_it_fills_and_a_run_of_its_flags_orders_work_alike(tmp_path):
    asked = request(fixed_sizes={"llm": PIPELINE}, lengths=request().lengths[:1], transformer_impl="local")
    run = PLANNERS["optimus"](asked)
    found, report = with_filling(PredictedRun(run, predict_run(run, asked)), asked)
    assert report is not None and report.note in found.run.notes
    assert 0 <= report.eff_coarse <= 1 and 0 < report.eff_fine <= 1 and report.scheduler_seconds > 0
    counts = report.partition["vision"]
    assert sum(counts) == 12 and len(counts) == run.plan.units["vision"].data_parallel_size / 2
    cluster = ROOT / "examples" / "clusters" / "h100.yaml"
    assert f"--cluster {cluster}" in run.training_flags(cluster)
    assert "--cluster" not in replace(run, schedule="1f1b").training_flags(cluster)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(TWO.to_dict(), sort_keys=False))
    run.plan.to_file(tmp_path / "plan.yaml")
    flags = f"--model {tmp_path}/model.yaml --plan {tmp_path}/plan.yaml --data-path digits --lr 1e-3 --train-iters 1 --bf16"
    line = f"{flags} --global-batch-size 24 {run.training_flags(cluster)}".split()
    config = parse_arguments(line, environ={"WORLD_SIZE": "8"})
    schedules = ScheduleCache(TWO, run.plan, BUILDERS[config.training.schedule])
    assert build_predictor(config, schedules, vocab_size=4096).options == asked.run_options(run)


def test_encoders_that_do_not_lie_inside_replicas_of_the_llm_stay_as_they_are():
    crossing = planned(fixed_sizes={"llm": FixedSizes(1, 1, 4), "vision": FixedSizes(1)}, num_gpus=4).plan
    units = {**crossing.units, "vision": replace(crossing.units["llm"], replicas=crossing.units["llm"].replicas[::-1])}
    assert keep_beside_llm(Plan(units), TWO).units["vision"].replicas == crossing.units["llm"].replicas
    whole = Plan({**units, "llm": replace(units["llm"], replicas=units["llm"].replicas[:2])})
    assert keep_beside_llm(whole, TWO) == whole


@pytest.mark.parametrize(
    ("llm_tp", "vision_tp", "implementation"),
    [(1, 1, "transformer_engine"), (2, 1, "transformer_engine"), (2, 2, "local"), (2, 1, "local")],
)
def test_a_plan_fills_waits_of_all_kinds_of_layers(llm_tp, vision_tp, implementation):
    sizes = {"llm": FixedSizes(llm_tp, 2), "vision": FixedSizes(vision_tp, 1)}
    asked = request(fixed_sizes=sizes, lengths=request().lengths[:1], transformer_impl=implementation, num_gpus=4)
    run = PLANNERS["optimus"](asked)
    found, _ = with_filling(PredictedRun(run, predict_run(run, asked)), asked)
    assert not [each for each in found.run.notes if "not filled" in each]


def test_the_less_memory_there_is_the_less_the_schedule_keeps():
    sizes = {"llm": replace(PIPELINE, virtual_pipeline_size=1), "vision": FixedSizes(1, 1, virtual_pipeline_size=1)}
    asked = request(
        fixed_sizes=sizes, micro_batch_size=1, lengths=request().lengths[:1], global_batch_size=96, recompute="selective"
    )
    planner, seen = PLANNERS["optimus"], []
    for memory_gb in (4.0, 1.8, 1.3, 1.15):
        run, prediction = planner.plan_best(with_memory(asked, memory_gb))
        assert prediction.peak_memory_bytes <= 0.9e9 * memory_gb
        assert run.transformer_impl == "transformer_engine"
        seen.append(run.schedule)
    assert seen == ["optimus", "optimus-lean", "nested", "nested"]
