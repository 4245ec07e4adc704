"""Calls of packages fit the signatures of those that are installed; test_transformer_engine.py has those of its versions."""

import importlib
from pathlib import Path

import pytest

from tools.check_calls import all_calls, calls_in, package_of, problem_of


@pytest.mark.parametrize(("package", "fewest"), [("megatron.core", 40), ("triton", 100)])
def test_calls_fit_what_is_installed(package: str, fewest: int) -> None:
    if package == "triton" and importlib.util.find_spec(package) is None:
        pytest.skip("triton is not installed")
    calls = [call for call in all_calls() if package_of(call) == package]
    assert len(calls) >= fewest and not [found for found in map(problem_of, calls) if found is not None]


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
