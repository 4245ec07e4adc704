"""The checks of a GPU, as far as they can be tried without one."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import PATHS, TRAINING, Check, main, read_attention, read_training, run_check
from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.rank_checks import all_rows, layouts, refusal_of
from megatron.runtime.flags.arguments import parse_arguments
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.schedule.builders import BUILDERS
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.distributed.launch import HANG_SECONDS, Forked

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


@pytest.mark.deep(when=lambda num_ranks: num_ranks == 2)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_schedule_and_layout_is_checked_that_so_many_ranks_can_have(num_ranks: int) -> None:
    refused = {row.name: problem for row in all_rows(num_ranks) if (problem := refusal_of(row.flags, num_ranks))}
    assert {row.name for row in all_rows(num_ranks)} >= {f"schedule {name}" for name in BUILDERS} | set(layouts(num_ranks))
    assert "the model has 1" in refused.pop("schedule encoders-colocated")
    assert set(refused) == (set() if num_ranks == 8 else {"tensor and context and pipeline parallel"})


REHEARSAL = """
import sys
from pathlib import Path
from benchmarks import rank_checks
from benchmarks.gpu_check import check_ranks, main
folder = Path(sys.argv[1])
code = main(["--ranks", "2", "--only", "schedule zb-h1,schedule encoders-colocated", "--output", str(folder / "report.json")])
row = rank_checks.Row("one rank", (*rank_checks.ONE_RANK, *rank_checks.EXACT), "float64")
other = [1.0] * rank_checks.NUM_STEPS
print(check_ranks("wrong", lambda: rank_checks.check_row(row, other, 1, folder / "wrong")))
rank_checks.DEADLINE_SECONDS = 0.1
print(check_ranks("late", lambda: str(rank_checks.losses_of(row.reference, 1, folder / "late"))))
sys.exit(code)
"""


@pytest.mark.deep  # whoever has a GPU runs it
def test_ranks_are_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    """What is right passes; other losses, and a run that does not end, do not."""
    rehearsal = Forked("-c", (REHEARSAL, str(tmp_path)), {"CUDA_VISIBLE_DEVICES": ""}, output=tmp_path / "said")
    assert rehearsal.wait(HANG_SECONDS) == 0 and "all 1 checks passed, 1 left out" in rehearsal.said, rehearsal.said
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    good = r"losses differ from one rank's by .*; \d\d calls in a step; 0 host waits|left out"
    assert len(checks) == 2 and all(re.match(good, each["result"]) for each in checks), checks
    assert re.search(r"name='wrong', is_good=False, result=\"losses differ .*: more than 1e-09", rehearsal.said), rehearsal.said
    assert "rank 0: not done after 0 s" in rehearsal.said


MOST = {"forward": 48, "backward": 72}
"""Operations that a layer more may add to an action."""
MOST_OF_ENDS = 50
"""Those of an action beside its layers': embedding, projector, head, loss."""
MOST_OF_LOSS = 20
"""Of 8k tokens over 152k ids on CUDA, with its gradient, collectives counted."""


def test_actions_launch_no_more_than_they_did() -> None:
    from benchmarks.launches import measure  # imports much of torch

    rows = measure([])
    assert 2 < rows["loss of 8k tokens on CUDA"]["operations"] <= MOST_OF_LOSS < rows["loss of 8k tokens by torch"]["operations"]
    for action, most in MOST.items():
        for unit in ("vision", "llm"):
            row = rows[f"{action} of {unit}"]
            assert 0 < row["of a layer"] <= most
            assert row["operations"] - 4 * row["of a layer"] <= MOST_OF_ENDS


def test_calibration_meets_the_measured_step_with_the_plan_that_was_made() -> None:
    graph = read_model("cornstarch-vlm-s")
    sizes = {unit: FixedSizes(2, 2, 1) for unit in graph.unit_names}
    sample = SampleLengths(0, (ItemLengths("vision", 1024, 256),), 512, 512)
    setup = Setup("megatron", graph, (sample,), 8, 8, sizes)
    given = read_cluster("a40")
    target = 1.7 * setup.simulate(given).iteration_seconds
    cluster = setup.calibrate(given, measured_seconds=target)
    assert setup.predict(setup.plan(given), cluster).iteration_seconds == pytest.approx(target, rel=1e-4)
    assert 1 / 2.5 < cluster.efficiency / given.efficiency < 1 / 1.7, "links are as they were, so computing slows by more"
