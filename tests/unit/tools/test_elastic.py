import json

import pytest

from tests.sanity.repository import ROOT
from tools.elastic import main

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
