"""Profiles of steps, stragglers, and what goes to Weights & Biases."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from megatron.runtime.execution.step_clock import StepClock
from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.configuration import LoggingConfig
from megatron.runtime.generation.sample_prompts import SampleAnswer
from megatron.runtime.report.reporting import Reporter
from megatron.runtime.report.step_profile import StepProfile, Stragglers
from megatron.runtime.report.trackers import TRACKERS, TrackedRun
from multimodal.values.action import Action, ActionKind
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.unit.runtime.report.test_reporting import BALANCE, STEP

FORWARD = Action(ActionKind.FORWARD, "llm", 0, 0, 3)
MODEL = Path(__file__).parents[4] / "examples" / "digits" / "model.yaml"
BASE = f"--model {MODEL} --data-path digits --global-batch-size 8 --train-iters 1 --lr 1e-3"


def parse(flags: str) -> LoggingConfig:
    return parse_arguments([*BASE.split(), *flags.split()], environ={}).logging


def naming(clock: StepClock) -> Callable[[bool], None]:
    return partial(setattr, clock, "names_ranges")


def run_steps(profile: StepProfile, clock: StepClock, last: int) -> list[bool]:
    named = []
    for number in range(1, last + 1):
        with profile.step(number):
            clock.start_step()
            with clock.span(FORWARD):
                torch.ones(2).sum()
            named.append(clock.names_ranges)
    profile.close()
    return named


@pytest.mark.parametrize(("last", "expected"), [(5, [2, 3]), (2, [2])])
def test_torchs_profiler_sees_the_actions_of_the_chosen_steps(tmp_path: Path, last: int, expected: list[int]) -> None:
    """Also where training ends before the profile does."""
    logging = parse(f"--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --report-dir {tmp_path}")
    clock = StepClock(lane=0)
    named = run_steps(StepProfile(logging, rank=0, name_actions=naming(clock)), clock, last)
    assert [number for number, is_named in enumerate(named, 1) if is_named] == expected
    trace = json.loads((tmp_path / "profile_rank_0.json").read_text())
    assert sum(event.get("name") == "F llm/0/0/3" for event in trace["traceEvents"] if event.get("ph") == "X") == len(expected)


def test_other_ranks_profile_nothing(tmp_path: Path) -> None:
    flags = f"--profile --use-pytorch-profiler --profile-step-start 1 --profile-ranks 1 3 --report-dir {tmp_path}"
    clock = StepClock(lane=0)
    assert not any(run_steps(StepProfile(parse(flags), rank=0, name_actions=naming(clock)), clock, 3)) and not list(
        tmp_path.iterdir()
    )


def test_nsight_is_told_when_to_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for what in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, what, partial(calls.append, what))
    clock = StepClock(lane=0)
    logging = LoggingConfig(profile=True, profile_step_start=2, profile_step_end=3)
    assert run_steps(StepProfile(logging, rank=0, name_actions=naming(clock)), clock, 4) == [False, True, False, False]
    assert calls == ["start", "stop"]


def test_stragglers_are_compared_with_ranks_that_hold_the_same_layers() -> None:
    def unit(*stages: tuple[int, ...]) -> UnitPlan:
        return UnitPlan(tuple(Replica((Stage(ranks, ((0, 4),)),)) for ranks in stages))

    stragglers = Stragglers(Plan({"vision": unit((0,)), "llm": unit((1,), (2,), (3,))}))
    stragglers.add([9.0, 1.0, 1.0, 1.0])
    stragglers.add([9.0, 1.0, 3.0, 1.0])
    assert stragglers.tell() == ("stragglers: rank 2 computes longest, 2.00 times the median of the ranks with the same layers")
    stragglers.add([1.0, 1.0, 1.0, 1.5])
    assert "rank 3 computes longest, 1.50 times" in stragglers.tell(), "earlier steps are forgotten"


def test_weights_and_biases_gets_every_steps_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = SimpleNamespace(id="run", log=lambda numbers, step: seen.append((step, numbers)), finish=lambda: seen.append("finish"))
    shown = {"Table": lambda columns, data: data, "Image": lambda image: image.size}
    shown["Audio"] = lambda path: Path(path).read_bytes()
    wandb = SimpleNamespace(init=lambda **given: seen.append(given) or run, **shown)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logging = LoggingConfig(wandb_project="braid", wandb_exp_name="first", wandb_save_dir=Path("there"))
    with closing(Reporter(logging, train_iters=1, first_step=0, run_config={"lr": "0.1"})) as reporter:
        reporter.step(1, STEP, BALANCE, num_consumed_samples=8)
    started, (step, numbers), finished = seen
    assert started == {"project": "braid", "name": "first", "entity": None, "dir": "there", "config": {"lr": "0.1"}}
    assert step == 1 and numbers["train/loss"] == STEP.loss and numbers["train/tflops_per_device"] == 12.5
    assert finished == "finish"
    picture = io.BytesIO()
    Image.new("L", (16, 8)).save(picture, "PNG")
    answers = [SampleAnswer("how many", "3", "4"), SampleAnswer("draw", "", "", picture.getvalue())]
    tracker = TRACKERS["wandb_project"](logging, TrackedRun({}, False, None))
    tracker.add_answers([*answers, SampleAnswer("say", "", "", b"RIFF...")], 2)
    assert seen[-1][1].pop("samples")[0] == ["how many", "3", "4"]
    assert seen[-1] == (2, {"samples/1": (16, 8), "samples/2": b"RIFF..."})


def test_mlflow_gets_the_same_and_a_resumed_run_goes_on_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that fails costs numbers, not steps."""
    seen: list[Any] = []

    class FailedError(Exception):
        pass

    def log_metrics(numbers: dict[str, float], step: int) -> None:
        seen.append((step, numbers["train/loss"], numbers["train/data_set_loss/charts.jsonl"]))
        if step == 2:
            raise FailedError("the server is gone")

    mlflow = SimpleNamespace(
        set_experiment=lambda name: seen.append(name),
        start_run=lambda **which: seen.append(which) or SimpleNamespace(info=SimpleNamespace(run_id="run")),
        log_params=lambda settings: seen.append(settings),
        log_metrics=log_metrics,
        end_run=lambda: seen.append("end"),
        exceptions=SimpleNamespace(MlflowException=FailedError),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    logging = LoggingConfig(mlflow_experiment="braid", mlflow_run_name="first")
    data_sets, report = ["a/charts.jsonl", "b/maps.jsonl"], replace(STEP, data_set_losses={0: 1.25, 1: 1.75})
    for step in (1, 2, 3):
        how = {"train_iters": 3, "first_step": step - 1, "run_config": {"lr": "0.1"}, "save_folder": tmp_path}
        with closing(Reporter(logging, data_sets=data_sets, **how)) as reporter:
            reporter.step(step, report, BALANCE, num_consumed_samples=8)
    numbers = [(step, STEP.loss, 1.25) for step in (1, 2, 3)]
    resumed = ["braid", {"run_id": "run"}]
    assert seen[:5] == ["braid", {"run_name": "first"}, {"lr": "0.1"}, numbers[0], "end"]
    assert seen[5:] == [*resumed, numbers[1], "end", *resumed, numbers[2], "end"]


def test_a_resumed_run_goes_on_in_weights_and_biases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new one in the same folder does not."""
    seen: list[tuple[str | None, str | None]] = []

    def init(**given: Any) -> Any:
        seen.append((given.get("id"), given.get("resume")))
        return SimpleNamespace(id=f"run{len(seen)}", log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for first_step in (0, 2, 0):
        logging = LoggingConfig(wandb_project="braid")
        Reporter(logging, train_iters=4, first_step=first_step, save_folder=tmp_path / "saved").close()
    assert seen == [(None, None), ("run1", "allow"), (None, None)]
