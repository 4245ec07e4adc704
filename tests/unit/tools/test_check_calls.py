"""Calls of packages fit the signatures of those that the tests run with, and of every version of Transformer Engine."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_on_cpu.install import FOLDER
from tools.check_calls import ROOT, all_calls, calls_in, package_of, problem_of

VERSIONS = sorted(Path(os.environ.get(FOLDER, "none")).glob("*/"))
SEEN_BY_ENGINE = """
import sys
from pathlib import Path
from tests.engine_on_cpu.install import install
install(Path(sys.argv[1]))
from tools.check_calls import main
sys.exit(main(["--require", "transformer_engine"]))
"""


@pytest.mark.parametrize(("package", "fewest"), [("megatron.core", 40), ("triton", 100)])
def test_calls_fit_what_is_installed(package: str, fewest: int) -> None:
    if package == "triton" and importlib.util.find_spec(package) is None:
        pytest.skip("triton is not installed")
    calls = [call for call in all_calls() if package_of(call) == package]
    assert len(calls) >= fewest and not [found for found in map(problem_of, calls) if found is not None]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_calls_fit_every_version_of_transformer_engine(folder: Path) -> None:
    found = subprocess.run([sys.executable, "-c", SEEN_BY_ENGINE, folder], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and "transformer_engine: not" not in found.stdout, found.stdout + found.stderr


def test_a_call_that_does_not_fit_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from megatron.core.transformer import spec_utils as specs\n"
        "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec as spec, gone\n"
        "spec(qk_layernorm=True), spec(no_such=True), gone(1), specs.build_module(*[]), specs.build_module()\n"
    )
    problems = [found for found in map(problem_of, calls_in(program)) if found is not None]
    assert [found.partition("(")[0].rpartition(".")[2] for found in problems] == [
        "get_gpt_layer_with_transformer_engine_spec",
        "gone",
        "build_module",
    ]
    assert "no_such=) in program.py:3: got an unexpected keyword argument 'no_such'; the signature is (" in problems[0]
