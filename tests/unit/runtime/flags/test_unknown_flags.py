"""An unknown flag is answered by what became of it in Braid, or by the spelling that must have been meant; never by chance."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Collection
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron.runtime.flags.flag_parser import FlagParser, explain_unknown
from megatron.runtime.flags.megatron_flags import ALWAYS_ON, CALLED, IN_MODEL_FILE, KNOWN_ELSEWHERE, MULTIMODAL, NOT_AVAILABLE
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Transformer, Unit
from tests.unit.runtime.flags.conftest import BACKBONE, ENCODER

GRAPH = ModelGraph.from_dict({"units": {"vision": {**ENCODER, "image": {}}, "language": BACKBONE}})
SPELLINGS = frozenset(FlagParser(GRAPH).actions)
TABLES = (IN_MODEL_FILE, CALLED, ALWAYS_ON, NOT_AVAILABLE)
LISTED = [pattern for table in TABLES for names in table.values() for pattern in names.split()]
LIST_FLAGS = """
import argparse
from megatron.training.arguments import add_megatron_arguments
for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
    print(*action.option_strings, sep="\\n")
"""


def explain(flag: str) -> str:
    return explain_unknown(flag, spellings=SPELLINGS, graph=GRAPH)


def test_a_letter_left_out_of_a_long_flag_is_found() -> None:
    for spelling in sorted(spelling for spelling in SPELLINGS if len(spelling) > 12)[::4]:
        assert "did you mean --" in explain(spelling[:3] + spelling[4:]), spelling


def is_listed(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def test_no_flag_of_braid_is_listed_and_none_is_listed_twice() -> None:
    assert not [spelling for spelling in SPELLINGS if is_listed(spelling[2:], LISTED)]
    assert len(LISTED) == len(set(LISTED))


def test_answers_name_flags_and_keys_that_exist() -> None:
    spellings = SPELLINGS | set(FlagParser(None).actions)
    answers = [
        word.strip("();,.")
        for table in (CALLED, KNOWN_ELSEWHERE, ALWAYS_ON, NOT_AVAILABLE, MULTIMODAL)
        for words in table
        for word in words.split()
    ]
    named = [word for word in answers if word.startswith("--")]
    assert len(named) > 40
    assert set(named) <= spellings
    assert set(IN_MODEL_FILE) <= {field.name for kind in (Transformer, Unit) for field in dataclasses.fields(kind)}


def test_megatron_s_switches_freeze_units() -> None:
    flags = ["--freeze-LM", "--freeze-ViT", "--freeze", "language", "--freeze-vision-projection", "--lr", "1"]
    given = FlagParser(GRAPH).parse_given(flags)
    assert (set(given["freeze"]), given["freeze_projector"]) == ({"vision", "language"}, ("vision",))
    text = ModelGraph.from_dict({"units": {"llm": BACKBONE}})
    with pytest.raises(ConfigError, match="--freeze-ViT: the model has no encoder of images"):
        FlagParser(text).parse_given(["--freeze-ViT"])


def test_every_listed_flag_is_one_of_the_installed_megatron_s() -> None:
    if find_spec("megatron.training") is None:
        pytest.skip("this megatron-core comes without megatron.training")
    root = Path(__file__).parents[4]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.run(
        [sys.executable, "-c", LIST_FLAGS], cwd=root, env=environment, check=True, capture_output=True, text=True
    )
    installed = {line[2:] for line in shown.stdout.splitlines() if line.startswith("--")}
    assert [pattern for pattern in LISTED if not any(fnmatchcase(name, pattern) for name in installed)] == []
    unanswered = [name for name in installed if not is_listed(name, LISTED) and f"--{name}" not in SPELLINGS]
    assert len(unanswered) < len(installed) / 10
