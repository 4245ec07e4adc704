"""Every field has a flag and a docstring, docs/flags.md lists them as they are, and they offer what is registered."""

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from megatron.runtime.flags.configuration import GROUPS, ModelConfig, ParallelismConfig, TrainingConfig
from megatron.runtime.flags.field_flags import all_flags, field_docstrings, field_flags
from multimodal.attention.attention_backend import BACKEND_NAMES
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import Granularity, MicrobatchCount
from multimodal.cost.layers.layer import Implementation, Recompute
from multimodal.plan.planners.planned_run import Sharding
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from tests.sanity.flag_tables import PAGE, phrases, with_tables


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "run: python -m tests.sanity.flag_tables"
    in_one_line = " ".join(text.split())
    assert [phrase for phrase in phrases() if phrase not in in_one_line] == []


@pytest.mark.parametrize("group", GROUPS.values())
def test_every_field_has_a_docstring(group: type) -> None:
    assert set(field_docstrings(group)) == {field.name for field in dataclasses.fields(group)}
    assert all(text.endswith(".") for text in field_docstrings(group).values())


def test_no_two_groups_share_a_field() -> None:
    names = [flag.name for flag in all_flags()]
    assert len(names) == len(set(names))


def test_a_field_becomes_a_flag() -> None:
    flags = {flag.name: flag for flag in all_flags()}
    assert (flags["train_iters"].flag, flags["train_iters"].is_required) == ("--train-iters", True)
    assert (flags["progress_bar"].flag, flags["progress_bar"].opposite) == ("--no-progress-bar", "--progress-bar")
    assert flags["balance"].choices == ("none", "sorted", "llm-only", "whole-sample", "orchmllm", "disttrain", "entrain", "auto")
    assert flags["freeze"].is_list
    assert flags["model"].is_input_path
    assert flags["exit_interval"].parse is not None
    assert flags["exit_interval"].parse("3") == 3
    assert "encoder_micro_batch_sizes" not in flags


def choices(group: type, name: str) -> set[Any]:
    """What a field may be, None apart."""
    hint = get_type_hints(group)[name]
    return {choice for part in (hint, *get_args(hint)) for choice in get_args(part) if isinstance(choice, str)}


def test_balance_and_schedule_offer_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "mine", BUILDERS["1f1b"])
    monkeypatch.setitem(BALANCERS, "mine", BALANCERS["none"])
    monkeypatch.setitem(PASSES, "mine", PASSES["fill"])
    flags = {flag.name: flag for flag in field_flags("training")}
    assert flags["schedule"].choices == tuple(BUILDERS) and "mine" in flags["schedule"].choices
    assert flags["balance"].choices == tuple(BALANCERS)
    assert flags["schedule_passes"].help.endswith(f": {', '.join(PASSES)}.")


def test_other_choices_are_those_of_what_they_choose() -> None:
    assert choices(ModelConfig, "attention_backend") == set(BACKEND_NAMES)
    assert choices(ModelConfig, "attention_mask") == set(MaskMode)
    assert choices(ModelConfig, "transformer_impl") == set(get_args(Implementation))
    assert choices(ParallelismConfig, "context_parallel_distribution") == set(TokenDistribution)
    assert choices(ParallelismConfig, "data_parallel_sharding_strategy") == set(get_args(Sharding))
    assert choices(TrainingConfig, "balance_granularity") == set(Granularity)
    assert choices(TrainingConfig, "balance_num_microbatches") == set(MicrobatchCount)
    assert choices(TrainingConfig, "recompute_granularity") == set(get_args(Recompute))
