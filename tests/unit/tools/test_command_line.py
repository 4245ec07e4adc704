"""What tools share, and the small ones."""

import gzip
import importlib
import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.check_calls import all_calls, calls_in, package_of, problem_of
from benchmarks.elastic import main
from docs.figures.figure_folder import figure_folder
from multimodal.data.length_table import read_length_table
from multimodal.values.model_graph import ModelGraph
from tests.distributed.launch import REPOSITORY
from tests.sanity.repository import ROOT
from tools.index_data import main as index_data
from tools.lengths import main as write_lengths


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["draw.py", *arguments])
    return figure_folder("Draws.")


def test_a_folder_of_figures_is_made(monkeypatch, tmp_path):
    folder = tmp_path / "new" / "figures"
    assert call(monkeypatch, str(folder)) == folder and folder.is_dir()


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--hlep", 2)])
def test_a_flag_is_not_a_folder(monkeypatch, tmp_path, flag, code):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        call(monkeypatch, flag)
    assert exit_.value.code == code and not list(tmp_path.iterdir())


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


MODEL = ROOT / "examples" / "models" / "oobleck-gpt-2-medium.yaml"
CLUSTER = ROOT / "examples" / "clusters" / "a40.yaml"


@pytest.fixture
def flags(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,nodes\n600,-1\n1200,-1\n2400,+2\n")
    return [
        *("--model", str(MODEL), "--cluster", str(CLUSTER), "--num-gpus", "24", "--global-batch-size", "64"),
        *("--micro-batch-size", "1", "--uniform-lengths", "llm=512", "--trace", str(trace)),
    ]


def test_a_trace_is_simulated_beside_fresh_plans_and_restarts(flags, capsys):
    assert main([*flags, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["num_nodes"] == 6 and found["least_nodes"] == 2 and found["seconds"] == 3600
    assert len(found["changes"]) == 3 and {sum(each["nodes"]) for each in found["changes"]} == {4, 5, 6}
    assert all(not each["missing_layers"] for each in found["changes"])
    rates = found["samples_per_second"]
    assert rates["restarts"] < rates["templates"] <= rates["fresh plan"] * (1 + 1e-9)
    assert 0.95 <= found["least_share_of_fresh_plan"] <= 1 + 1e-9
    assert [span["state"] for span in found["spans"]["restarts"]] == ["train", "restart"] * 3 + ["train"]


def test_it_prints_throughput_over_time_and_draws(flags, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "elastic.png"
    assert main([*flags, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "of fresh plan" in printed and "recover" in printed and "restarts" in printed
    assert picture.stat().st_size > 1000


ANSWER = {"role": "assistant", "content": "a 7"}


def test_what_is_broken_is_listed_once_and_the_rest_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "b.png", "cut.png", "text.png"):
        Image.effect_noise((32, 32), 60).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-200])
    samples = [
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": [f"{name}.png"]}
        for name in ("a", "text", "cut", "cut", "gone", "b")
    ]
    data = tmp_path / "data.json"
    flags = ["--config", str(REPOSITORY / "examples/digits/config.yaml"), "--data-path", str(data)]

    data.write_text("\n".join(map(json.dumps, samples)))
    assert index_data(["--check", *flags]) == 2
    said = capsys.readouterr()
    for name, problem in (("text", "cannot be decoded as an image"), ("cut", "cannot be decoded"), ("gone", "does not exist")):
        assert len([line for line in said.out.splitlines() if f"{name}.png {problem}" in line]) >= 1, said.out
    assert "4 items are broken, listed above" in said.err

    data.write_text("\n".join(map(json.dumps, (samples[0], samples[-1]))))
    assert index_data(["--check", *flags]) == 0
    assert "2 samples, all of whose items can be read" in capsys.readouterr().out
    assert index_data(flags) == 0
    assert (tmp_path / ".braid-index").is_dir() and capsys.readouterr().out.endswith("2 samples\n")


DIGITS = REPOSITORY / "examples" / "digits"


def test_the_first_samples_of_a_run_are_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "lengths.csv.gz"
    flags = ["--config", str(DIGITS / "config.yaml"), "--program-samples", "500"]
    drawn = tmp_path / "lengths.png"
    assert write_lengths(["--output", str(table), "--num-samples", "40", "--png", str(drawn), *flags]) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "the lengths of 40 of 500 training samples" in capsys.readouterr().out
    samples = read_length_table(table, graph=ModelGraph.from_file(DIGITS / "model.yaml"))
    assert len(samples) == 40 and all(
        sample.items and 0 < sample.num_target_tokens < sample.num_text_tokens for sample in samples
    )
    assert gzip.decompress(table.read_bytes()).decode("utf-8-sig").splitlines()[0] == "items,text_tokens,target_tokens"
