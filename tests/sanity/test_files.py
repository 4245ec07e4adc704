"""Every file has a purpose that its name and its first line say, and none depends on the machine it was written on."""

import ast
import re

import pytest
from hypothesis import settings

from tests.sanity.repository import ROOT, found_in, list_python_files, list_text_files

NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}
OPENING = re.compile(r'(\s|#.*\n)*r?"""[^\s"]')
# Spelled so that this file does not match itself.
MACHINE_PATHS = re.compile(r"(?<![\w.$}*-])/(?:work|root|home)/[\w.]|/tmp/(?:venv)")


def test_every_module_says_what_it_is():
    modules = list_python_files("multimodal", "megatron", "tools", "benchmarks")
    assert [path for path in modules if not OPENING.match(path.read_text())] == [], "add a docstring"


def test_no_file_is_named_after_nothing():
    folders_and_files = {part for path in list_text_files() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert {name for name in folders_and_files if NAMES_THAT_SAY_NOTHING & set(re.split(r"[_\W]", name))} == set()


def test_no_file_mentions_a_path_of_some_machine():
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in list_text_files()
        for match in MACHINE_PATHS.finditer(path.read_text(errors="replace"))
    }
    assert found == set()


@pytest.mark.parametrize("line", ["cd /" + "work/main", "open('/" + "home/me/data')", "PATH=/tmp/" + "venv/bin"])
def test_planted_paths_are_found(line):
    assert MACHINE_PATHS.search(line)


def test_relative_paths_pass():
    assert not MACHINE_PATHS.search("runs/work/digits ./home/page $RUN/root/x https://example.org/home/page")


def test_no_example_of_hypothesis_has_a_deadline():
    assert settings().deadline is None
    given = re.compile(r"deadline=(?!None)\w")
    assert not [path for path in list_python_files("tests") if "settings(" in (text := path.read_text()) and given.search(text)]


def foreign_code_openings(source):
    """Return the lines that let transformers read a folder without refusing to run the programs in it."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    refusal = "trust_remote_code", "False"
    return [
        call.lineno
        for call in calls
        if call.func.attr in ("from_pretrained", "from_config")
        and refusal not in {(each.arg, ast.unparse(each.value)) for each in call.keywords}
    ]


def test_no_folder_of_transformers_may_run_its_programs():
    modules = list_python_files("multimodal", "megatron", "tools", "examples", "benchmarks")
    assert found_in(modules, foreign_code_openings, (".from_pretrained", ".from_config")) == {}, "add trust_remote_code=False"


@pytest.mark.parametrize("call", ["AutoConfig.from_pretrained(x)", "m.from_config(c, trust_remote_code=True)"])
def test_planted_openings_are_found(call):
    assert foreign_code_openings(call) == [1]
