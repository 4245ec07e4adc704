"""What plans count on must be what training runs: whose layers, and what replicas share."""

from dataclasses import replace

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers
from multimodal.cost.step_memory import layer_static_bytes
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.memory_estimate import layer_memory, stage_bytes
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.layout_search import best_layouts
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.run_variants import formed
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ActionKind
from multimodal.values.model_graph import Experts
from multimodal.values.sample_lengths import SampleLengths
from tests.unit.plan.planners.planning_cases import CLUSTER, LLM, TEXT_ONLY, request, with_memory


@pytest.mark.parametrize("name", BUILDERS)
def test_the_schedules_that_split_backwards_are_known(name):
    ranges = ((0, 3), (7, 10)), ((3, 5), (5, 7))
    stages = ranges if name == "zb-v" else tuple((each,) for each in ((0, 5), (5, 10)))
    plan = Candidate({"llm": UnitLayout(1, 1, stages)}).build_plan(TEXT_ONLY)
    lengths = request(TEXT_ONLY).lengths[:4]
    assignment = BALANCERS["none"](lengths, graph=TEXT_ONLY, plan=plan, options=BalanceOptions(vocab_size=4096))
    schedule = BUILDERS[name](assignment.shape(TEXT_ONLY, plan))
    kinds = {action.kind for lane in schedule.lanes for action in lane.actions}
    assert (ActionKind.WEIGHT_GRADIENT in kinds) == BUILDERS[name].splits_backwards


def test_fused_layers_are_counted_on_only_where_they_can_run():
    asked = request(TEXT_ONLY)
    assert asked.implementation("1f1b") == asked.implementation("zb-h1") == "transformer_engine"
    assert asked.implementation("optimus") == "transformer_engine"
    assert replace(asked, cluster=replace(CLUSTER, dtype="float64")).implementation("1f1b") == "local"
    adapted = replace(asked, graph=adapt_units(TEXT_ONLY, linear_layers(TEXT_ONLY), rank=4, alpha=None, targets=()))
    experts = replace(LLM.transformer, experts=Experts(4))
    mixed = replace(asked, graph=replace(TEXT_ONLY, units=(replace(LLM, transformer=experts),)))
    assert adapted.implementation("1f1b") == mixed.implementation("1f1b") == "transformer_engine", "as a run has them"
    sharded = replace(asked, sharding="optim_grads_params")
    assert [sharded.implementation(name) for name in ("1f1b", "zb-h1")] == ["transformer_engine", "local"]
    fused = replace(asked, transformer_impl="transformer_engine")
    assert fused.allows("zb-h1") and fused.allows("optimus")
    assert not replace(fused, sharding="optim_grads_params").allows("zb-h1")


def test_braid_tries_no_schedule_that_the_wanted_layers_cannot_run():
    asked = request(TEXT_ONLY, transformer_impl="transformer_engine", sharding="optim_grads_params")
    run = PLANNERS["braid"](asked)
    assert not BUILDERS[run.schedule].splits_backwards and "--transformer-impl transformer_engine" in run.flags
    assert not any(f"; {name}, --balance" in note for note in run.notes for name, row in BUILDERS.items() if row.splits_backwards)


def test_layouts_with_hidden_collectives_are_listed_and_stay_so_with_other_schedules():
    asked = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(tensor_parallel_size=4)})
    runs = [layout.to_run() for kind in best_layouts(asked) for layout in kind]
    hidden = [run for run in runs if run.tp_comm_overlap]
    assert hidden and all(run.transformer_impl == "local" for run in hidden) and not all(run.tp_comm_overlap for run in runs)
    other = formed(hidden[0], ("gpipe", "none"), asked)
    assert other is None or (other.tp_comm_overlap and other.transformer_impl == "local")
    alone = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(tensor_parallel_size=1)})
    assert not any(layout.to_run().tp_comm_overlap for kind in best_layouts(alone) for layout in kind)


def test_options_that_change_nothing_in_a_plan_are_left_out():
    for options in ({"tp_comm_overlap": True}, {"sharding": "optim_grads_params"}):
        run = Candidate({"llm": even_layout(LLM, 1, 1, 2)}).to_run(request(TEXT_ONLY, **options), seconds=0.0)
        assert (run.transformer_impl, run.tp_comm_overlap, run.sharding) == ("transformer_engine", False, "optim")


def test_the_implementation_decides_what_is_kept():
    peaks = {}
    for implementation in ("local", "transformer_engine"):
        asked = request(TEXT_ONLY, transformer_impl=implementation)
        run = Candidate({"llm": even_layout(LLM, 1, 1, 1)}).to_run(asked, seconds=0.0)
        assert run.transformer_impl == implementation and f"--transformer-impl {implementation}" in run.flags
        kept = layer_memory(asked, "llm", "transformer").activation_bytes(1, 1)
        peaks[implementation] = predict_run(run, asked).peak_memory_bytes, kept
    assert all(local > fused for local, fused in zip(*(peaks[name] for name in ("local", "transformer_engine")), strict=True))


@pytest.mark.parametrize(("dtype", "size", "zero_stage"), [("bfloat16", 2, 1), ("float32", 4, 1), ("float64", 8, 0)])
def test_the_optimizer_is_shared_as_training_shares_it(dtype, size, zero_stage):
    asked = request(TEXT_ONLY)
    asked = replace(asked, cluster=replace(CLUSTER, dtype=dtype))
    assert asked.zero_stage == zero_stage
    layer = layer_memory(asked, "llm", "transformer")
    expected = layer_static_bytes(
        layer.num_weights, is_trained=True, data_parallel_size=4, zero_stage=zero_stage, bytes_per_element=size
    )
    assert layer.static_bytes(4) == expected
    run = Candidate({"llm": even_layout(LLM, 1, 4, 1)}).to_run(asked, seconds=0.0)
    estimated = stage_bytes(asked, "llm", even_layout(LLM, 1, 4, 1), 0, num_samples=1)
    assert predict_run(run, asked).peak_memory_bytes == pytest.approx(estimated, rel=0.1)


def test_collectives_over_replicas_hide_where_there_are_replicas():
    asked = request(TEXT_ONLY)
    alone, copies = (Candidate({"llm": even_layout(LLM, 1, data, 1)}).to_run(asked, seconds=0.0) for data in (1, 4))
    assert alone.passes == () and copies.passes == ("gather-parameters", "reduce-by-layer")


def test_overlapped_tensor_parallelism_is_predicted_to_help_where_products_are_large():
    long = tuple(SampleLengths(index, (), 32_768, 10) for index in range(4))
    asked = with_memory(request(TEXT_ONLY, transformer_impl="local", lengths=long), 1000.0)
    run = Candidate({"llm": even_layout(LLM, 4, 1, 1)}).to_run(asked, seconds=0.0)
    overlapped = replace(run, tp_comm_overlap=True)
    assert "--tp-comm-overlap" in overlapped.flags and "--tp-comm-overlap" not in run.flags
    assert predict_run(overlapped, asked).iteration_seconds < predict_run(run, asked).iteration_seconds
