"""Flags against each other, schedules against plans, and files with mistakes."""

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags.arguments import build_plan, choose_trained, parse_arguments
from megatron.runtime.flags.configuration import UNIT_RATES
from megatron.runtime.flags.field_flags import all_flags, whole_number
from megatron.runtime.flags.ignored_flags import IGNORED_FLAGS
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.data.length_table import uniform_lengths
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.errors import BraidError, ConfigError, ModelError
from multimodal.values.model_graph import ModelGraph
from tests.distributed.mutations.mutation import Inputs, Mutation
from tests.distributed.mutations.table import list_mutations
from tests.distributed.small_run import NUM_RANKS, working_flags, write_working_files
from tests.sanity.repository import ROOT
from tests.unit.runtime.flags.conftest import BACKBONE, ENCODER, UNITS, Parse
from tests.unit.runtime.flags.test_answers import LONG, MODELS


def test_every_row_of_the_table_names_fields_that_exist() -> None:
    names = {flag.name for flag in all_flags()}
    assert {name for row in IGNORED_FLAGS for name in (row.name, *row.because_of)} <= names


def test_units_have_rates_of_their_own_under_a_planned_plan(parse_on_base: Parse) -> None:
    settings = parse_on_base(
        "--plan auto --vision-lr 1e-5 --projector-lr 1e-2 --llm-weight-decay 0 --vision-projector-lr-warmup-iters 2"
    ).optimizer
    rates = {unit: [settings.rate(unit, name) for name in UNIT_RATES] for unit in ("vision", "language")}
    assert rates == {"vision": [1e-5, 0.01, 0, 1e-2, 0.01, 2], "language": [1e-3, 0.0, 0, 1e-2, 0.01, 0]}


def test_costs_of_units_are_declared(parse_on_base: Parse) -> None:
    config = parse_on_base("--balance orchmllm --unit-costs vision=padded-attention:0.5 language=linear")
    assert config.training.declared_costs == {
        "vision": LengthCost(CostForm.PADDED_ATTENTION, 0.5),
        "language": LengthCost(CostForm.LINEAR),
    }


def test_numbers_outside_their_bounds_are_refused(parse_on_base: Parse) -> None:
    others = [flag for flag in all_flags() if flag.name != "num_epochs"]  # stands in place of one of the base
    for flag in others:
        outside = {flag.above, flag.below, None if flag.minimum is None else flag.minimum - 1, flag.maximum and 10 * flag.maximum}
        for number in outside - {None}:
            text = f"{number:.0f}" if flag.parse is whole_number else str(number)
            with pytest.raises(ConfigError, match=rf"^{flag.flag} must be .*, found "):
                parse_on_base(f"{flag.flag} {text}")


HARMLESS_WHEN_LARGE = {
    # intervals: what is never due
    *("exit_interval", "eval_interval", "save_interval", "log_interval", "timeline_interval", "keep_last_checkpoints"),
    "save_retain_interval",
    # bounded by rules about two flags: warm-up and decay, microbatch and global batch
    *("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters", "micro_batch_size"),
    "max_image_pixels",  # itself a bound
    "profile_ranks",  # names, not counts
}


def test_every_count_has_an_upper_bound() -> None:
    """No number that is a typing error takes memory or time."""
    assert {flag.name for flag in all_flags() if flag.parse is whole_number and flag.maximum is None} == HARMLESS_WHEN_LARGE


