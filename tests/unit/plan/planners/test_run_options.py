"""What plans count on must be what training runs: whose layers, and what replicas share."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.baselines.entrain import plan_entrain, sample_work
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers
from multimodal.cost.step_memory import layer_static_bytes
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.grid import GridShape, chain_pieces, cut_grid
from multimodal.plan.planners.estimate.memory_estimate import layer_memory, stage_bytes
from multimodal.plan.planners.estimate.step_estimate import ChainRange, chain_seconds, chunks_in_flight, heaviest_seconds
from multimodal.plan.planners.estimate.step_estimate import slowdown as slowdown_of
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, StageSize
from multimodal.plan.planners.search.layout_search import best_layouts
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.run_variants import formed
from multimodal.plan.stable_batch import LARGEST_BATCH, NUM_TRIALS, proportional_gpus, stable_batch_size
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ActionKind
from multimodal.values.model_graph import Experts
from multimodal.values.sample_lengths import SampleLengths
from tests.unit.plan.planners.planning_cases import CLUSTER, LLM, TEXT_ONLY, TWO, few_planners, frozen, request, with_memory


@pytest.mark.parametrize("name", BUILDERS)
def test_the_schedules_that_split_backwards_are_known(name):
    ranges = ((0, 3), (7, 10)), ((3, 5), (5, 7))
    stages = ranges if name == "zb-v" else tuple((each,) for each in ((0, 5), (5, 10)))
    plan = Candidate({"llm": UnitLayout(StageSize(1), 1, stages)}).build_plan(TEXT_ONLY)
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


@few_planners()
def test_braid_tries_no_schedule_that_the_wanted_layers_cannot_run():
    asked = request(TEXT_ONLY, transformer_impl="transformer_engine", sharding="optim_grads_params")
    run = PLANNERS["braid"](asked)
    assert not BUILDERS[run.schedule].splits_backwards and "--transformer-impl transformer_engine" in run.flags
    assert not any(f"; {name}, --balance" in note for note in run.notes for name, row in BUILDERS.items() if row.splits_backwards)


def test_layouts_with_hidden_collectives_are_listed_and_stay_so_with_other_schedules():
    asked = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(tensor_parallel_size=4)})
    runs = [layout.to_run(asked) for kind in best_layouts(asked) for layout in kind]
    hidden = [run for run in runs if run.tp_comm_overlap]
    assert hidden and all(run.transformer_impl == "local" for run in hidden) and not all(run.tp_comm_overlap for run in runs)
    other = formed(hidden[0], ("gpipe", "none"), asked)
    assert other is None or (other.tp_comm_overlap and other.transformer_impl == "local")
    alone = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(tensor_parallel_size=1)})
    assert not any(layout.to_run(alone).tp_comm_overlap for kind in best_layouts(alone) for layout in kind)


def test_options_that_change_nothing_in_a_plan_are_left_out():
    for options in ({"tp_comm_overlap": True}, {"sharding": "optim_grads_params"}):
        run = Candidate({"llm": even_layout(LLM, StageSize(1), 1, 2)}).to_run(request(TEXT_ONLY, **options), seconds=0.0)
        assert (run.transformer_impl, run.tp_comm_overlap, run.sharding) == ("transformer_engine", False, "optim")


def test_the_implementation_decides_what_is_kept():
    peaks = {}
    for implementation in ("local", "transformer_engine"):
        asked = request(TEXT_ONLY, transformer_impl=implementation)
        run = Candidate({"llm": even_layout(LLM, StageSize(1), 1, 1)}).to_run(asked, seconds=0.0)
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
    run = Candidate({"llm": even_layout(LLM, StageSize(1), 4, 1)}).to_run(asked, seconds=0.0)
    estimated = stage_bytes(asked, "llm", even_layout(LLM, StageSize(1), 4, 1), 0, num_samples=1)
    assert predict_run(run, asked).peak_memory_bytes == pytest.approx(estimated, rel=0.1)


def test_collectives_over_replicas_hide_where_there_are_replicas():
    asked = request(TEXT_ONLY)
    alone, copies = (Candidate({"llm": even_layout(LLM, StageSize(1), data, 1)}).to_run(asked, seconds=0.0) for data in (1, 4))
    assert alone.passes == () and copies.passes == ("gather-parameters", "reduce-by-layer")


def test_overlapped_tensor_parallelism_is_predicted_to_help_where_products_are_large():
    long = tuple(SampleLengths(index, (), 32_768, 10) for index in range(4))
    asked = with_memory(request(TEXT_ONLY, transformer_impl="local", lengths=long), 1000.0)
    run = Candidate({"llm": even_layout(LLM, StageSize(4), 1, 1)}).to_run(asked, seconds=0.0)
    overlapped = replace(run, tp_comm_overlap=True)
    assert "--tp-comm-overlap" in overlapped.flags and "--tp-comm-overlap" not in run.flags
    assert predict_run(overlapped, asked).iteration_seconds < predict_run(run, asked).iteration_seconds


def test_varied_samples_need_larger_batches_and_the_batch_is_stable():
    random = np.random.default_rng(3)
    work = {"vision": random.exponential(1.0, 500), "llm": random.exponential(2.2, 500)}
    size = stable_batch_size(work, num_gpus=16)
    assert 8 < size < LARGEST_BATCH and NUM_TRIALS == 59, "as the paper says"

    def allocation() -> tuple[int, ...]:
        rows = random.integers(0, 500, size)
        means = {unit: float(seconds[rows].mean()) for unit, seconds in work.items()}
        return tuple(proportional_gpus(means, fewest={"vision": 1, "llm": 1}, num_gpus=16).values())

    draws = [allocation() for _ in range(200)]
    most_common = max(set(draws), key=draws.count)
    assert draws.count(most_common) >= 180, "a fresh batch disagrees with probability of at most about p_error"


def test_proportional_gpus_respect_the_fewest_and_use_all():
    assert proportional_gpus({"a": 1.0, "b": 9.0}, fewest={"a": 2, "b": 1}, num_gpus=10) == {"a": 2, "b": 8}
    assert proportional_gpus({"a": 1.0, "b": 1.0, "c": 2.0}, fewest=dict.fromkeys("abc", 1), num_gpus=9) == {
        "a": 2,
        "b": 2,
        "c": 5,
    }


def test_work_per_sample_follows_lengths_and_freezing():
    asked, asked_frozen = request(TWO), request(frozen(TWO, "vision"))
    full, forward_only = sample_work(asked)["vision"], sample_work(asked_frozen)["vision"]
    tokens = asked.loads.of_samples["vision"][:, 0]
    assert full[tokens == 0] == pytest.approx(0.0)
    assert np.corrcoef(tokens, full)[0, 1] > 0.99
    assert (forward_only[tokens > 0] < 0.5 * full[tokens > 0]).all()
    assert asked_frozen.trained_weights["vision"][-1] < asked.trained_weights["vision"][-1]


@pytest.mark.parametrize("num_text_tokens", [50, 300, 2000])
def test_entrain_uses_all_gpus_when_tensor_parallelism_is_fixed(num_text_tokens):
    fixed = {unit: FixedSizes(tensor_parallel_size=2, data_parallel_size=1) for unit in ("vision", "llm")}
    samples = tuple(replace(sample, num_text_tokens=num_text_tokens) for sample in request(TWO).lengths)
    assert plan_entrain(request(TWO, fixed_sizes=fixed, lengths=samples)).num_gpus == 8


def test_entrain_splits_backwards_and_runs_ahead_where_memory_allows_it():
    asked = request(TWO)
    run = plan_entrain(asked)
    assert (run.schedule, run.passes[-1]) == ("eager-1f1b", "split-backward")
    sizes = {
        unit: FixedSizes(each.tensor_parallel_size, len(each.replicas[0].stages), each.data_parallel_size)
        for unit, each in run.plan.units.items()
    }
    for memory_gb in np.geomspace(asked.cluster.memory_gb, 1e-3, 200):  # the same plan with ever less memory
        tight = plan_entrain(with_memory(request(TWO, fixed_sizes=sizes), memory_gb))
        if tight.schedule == "1f1b":
            break
    assert tight.plan == run.plan and tight.passes == run.passes


def text_only(*lengths: int) -> PlanningRequest:
    return request(TEXT_ONLY, lengths=tuple(SampleLengths(index, (), tokens, 1) for index, tokens in enumerate(lengths)))


def slowdown(asked: PlanningRequest, **shape: int) -> float:
    return slowdown_of(asked, ["llm"], **shape)


def test_uniform_lengths_slow_no_pipeline():
    assert slowdown(text_only(512, 512, 512), num_stages=8, num_microbatches=32) == 1.0


@pytest.mark.parametrize("virtual_stages", [1, 4])
def test_the_slowdown_is_that_of_a_simulation(virtual_stages):
    lengths = (*[128] * 60, *[1024] * 4)
    seconds = []
    for asked in (text_only(*lengths), text_only(*[round(sum(lengths) / len(lengths))] * 64)):
        asked = replace(asked.changed(micro_batch_size=2), num_gpus=2, global_batch_size=64)
        num_pieces = len(chain_pieces(asked, StageSize(1)))
        grid = cut_grid(asked, GridShape(StageSize(1), 2, 1, num_pieces), virtual_stages=virtual_stages)
        run = replace(grid.to_run(asked, seconds=0.0), balance="llm-only", passes=())
        found = predict_run(run, asked)
        seconds.append((found.iteration_seconds - found.update_seconds, found.ideal_seconds))
    (varied, varied_ideal), (even, even_ideal) = seconds
    waits = slowdown(
        text_only(*lengths).changed(micro_batch_size=2), num_stages=2, num_microbatches=32, num_chunks=virtual_stages
    )
    assert waits == pytest.approx(varied / varied_ideal / (even / even_ideal), rel=0.1)


def test_the_heaviest_sample_takes_as_long_as_all_its_layers():
    asked = text_only(64, 2048)
    one = asked.layer_costs
    alone, shared = (heaviest_seconds(asked, "llm", StageSize(tensor)) for tensor in (1, 4))
    longest = replace(asked, lengths=(SampleLengths(0, (), 2048, 1),))
    body = one.seconds("llm", LLM.layers[1], longest.loads.of_average("llm", 1))
    assert alone > len(LLM.layers[1:-1]) * (body.forward + body.input_gradient + body.weight_gradient)
    assert shared < alone


@pytest.mark.parametrize("size", [1, 4])
def test_a_fixed_microbatch_size_is_kept(size):
    layouts = [layout for kind in best_layouts(request(micro_batch_size=size)) for layout in kind]
    assert {layout.to_run(layout.request).micro_batch_size for layout in layouts} == {size}


def even(num_ranges):
    return [ChainRange(1.0, 2.0)] * num_ranges


def test_gathering_delays_the_first_forwards_and_reducing_follows_the_last_backwards():
    plain = chain_seconds(even(4), num_lanes=2, num_microbatches=4)
    first = [ChainRange(1.0, 2.0, gathering_seconds=5.0), *even(3)]
    assert chain_seconds(first, num_lanes=2, num_microbatches=4) == pytest.approx(plain + 5.0)
    # The first range's last backward ends the step; the last range's is long past, and hides its reduction.
    first = [ChainRange(1.0, 2.0, reducing_seconds=5.0), *even(3)]
    last = [*even(3), ChainRange(1.0, 2.0, reducing_seconds=1.0)]
    assert chain_seconds(first, num_lanes=2, num_microbatches=4) == pytest.approx(plain + 5.0)
    assert chain_seconds(last, num_lanes=2, num_microbatches=4) == pytest.approx(plain)


def test_lanes_keep_as_many_microbatches_as_the_order_of_interleaved_1f1b_says():
    states = chunks_in_flight(0, num_lanes=4, chunks=3, num_microbatches=16)
    assert states.sum(axis=1).max() == 2 * 3 + 2 * 4 + 1
    assert np.array_equal(states[-1], [0, 0, 0])
