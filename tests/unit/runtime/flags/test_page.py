"""Every field has a flag and a docstring, and docs/flags.md lists them as they are."""

import dataclasses

import pytest

from megatron.runtime.flags.configuration import GROUPS
from megatron.runtime.flags.field_flags import all_flags, field_docstrings
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
