"""The tool that measures a run's data: what it writes is what the run's planner would see."""

import gzip
from pathlib import Path

import pytest

from multimodal.data.length_table import read_length_table
from multimodal.values.model_graph import ModelGraph
from tests.distributed.launch import REPOSITORY
from tools.lengths import main

DIGITS = REPOSITORY / "examples" / "digits"


def test_the_first_samples_of_a_run_are_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "lengths.csv.gz"
    assert main(["--output", str(table), "--num-samples", "40", "--config", str(DIGITS / "config.yaml")]) == 0
    assert "the lengths of 40 of 32000 training samples" in capsys.readouterr().out
    samples = read_length_table(table, graph=ModelGraph.from_file(DIGITS / "model.yaml"))
    assert len(samples) == 40 and all(
        sample.items and 0 < sample.num_target_tokens < sample.num_text_tokens for sample in samples
    )
    assert gzip.decompress(table.read_bytes()).decode("utf-8-sig").splitlines()[0] == "items,text_tokens,target_tokens"
