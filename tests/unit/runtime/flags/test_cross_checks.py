"""What rules about flags say beyond messages, which are in test_answers.py."""

import pytest

from megatron.runtime.flags.arguments import choose_trained
from megatron.runtime.flags.configuration import UNIT_RATES
from megatron.runtime.flags.field_flags import all_flags, whole_number
from megatron.runtime.flags.ignored_flags import IGNORED_FLAGS
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import ModelGraph
from tests.unit.runtime.flags.conftest import BACKBONE, ENCODER, UNITS, Parse


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
