"""One rank differs from the others, or fails alone: all ranks end, soon, with one message that names rank and difference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.launch import Launched, launch
from tests.distributed.small_run import MODEL, working_flags, write_working_files

PLAN_FLAGS = ("--vision-dp", "--llm-dp")
TIME_LIMIT_SECONDS = 90.0
"""Far below the ten minutes that ranks wait for each other by default; on an idle machine each ends in a few seconds."""
Prepare = Callable[[Path], Mapping[str, object]]


@dataclass(frozen=True)
class Differing:
    """What one rank of a working run is told otherwise."""

    name: str
    prepare: Prepare
    """Writes files; returns the further flags of the rank."""
    says: tuple[str, ...]
    """Parts of the message."""
    rank: int = 1
    drops: tuple[str, ...] = ()
    """Flags of the working run that are left out, on all ranks."""
    common: Prepare = lambda folder: {}
    """Further flags of all ranks."""
    environment: Mapping[str, str] = field(default_factory=dict)


def told(**flags: object) -> Prepare:
    """Nothing but other flags, written as names."""
    return lambda folder: {"--" + name.replace("_", "-"): value for name, value in flags.items()}


def other_model(folder: Path) -> Mapping[str, object]:
    """A model with wider layers."""
    changed = {"units": {**MODEL["units"], "llm": {**MODEL["units"]["llm"], "ffn_hidden_size": 96}}}
    (folder / "other.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    return {"--model": folder / "other.yaml"}


def other_data(folder: Path) -> Mapping[str, object]:
    """A manifest with one letter more, beside the first one."""
    lines = (folder / "data" / "manifest.jsonl").read_text()
    (folder / "data" / "other.jsonl").write_text(lines.replace("picture 3", "pictures 3"))
    return {"--data-path": folder / "data" / "other.jsonl"}


def same_data(folder: Path) -> Mapping[str, object]:
    """The same manifest under another name."""
    (folder / "data" / "same.jsonl").write_bytes((folder / "data" / "manifest.jsonl").read_bytes())
    return {"--data-path": folder / "data" / "same.jsonl", "--peak-tflops": 2, "--log-json": folder / "log.jsonl"}


def plan_of(folder: Path, name: str, *, vision: int, llm: int) -> Path:
    """Write a plan that puts the units on these ranks."""
    units = {
        unit: UnitPlan((Replica((Stage((rank,), ((0, size),)),)),))
        for unit, rank, size in (("vision", vision, 3), ("llm", llm, 4))
    }
    Plan(units).to_file(folder / name)
    return folder / name


def corrupt_plan(folder: Path) -> Mapping[str, object]:
    """A plan file that is no YAML."""
    (folder / "corrupt.yaml").write_text("units: [vision: {")
    return {"--plan": folder / "corrupt.yaml"}


DIFFERING = [
    Differing("learning rate", told(lr=0.01), ("rank 1 was started with --lr 0.01, rank 0 with --lr 0.001", "same flags")),
    Differing("clipping, on rank 0", told(clip_grad=0.5), ("rank 1", "--clip-grad 1.0", "rank 0 with --clip-grad 0.5"), rank=0),
    Differing("freezing", told(freeze="vision"), ("rank 1 was started with --freeze vision, rank 0 without --freeze",)),
    Differing("precision", told(dtype="float64"), ("rank 1", "--dtype float64", "rank 0 with --dtype float32")),
    Differing("length", told(train_iters=9), ("rank 1", "--train-iters 9", "rank 0 with --train-iters 2")),
    Differing("vocabulary", told(make_vocab_size_divisible_by=1), ("rank 1", "--make-vocab-size-divisible-by 1", "rank 0")),
    Differing("patience", told(distributed_timeout_minutes=0.5), ("rank 1", "--distributed-timeout-minutes 0.5")),
    Differing("backend", told(distributed_backend="gloo"), ("--distributed-backend gloo, rank 0 without",)),
    Differing("model", other_model, ("rank 1 has another model", "units.llm.ffn_hidden_size is 96, rank 0's 64", "--model")),
    Differing(
        "plan",
        lambda folder: {"--plan": plan_of(folder, "other.yaml", vision=1, llm=0)},
        ("rank 1 has another plan", "units.vision.replicas", "--plan"),
        drops=PLAN_FLAGS,
        common=lambda folder: {"--plan": plan_of(folder, "plan.yaml", vision=0, llm=1)},
    ),
    Differing("data", other_data, ("rank 1 sees other data", "training samples", "--data-path")),
    Differing("model missing on rank 1", told(model="no/such.yaml"), ("no/such.yaml", "rank 1")),
    Differing("model missing on rank 0", told(model="no/such.yaml"), ("no/such.yaml", "rank 0"), rank=0),
    Differing("corrupt plan", corrupt_plan, ("corrupt.yaml", "rank 1"), drops=PLAN_FLAGS,
              common=lambda folder: {"--plan": plan_of(folder, "plan.yaml", vision=0, llm=1)}),
    Differing("unknown flag", told(learning_rate=1), ("--learning-rate", "rank 1")),
    Differing("data missing", told(data_path="no/such.jsonl"), ("no/such.jsonl", "rank 1")),
    Differing("log on rank 0", told(log_json="/proc/none/log.jsonl"), ("/proc/none/log.jsonl", "rank 0"), rank=0),
    Differing("no number of processes", told(), ("WORLD_SIZE must be the number", "rank 1"), environment={"WORLD_SIZE": "two"}),
    Differing("number of processes", told(), ("the run has 3 processes", "rank 1"), environment={"WORLD_SIZE": "3"}),
]  # fmt: skip


def run_differing(case: Differing, folder: Path) -> Launched:
    """Launch the working run with one rank that differs."""
    write_working_files(folder)
    common = {flag: value for flag, value in working_flags(folder).items() if flag not in case.drops} | case.common(folder)
    of_rank = {0: common, 1: common, case.rank: common | case.prepare(folder)}
    return launch(
        [],
        num_ranks=2,
        timeout_seconds=TIME_LIMIT_SECONDS,
        flags_of_rank={rank: [item for pair in flags.items() for item in pair] for rank, flags in of_rank.items()},
        environment_of_rank={case.rank: case.environment},
    )


@pytest.mark.parametrize("case", DIFFERING, ids=lambda case: case.name)
def test_all_ranks_end_with_one_message_that_names_the_rank(case: Differing, tmp_path: Path) -> None:
    outcome = run_differing(case, tmp_path)
    assert outcome.exit_codes == (2, 2), outcome.output
    (message,) = [line for line in outcome.output.splitlines() if "error:" in line]
    assert all(part in message for part in case.says), message
    assert "Traceback" not in outcome.output, outcome.output
    assert "frame #" not in outcome.output, outcome.output


def test_what_changes_nothing_may_differ(tmp_path: Path) -> None:
    case = Differing("harmless", same_data, says=())
    outcome = run_differing(case, tmp_path)
    assert outcome.exit_codes == (0, 0), outcome.output