def test_adapters_are_added_to_what_the_patterns_match(parse_on_base: Parse) -> None:
    graph = ModelGraph.from_dict({"units": UNITS})

    def adapted(line: str) -> dict[str, tuple[str, ...]]:
        found = choose_trained(graph, parse_on_base(line).model)
        return {unit.name: unit.lora.targets for unit in found.units if unit.lora is not None}

    inside = tuple(f"transformer.{name}" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    assert adapted("--lora-rank 4") == {"language": inside}
    assert adapted("--lora-rank 4 --lora-targets llm.*")["language"] == (*inside, "head.output_layer")
    assert adapted("--lora-rank 4 --lora-targets *.linear_fc? --freeze llm --lora-alpha 2") == {
        "vision": (*inside[2:], "projector.linear_fc1", "projector.linear_fc2"),
        "language": inside[2:],
    }
    assert adapted("--lora-rank 4 --lora-targets vision.projector linear_qkv") == {
        "vision": ("projector.linear_fc1", "projector.linear_fc2", inside[0]),
        "language": inside[:1],
    }


def test_what_the_model_file_freezes_stays_frozen(parse_on_base: Parse) -> None:
    config = parse_on_base("--freeze-projector vision")
    frozen = ModelGraph.from_dict({"units": {**UNITS, "vision": {**UNITS["vision"], "freeze_module": True}}})
    graph = choose_trained(frozen, config.model)
    assert graph.unit("vision").freeze_module
    assert graph.unit("vision").freeze_projector
    assert not graph.unit("language").freeze_module


class CountedLayer(TransformerLayer):
    """A kind that multimodal/model does not build."""

    can_be_built = False


def test_a_layer_that_nobody_builds_is_refused(parse_on_base: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_KINDS, "counted", CountedLayer)
    language = {**BACKBONE, "num_layers": 2, "layers": ["token_embedding", "transformer", "counted", "head"]}
    found = r"unit 'language', layers\[2\]: 'counted' can be planned and simulated but not trained yet"
    with pytest.raises(ModelError, match=found):
        parse_on_base(units={"vision": ENCODER, "language": language})


LLM, SCHEDULE_UNITS = MODELS["llm of 8 layers"], MODELS["vision, llm of 8 layers"]
BASE = "--data-path digits --lr 1e-3 --train-iters 10 --global-batch-size 8"
CLUSTER = ROOT / "examples" / "clusters" / "h100.yaml"


@pytest.mark.deep(when=lambda planner, units: planner == "braid" and units != LONG)
@pytest.mark.parametrize("planner", ["encoders-colocated", "entrain", "megatron-balanced", "optimus", "braid"])
@pytest.mark.parametrize("units", [LLM, SCHEDULE_UNITS, LONG], ids=["LLM", "one encoder", "two encoders"])
def test_what_a_planner_prescribes_is_not_refused(tmp_path: Path, planner: str, units: dict[str, Any]) -> None:
    graph = ModelGraph.from_dict({"units": units})
    cluster = Cluster.from_file(CLUSTER)
    lengths = uniform_lengths(graph, tokens=dict.fromkeys(units, 64), num_samples=1)
    request = PlanningRequest(
        graph, cluster, 6, 12, lengths, micro_batch_size=1, transformer_impl="local", time_budget_seconds=0.5
    )
    run = PLANNERS[planner](request)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    run.plan.to_file(tmp_path / "plan.yaml")
    flags = ["--model", str(tmp_path / "model.yaml"), "--plan", str(tmp_path / "plan.yaml"), *run.training_flags(CLUSTER).split()]
    config = parse_arguments([*BASE.split(), *flags], environ={"WORLD_SIZE": str(run.plan.num_ranks)})
    assert config.training.schedule == run.schedule


def test_a_plan_file_may_cut_layers_as_it_likes_but_gives_a_schedule_what_it_needs(parse_on_base: Parse, tmp_path: Path) -> None:
    parse, path = partial(parse_on_base, world_size=3, units=SCHEDULE_UNITS), tmp_path / "plan.yaml"
    config = parse("--llm-pp 2 --llm-vpp 2 --schedule interleaved-1f1b")
    build_plan(config, ModelGraph.from_file(config.model.model), 3).to_file(path)
    for schedule in ("1f1b", "interleaved-1f1b"):
        assert parse(f"--plan {path} --schedule {schedule}").training.schedule == schedule
    with pytest.raises(
        ConfigError, match=r"in the shape of a V.*give a unit such 'layers' in .*plan\.yaml, or choose --schedule zb"
    ):
        parse(f"--plan {path} --schedule zb-v")


MUTATIONS = [mutation for mutation in list_mutations() if mutation.area in ("model", "plan")]


def refusal_of(mutation: Mutation, folder: Path) -> str:
    """What the flags' parser says to the run with this mutation, in a new folder; empty where it takes it."""
    inputs = Inputs(folder, random.Random(0), working_flags(folder) | {"--data-path": folder.parent / "data" / "manifest.jsonl"})
    folder.mkdir()
    shutil.copy(folder.parent / "model.yaml", folder)
    mutation.apply(inputs)
    flags = [str(part) for pair in inputs.flags.items() for part in pair]
    try:
        parse_arguments(flags, environ={"WORLD_SIZE": str(NUM_RANKS)})
    except BraidError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("area", ["model", "plan"])
def test_every_mutation_of_a_file_is_refused_in_one_line_or_taken(area: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every fourth without --all."""
    write_working_files(tmp_path)
    wrong = []
    mutations = [mutation for mutation in MUTATIONS if mutation.area == area]
    for number, mutation in enumerate(mutations[:: 1 if pytestconfig.getoption("all") else 4]):
        message = refusal_of(mutation, tmp_path / str(number))
        is_of_a_value = "." in mutation.name and " is " not in mutation.name and mutation.names
        names = (*mutation.names, f"{area}.yaml, line" if is_of_a_value else "")
        if message and (not all(name in message for name in names) or not message.isprintable() or len(message) > 1000):
            wrong.append(f"{mutation.name}: {message}")
        if mutation.must_be_refused and not message:
            wrong.append(f"{mutation.name}: taken")
    assert not wrong, "\n".join(wrong)
