"""Runs over one corpus in each form that data have, killed between steps and resumed by other numbers of ranks and workers."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.forked_programs import DIES_BEFORE
from tests.distributed.launch import launch
from tests.distributed.small_run import LEFT_OUT, train, working_flags, write_working_files
from tests.unit.data.forms.test_sample_files import FORMS, write_form

NAMES = [f"{index}.png" for index in range(4)]
STEPS = {"--train-iters": 5, "--lr-decay-style": "constant", "--dtype": "float64"}
PACKED = {"--seq-length": 60, "--packing-seq-length": 60, "--global-batch-size": 1, "--micro-batch-size": 1}
SHOWN = {("rows.parquet", False), ("shards/train", False), ("manifest.jsonl", True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    write_working_files(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[bool, dict[int, float]]:
    """Losses by step, of samples and of packed sequences, never interrupted."""
    path = write_form(folder / "data", "llava.json", NAMES)
    return {
        is_packed: losses(train(folder, {**STEPS, **flags, "--data-path": path})[0])
        for is_packed, flags in ((False, {}), (True, PACKED))
    }


def losses(entries: list[dict[str, Any]]) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in entries}


@pytest.mark.deep(when=lambda form, is_packed: (form, is_packed) not in SHOWN)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_is_killed_goes_on_as_if_it_was_not(
    form: str, is_packed: bool, folder: Path, expected: dict[bool, dict[int, float]], tmp_path: Path
) -> None:
    flags = {**working_flags(folder), **STEPS, **(PACKED if is_packed else {}), "--log-json": tmp_path / "log.jsonl"}
    flags |= {"--data-path": write_form(folder / "data", form, NAMES), "--save": tmp_path / "saved", "--save-interval": 1}
    done = launch(flags, num_ranks=2, environment={DIES_BEFORE: "3"})
    assert done.exit_codes == (-signal.SIGKILL,) * 2, done.output
    before = losses([json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()])
    resumed = {"--load": tmp_path / "saved", "--num-workers": 2, "--vision-dp": LEFT_OUT, "--llm-dp": 1}
    behind = losses(train(folder, {**flags, **resumed}, num_ranks=1)[0])
    assert min(behind) >= 2 and {*before, *behind} == {1, 2, 3, 4, 5}
    for step, loss in (before | behind).items():
        assert loss == pytest.approx(expected[is_packed][step], rel=0, abs=1e-9)
