"""What predicted steps are told of a run, and the warnings that a run has of its predictions."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from benchmarks.baselines import COMPARED, WITHOUT_FED_ENCODERS
from megatron.runtime.flags.arguments import build_plan, parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.orchestrator import machine
from megatron.runtime.training import prediction
from megatron.runtime.training.prediction import (
    LeastMemory,
    build_predictor,
    check_memory,
    describe_better_pair,
    describe_small_batch,
    estimate,
    least_memory,
)
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.plan.planners.search.run_variants import fitting_schedules, formed
from multimodal.plan.plans_of_sizes import plan_colocated, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache, build_schedule
from multimodal.schedule.builders import BUILDERS, fed_encoders
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.plan.planners.planning_cases import CLUSTER, GRAPHS, request
from tests.unit.runtime.training.conftest import open_example

WIDE = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 1024}
SHAPE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
IMAGE = {"patch_size": 14, "merge_size": 2}


def read_run(folder: Path, line: str, shape: Mapping[str, int], *, units: int, world_size: int) -> tuple[RunConfig, ModelGraph]:
    both = {"vision": {"role": "encoder", **shape, "image": IMAGE}, "llm": {"role": "backbone", **shape}}
    (folder / "model.yaml").write_text(yaml.safe_dump({"units": dict([*both.items()][-units:])}, sort_keys=False))
    flags = f"--model {folder}/model.yaml --data-path digits --lr 1e-3 --train-iters 1 {line}"
    config = parse_arguments(flags.split(), environ={"WORLD_SIZE": str(world_size)})
    return config, ModelGraph.from_file(config.model.model)


def options_of(tmp_path: Path, line: str) -> RunOptions:
    config, graph = read_run(tmp_path, f"--global-batch-size 2 {line}", SHAPE, units=1, world_size=2)
    plan = plan_disaggregated(graph, sizes=config.parallelism.units, world_size=2)
    return build_predictor(config, ScheduleCache(graph, plan, BUILDERS["1f1b"]), vocab_size=128).options


@pytest.mark.parametrize(
    ("line", "num_parts"), [("", 1), ("--tp-comm-overlap", 4), ("--tp-comm-overlap --tp-comm-overlap-parts 6", 6)]
)
def test_overlapped_parts(tmp_path: Path, line: str, num_parts: int) -> None:
    options = options_of(tmp_path, f"--llm-tp 2 {line}")
    assert options.num_overlapped_parts == num_parts
    assert options.transformer_impl == "local"


@pytest.mark.parametrize(
    ("line", "zero_stage"), [("", 1), ("--dtype float64", 0), ("--data-parallel-sharding-strategy optim_grads_params", 3)]
)
def test_what_replicas_share(tmp_path: Path, line: str, zero_stage: int) -> None:
    assert options_of(tmp_path, f"--llm-dp 2 {line}").zero_stage == zero_stage


def test_layer_costs_replace_what_follows_from_the_machine(tmp_path: Path) -> None:
    """A step is predicted to take as long as its layers were measured to take; costs of another model are refused."""
    curves = LayerCurves(Quadratic(1.0), Quadratic(2.0), Quadratic(4.0))

    def write(unit: str) -> str:
        profile = LayerProfile("", "", {(unit, kind, 1, 1): curves for kind in ("token_embedding", "transformer", "head")})
        profile.to_file(tmp_path / f"{unit}.yaml")
        return f"--global-batch-size 2 --balance auto --layer-costs {tmp_path}/{unit}.yaml"

    config, graph = read_run(tmp_path, write("llm"), SHAPE, units=1, world_size=2)
    plan = plan_disaggregated(graph, sizes=config.parallelism.units, world_size=2)
    options = BalanceOptions(predictor=build_predictor(config, ScheduleCache(graph, plan, BUILDERS["1f1b"]), vocab_size=128))
    lengths = [SampleLengths(index, (), 20, 20) for index in range(2)]
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=options)
    assert options.predictor is not None
    without_input_gradient = 1.0 + 4.0  # the embedding
    assert options.predictor.predict(assignment, lengths).least_seconds == 5 * 7.0 + without_input_gradient
    with pytest.raises(ConfigError, match="the layer costs list 'token_embedding' of unit 'other', which the model lacks"):
        read_run(tmp_path, write("other"), SHAPE, units=1, world_size=2)


def warning_of(tmp_path: Path, line: str) -> str | None:
    """Return what is said of a batch in which every other sample has a large image, on two ranks that units share."""
    config, graph = read_run(tmp_path, f"--global-batch-size 8 --colocate-units {line}", WIDE, units=2, world_size=2)
    plan = plan_colocated(graph, sizes=config.parallelism.units, world_size=2)
    schedules = ScheduleCache(graph, plan, BUILDERS[config.training.schedule])
    items = [(ItemLengths("vision", 1024, 256),) if index % 2 == 0 else () for index in range(8)]
    lengths = [SampleLengths(index, each, 20, 20) for index, each in enumerate(items)]
    return describe_better_pair(config, lengths, predictor=build_predictor(config, schedules, vocab_size=128))


def test_a_pair_that_is_clearly_worse_is_named_with_both_figures(tmp_path: Path) -> None:
    found = warning_of(tmp_path, "--balance none")
    pattern = (
        r"warning: with --balance none and --schedule 1f1b the first global batch is predicted to take (\S+) s, "
        r"with --balance whole-sample (\S+) s; change that flag, or leave it to --balance auto"
    )
    figures = re.fullmatch(pattern, found or "")
    assert figures and float(figures[1]) > 1.2 * float(figures[2])
    assert warning_of(tmp_path, "--balance whole-sample") is None
    assert warning_of(tmp_path, "--balance auto") is None


class Samples:
    """Every eighth sample has a large image, or all have the same."""

    def __init__(self, *, is_skewed: bool) -> None:
        self.is_skewed = is_skewed

    def __len__(self) -> int:
        return 64

    def lengths(self, index: int) -> SampleLengths:
        has_image = not self.is_skewed or index % 8 == 0
        return SampleLengths(index, (ItemLengths("vision", 4096, 1024),) if has_image else (), 700, 700)


def warning_of_size(tmp_path: Path, line: str, *, is_skewed: bool = True) -> str | None:
    """Return what is said of global batches whose proportions of work are not stable."""
    config, graph = read_run(tmp_path, f"--vision-dp 4 {line}", SHAPE, units=2, world_size=8)
    plan = plan_disaggregated(graph, sizes=config.parallelism.units, world_size=8)
    return describe_small_batch(config, Samples(is_skewed=is_skewed), graph=graph, plan=plan)  # type: ignore[arg-type]


def test_a_batch_below_b_min_is_named_with_the_number(tmp_path: Path) -> None:
    found = warning_of_size(tmp_path, "--llm-pp 4 --global-batch-size 8") or ""
    assert found.startswith("warning: the units' shares of the work differ from one global batch of 8 samples")
    number = int(found.partition("it takes ")[2].split()[0])
    assert number > 8
    assert warning_of_size(tmp_path, f"--llm-pp 4 --global-batch-size {number}") is None


def test_nothing_is_said_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    """All samples alike; one rank for each unit of a replica; lengths that only decoding tells."""
    assert warning_of_size(tmp_path, "--llm-pp 4 --global-batch-size 8", is_skewed=False) is None
    assert warning_of_size(tmp_path, "--llm-dp 4 --global-batch-size 8") is None
    assert warning_of_size(tmp_path, "--llm-pp 4 --global-batch-size 8 --lengths-from decode") is None


SOME_PLANNERS = ("disttrain", "megatron", "megatron-balanced", "optimus", "encoders-colocated")


def is_deep(model: str, planner: str, recompute: str | None) -> bool:
    """Tell most rows of all, so that each planner and each model has one left, in turn with recomputation."""
    number = SOME_PLANNERS.index(planner)
    return list(GRAPHS).index(model) != number or (recompute is None) != (number % 2 == 0)


@pytest.mark.deep(when=is_deep)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("planner", SOME_PLANNERS)
@pytest.mark.parametrize("model", GRAPHS)
def test_it_is_below_the_simulated_peak_under_every_schedule(model: str, planner: str, recompute: str | None) -> None:
    if fed_encoders(GRAPHS[model]) and planner in WITHOUT_FED_ENCODERS:
        pytest.skip("the planner has no plan for it")
    asked = request(GRAPHS[model], transformer_impl="local", micro_batch_size=1)
    found = COMPARED[planner](asked)
    shares = []
    for schedule, row in fitting_schedules(found, asked):
        run = formed(found, (schedule, "none"), asked)
        if run is None or (schedule == "encoders-colocated" and planner != "encoders-colocated"):
            continue
        options = BalanceOptions(vocab_size=asked.vocab_size)
        assignment = BALANCERS["none"](asked.lengths, graph=asked.graph, plan=run.plan, options=options)
        run_options = RunOptions(recompute, transformer_impl="local")
        costs = ModelCosts(
            assignment.shape(asked.graph, run.plan), assignment, asked.lengths, CLUSTER, asked.vocab_size, run_options
        )
        simulated = simulate_schedule(build_schedule(row.with_costs(costs), costs.shape, costs=costs), costs)
        for lane, ranks in enumerate(run.plan.lanes):
            peak = simulated.peak_total_bytes[lane]
            least = sum(least_memory(costs.memory, rank=ranks[0], schedule=row))
            assert 0 < least <= peak * (1 + 1e-9), (schedule, lane)
            shares.append(least / peak)
    assert shares and max(shares) > 0.6


def estimates(example: str, line: str, *, num_ranks: int) -> tuple[ModelGraph, list[LeastMemory]]:
    config, inputs = open_example(line, example=example, num_ranks=num_ranks)
    plan = build_plan(config, inputs.graph, num_ranks)
    return inputs.graph, [estimate(config, inputs, plan, rank=rank, num_copies=None) for rank in range(num_ranks)]


@pytest.mark.parametrize(("example", "num_ranks"), [("digits", 4), ("digits_generator", 2)])
@pytest.mark.parametrize("more", ["", "--lengths-from decode"])
def test_an_example_needs_its_weights_and_little_more(example: str, num_ranks: int, more: str) -> None:
    graph, needed = estimates(example, f"--dtype float32 {more}", num_ranks=num_ranks)
    num_weights = sum(
        describe_layer(graph, unit, kind, vocab_size=384).num_held_weights for unit in graph.units for kind in unit.layers
    )
    least = num_weights * (4 + 4 + 8)  # weights, gradients and two moments, each on one rank at least
    assert least <= sum(each.state_bytes for each in needed) < 3 * least
    assert all(sum(each) < 1e9 for each in needed)
    assert more or all(each.activation_bytes > 0.05 * each.state_bytes for each in needed)


@pytest.mark.parametrize(
    ("line", "free", "says"),
    [
        ("", 1e6, "raise the parallel sizes (such as --llm-tensor-model-parallel-size"),
        ("--micro-batch-size 32 --vision-dp 1 --llm-pp 3", 1e7, "add --recompute-granularity full, or lower --micro-batch-size"),
        ("--vision-dp 1 --llm-pp 1", 1e6, "add --data-parallel-sharding-strategy optim_grads_params"),
    ],
)
def test_a_rank_without_memory_is_refused(line: str, free: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, inputs = open_example(line, num_ranks=4)
    plan = build_plan(config, inputs.graph, 4)
    check_memory(config, inputs, plan, rank=3, num_copies=None)
    monkeypatch.setattr(prediction, "free_memory_bytes", lambda: free)
    with pytest.raises(ConfigError, match=r"rank 3 needs at least .* GB are free; .*--allow-low-memory") as problem:
        check_memory(config, inputs, plan, rank=3, num_copies=None)
    assert says in str(problem.value)


def test_ranks_of_a_node_share_what_it_has_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_node_bytes", lambda: 8_000)
    found = []
    for num_ranks in (1, 4):
        monkeypatch.setattr(machine, "ranks_on_node", lambda count=num_ranks: count)
        found.append(machine.free_memory_bytes())
    assert found == [8_000, 2_000]
