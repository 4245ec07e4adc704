"""The checks of a GPU, as far as they can be tried without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import PATHS, ROOT, TRAINING, Check, main, read_attention, read_training, run_check
from benchmarks.rank_checks import all_rows, layouts, refusal_of
from megatron.runtime.flags.arguments import parse_arguments
from multimodal.schedule.builders import BUILDERS

STEP = {"step_seconds": 0.02, "peak_activation_bytes": 2**20}


def script(text: str) -> Check:
    return Check("group", "name", (sys.executable, "-c", text), lambda output, _: output.strip())


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "gpu_check needs a CUDA device" in capsys.readouterr().err


def test_an_outcome_is_what_the_program_says_or_how_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = run_check(script("print('fine')"), tmp_path)
    assert (good.is_good, good.result, good.end_of_output) == (True, "fine", "")
    bad = run_check(script("raise SystemExit('no kernel')"), tmp_path)
    assert (bad.is_good, bad.result, bad.end_of_output) == (False, "ended with exit code 1", "no kernel")
    monkeypatch.setattr(gpu_check, "CHECK_SECONDS", 0.5)
    late = run_check(script("import time; time.sleep(60)"), tmp_path)
    assert not late.is_good and late.result == "not done after 0 s"


def test_a_run_whose_loss_does_not_fall_is_not_good() -> None:
    steps = [STEP | {"loss": 3.0}, STEP | {"loss": 2.5}]
    assert read_training("\n".join(map(json.dumps, steps))) == "loss 3.000 -> 2.500, 20 ms a step, 1 MiB of activations"
    with pytest.raises(ValueError, match="loss 2.500 -> 3.000"):
        read_training("\n".join(map(json.dumps, steps[::-1])))


def test_attention_is_compared_mask_by_mask_with_the_better_of_braids_ways(tmp_path: Path) -> None:
    rows = [
        {"mask": mask, "num_tokens": 8192, "backend": backend, "forward_ms": forward, "backward_ms": 1.0}
        for mask, backend, forward in [
            ("causal", "FlexAttention", 2.0),
            ("causal", "Braid, unbalanced", 1.0),
            ("causal", "Braid, sub-blocks of 16", 2.0),
            ("packed", "FlexAttention", 5.0),
            ("packed", "Braid, unbalanced", 1.0),
        ]
    ]
    assert read_attention(json.dumps({"rows": rows}), tmp_path) == "3.00 times as fast in the median, 1.50 at worst"


@pytest.mark.parametrize("name", [name for name in PATHS if "Transformer" not in name])
def test_every_path_is_one_that_a_run_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    assert parse_arguments([*TRAINING, *PATHS[name]], environ={"WORLD_SIZE": "1", "RANK": "0"}).training.train_iters > 1


def test_a_training_check_runs(tmp_path: Path) -> None:
    [check] = [each for each in gpu_check.all_checks(tmp_path, is_quick=True) if each.name == "float32"]
    outcome = run_check(check, tmp_path)
    assert outcome.is_good, outcome
    assert outcome.result.startswith("loss ") and os.listdir(tmp_path)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_schedule_and_layout_is_checked_that_so_many_ranks_can_have(num_ranks: int) -> None:
    refused = {row.name: problem for row in all_rows(num_ranks) if (problem := refusal_of(row.flags, num_ranks))}
    assert {row.name for row in all_rows(num_ranks)} >= {f"schedule {name}" for name in BUILDERS} | set(layouts(num_ranks))
    assert "the model has 1" in refused.pop("schedule encoders-colocated")
    assert set(refused) == (set() if num_ranks == 8 else {"tensor and context and pipeline parallel"})


PROGRAM = """
import sys
from pathlib import Path
from benchmarks import rank_checks
from benchmarks.gpu_check import check_ranks, main
folder = Path(sys.argv[1])
names = "ZeRO-3,schedule zb-h1,schedule encoders-colocated"
code = main(["--ranks", "2", "--only", names, "--output", str(folder / "report.json")])
row = rank_checks.Row("another rate", (*rank_checks.ONE_RANK, *rank_checks.EXACT, "--lr", "1e-2"), "float64")
expected = rank_checks.losses_of(row.reference, 1, folder / "reference")
print(check_ranks("wrong", lambda: rank_checks.check_row(row, expected, 1, folder / "wrong")))
rank_checks.DEADLINE_SECONDS = 0.1
print(check_ranks("late", lambda: str(rank_checks.losses_of(row.reference, 1, folder / "late"))))
sys.exit(code)
"""


def test_ranks_are_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    """What is right passes; other losses, and a run that does not end, do not."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = (sys.executable, "-c", PROGRAM, str(tmp_path))
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "all 2 checks passed, 1 left out" in ended.stdout, ended.stdout + ended.stderr
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    good = r"losses differ from one rank's by .*; \d\d calls in a step; 0 host waits|left out"
    assert len(checks) == 3 and all(re.match(good, each["result"]) for each in checks), checks
    assert re.search(r"name='wrong', is_good=False, result=\"losses differ .*: more than 1e-09", ended.stdout), ended.stdout
    assert "rank 0: not done after 0 s" in ended.stdout
