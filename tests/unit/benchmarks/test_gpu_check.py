"""The checks of a GPU, as far as they can be tried without one."""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import PATHS, TRAINING, Check, main, read_attention, read_training, run_check
from megatron.runtime.flags.arguments import parse_arguments

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
