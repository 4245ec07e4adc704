"""What the person and the files are told, and what happens when they cannot be."""

import errno
import io
import json
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from megatron.runtime.flags.configuration import LoggingConfig
from megatron.runtime.generation.drawing import Sound
from megatron.runtime.generation.sample_prompts import SampleAnswer
from megatron.runtime.report.reporting import EvaluationReport, Reporter, StepReport, check_places
from megatron.runtime.report.trackers import JsonLog
from megatron.runtime.step.balance_report import BalanceReport
from multimodal.balance.batch_work import Imbalance
from multimodal.balance.rearrange_nodes import NodeBytes
from multimodal.values.errors import ConfigError
from multimodal.values.timeline import Timeline

STEP = StepReport(1.5, 0.0, 0.0, 2.5, 1e-3, 8, 100, 50, 0.5, 0.4, 0.05, 0.03, 0.02, 200.0, 0.1, 12.5, 1000, 2_500_000_000)
BALANCE = BalanceReport(
    {"vision": Imbalance(1.62, 2.0, 0.3), "llm": Imbalance(1.0, 1.5, 0.2)},
    {"vision": Imbalance(1.08, 1.31, 0.1), "llm": Imbalance(1.0, 1.1, 0.1)},
    assign_wait_ms=3.0,
)
Run = Callable[..., list[str]]


def _saved(what: Any, *how: str) -> bytes:
    file = io.BytesIO()
    what.save(file, *how)
    return file.getvalue()


PIXEL = _saved(Image.new("L", (1, 1)), "PNG")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Report steps as a run does; returns the lines that a person sees."""

    def report(logging: LoggingConfig, *, steps: range = range(1, 21), balance: BalanceReport = BALANCE) -> list[str]:
        with closing(Reporter(logging, train_iters=steps[-1], first_step=steps[0] - 1)) as reporter:
            for number in steps:
                reporter.step(number, STEP, balance, num_consumed_samples=8 * number)
                if number >= steps[-1] - 1:
                    reporter.timeline(number, Timeline((), ()), {})
            reporter.evaluation(steps[-1], "held out", EvaluationReport(1.0, 0.0, 0.5, math.nan))
        return capsys.readouterr().out.splitlines()

    return report


def test_every_step_has_one_line(run: Run) -> None:
    """And every tenth is followed by the balance of those since the last time, in words."""
    lines = run(LoggingConfig(log_interval=1))
    begin = r"step \d+/20  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  loss 1.5000  grad norm 2.50  "
    shown = [line for line in lines if re.match(begin, line)]
    assert "  2.5 GB  160 samples  " in shown[-1]
    assert len(shown) == 20 and len(lines) == 23
    assert lines[10] == (
        "balance of step 1-10: vision: busiest replica 1.08x the mean (before balancing 1.62x), busiest microbatch 1.31x the "
        "mean (before balancing 2.00x); llm: busiest microbatch 1.10x the mean (before balancing 1.50x); waited 3 ms a step "
        "for data"
    )
    assert lines[21].startswith("balance of step 11-20: ")


def test_the_balance_of_a_short_run_is_told_at_its_end(run: Run) -> None:
    """A mean over the steps; without a change nothing is said of before, without waiting nothing of that."""
    unchanged = BalanceReport({"llm": Imbalance(1.2, 1.3, 0.1)}, {"llm": Imbalance(1.2, 1.3, 0.1)})
    *_, last = run(LoggingConfig(log_interval=10), steps=range(5, 8), balance=unchanged)
    assert last == "balance of step 5-7: llm: busiest replica 1.20x the mean, busiest microbatch 1.30x the mean"
    *_, last = run(LoggingConfig(), steps=range(1, 2), balance=unchanged)
    assert last.startswith("balance of step 1: llm")
    assert not any("balance" in line for line in run(LoggingConfig(), balance=BalanceReport()))


def test_bytes_between_nodes_are_told_where_they_are_rearranged(run: Run) -> None:
    unchanged = {"llm": Imbalance(1.2, 1.3, 0.1)}
    balance = BalanceReport(unchanged, unchanged, node_bytes=NodeBytes(5_200_000, 3_100_000), exchanged_node_bytes=77)
    *_, last = run(LoggingConfig(log_interval=10), steps=range(5, 8), balance=balance)
    assert last.endswith("1.30x the mean; 3.1 MB a step between nodes (before rearrangement 5.2 MB)")
    assert balance.to_dict()["node_bytes"] == {"before": 5_200_000, "after": 3_100_000}
    assert balance.to_dict()["exchanged_node_bytes"] == 77
    assert "node_bytes" not in BalanceReport(unchanged, unchanged).to_dict()


def test_the_predicted_gain_of_balancing_is_told(run: Run) -> None:
    """For a shorter pipeline replicas may become less even."""
    balance = BalanceReport({"llm": Imbalance(1.1, 1.3, 0.1)}, {"llm": Imbalance(1.5, 1.3, 0.1)}, (0.08, 0.06))
    *_, last = run(LoggingConfig(log_interval=10), steps=range(5, 8), balance=balance)
    assert last.endswith("busiest microbatch 1.30x the mean; step predicted to take 0.75x as long as without balancing")
    assert balance.to_dict()["predicted_seconds"] == {"before_balancing": 0.08, "after_balancing": 0.06}


def test_what_the_longest_item_does_alone_is_told_beside_it(run: Run) -> None:
    before, after = Imbalance(1.5, 3.9, 0.4, 1.001, 3.25), Imbalance(1.0, 3.3, 0.3, 1.001, 3.25)
    *_, last = run(LoggingConfig(), steps=range(1, 2), balance=BalanceReport({"vision": before}, {"vision": after}))
    assert last == (
        "balance of step 1: vision: busiest replica 1.00x the mean (before balancing 1.50x), busiest microbatch 3.30x the mean "
        "(before balancing 3.90x, longest alone 3.25x)"
    )


def test_the_log_names_its_numbers(run: Run, tmp_path: Path) -> None:
    run(LoggingConfig(log_json=tmp_path / "log.jsonl"), steps=range(1, 3))
    first, second, last = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert (first["step"], second["step"], first["loss"], first["assign_wait_ms"]) == (1, 2, 1.5, 3.0)
    assert (first["num_consumed_samples"], second["num_consumed_samples"], first["memory_bytes"]) == (8, 16, 2_500_000_000)
    assert last == {"step": 2, "evaluation": "held out", "loss": 1.0, "generator_loss": 0.0, "token_accuracy": 0.5}
    names = ("busiest_replica_over_mean", "busiest_microbatch_over_mean", "microbatch_std_over_mean")
    names += ("longest_over_mean_replica", "longest_over_mean_microbatch")
    values = {"before_balancing": (1.62, 2.0, 0.3, 1.0, 1.0), "after_balancing": (1.08, 1.31, 0.1, 1.0, 1.0)}
    expected = {when: dict(zip(names, each, strict=True)) for when, each in values.items()}
    assert first["imbalance"]["vision"] == expected


@pytest.mark.parametrize("flag", ["tensorboard_dir", "report_dir", "log_json"])
def test_places_under_a_file_are_an_error_at_the_start(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    spelling = "--" + flag.replace("_", "-")
    for logging in (LoggingConfig(**{flag: tmp_path / "file" / "reports"}), LoggingConfig(**{flag: Path("/proc/reports")})):
        place = getattr(logging, flag)
        with pytest.raises(ConfigError, match=rf"{spelling} {place}: cannot be written.*; give another"):
            check_places(logging)
        with pytest.raises(ConfigError, match=rf"{spelling} {place}: cannot be written.*; give another"):
            Reporter(logging, train_iters=1, first_step=0)


def test_checking_changes_no_log(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("kept\n")
    check_places(LoggingConfig(log_json=tmp_path / "log.jsonl"))
    assert (tmp_path / "log.jsonl").read_text() == "kept\n"


def test_a_full_disk_is_warned_of_once_and_ends_nothing(run: Run, tmp_path: Path) -> None:
    logging = LoggingConfig(log_json=tmp_path / "log.jsonl", report_dir=tmp_path / "report", log_interval=1)
    with room_for(60):
        lines = run(logging)
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == 2
    for warning, flag in zip(warnings, (f"--log-json {logging.log_json}", f"--report-dir {logging.report_dir}"), strict=True):
        assert warning == f"warning: {flag}: cannot be written (File too large); training goes on without it"
    assert sum("grad norm" in line for line in lines) == 20
    assert (tmp_path / "log.jsonl").read_text() == ""


NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")


@NEEDS_FULL
def test_a_full_device_is_warned_of_and_not_replaced(run: Run) -> None:
    lines = run(LoggingConfig(log_json=Path("/dev/full")), steps=range(3, 6))
    full = "--log-json /dev/full: cannot be written (No space left on device)"
    assert [line for line in lines if "warning" in line] == [f"warning: {full}; training goes on without it"]
    assert Path("/dev/full").is_char_device()


@NEEDS_FULL
def test_standard_output_may_run_out_of_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        reporter = Reporter(LoggingConfig(log_interval=1, log_json=tmp_path / "log.jsonl"), train_iters=3, first_step=0)
        for number in (1, 2, 3):
            reporter.step(number, STEP, BALANCE, num_consumed_samples=8 * number)
        reporter.close()
        (tmp_path / "closed").touch()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3 and (tmp_path / "closed").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_may_run_out_of_room(run: Run, tmp_path: Path) -> None:
    """Its files are written by a thread, which ends; training does not."""
    pytest.importorskip("tensorboard", reason="the optional package 'tensorboard' is not installed")
    with room_for(500):
        lines = run(LoggingConfig(tensorboard_dir=tmp_path / "board", log_interval=1), steps=range(1, 41))
    assert sum("grad norm" in line for line in lines) == 40
    place = f"--tensorboard-dir {tmp_path / 'board'}"
    assert [line for line in lines if line.startswith("warning: ")] == [
        f"warning: {place}: cannot be written (File too large); training goes on without it"
    ]


def test_answers_go_to_the_log_and_to_all_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images and sound as files beside the page; and a resumed run keeps those of steps that are done."""
    logging = LoggingConfig(log_json=tmp_path / "log.jsonl", tensorboard_dir=tmp_path / "board", report_dir=tmp_path)
    drawn = SampleAnswer("draw one", "an image of 1x1 pixels", "", PIXEL)
    answers = [SampleAnswer("how many", "two", "two"), SampleAnswer("which", "a cat", "a dog"), drawn]
    answers.append(SampleAnswer("say one", "0.01 s of sound", "", _saved(Sound(np.zeros(160, np.float32)))))
    with closing(Reporter(logging, train_iters=4, first_step=0)) as reporter:
        reporter.samples(2, answers)
    assert capsys.readouterr().out.splitlines() == [
        "step 2: samples: 1 of 2 answers are the expected ones, 2 made",
        *("  how many", "    -> two", "  which", "    -> a cat    (expected: a dog)"),
        *("  draw one", "    -> an image of 1x1 pixels: samples/step_00000002_2.png"),
        *("  say one", "    -> 0.01 s of sound: samples/step_00000002_3.wav"),
    ]
    assert (tmp_path / "samples" / "step_00000002_2.png").read_bytes() == PIXEL
    board = b"".join(path.read_bytes() for path in (tmp_path / "board").iterdir())
    assert b"a cat" in board and b"samples/2" in board and b"samples/3" in board
    with closing(Reporter(logging, train_iters=4, first_step=2)):
        (entry,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    names = [{}, {}, {"image": "samples/step_00000002_2.png"}, {"sound": "samples/step_00000002_3.wav"}]
    words = [{"asked": each.asked, "answer": each.answer, "expected": each.expected} for each in answers]
    assert entry == {"step": 2, "samples": [one | other for one, other in zip(words, names, strict=True)]}


def test_a_resumed_log_gives_the_whole_loss_curve(run: Run, tmp_path: Path) -> None:
    logging = LoggingConfig(log_json=tmp_path / "log.jsonl", report_dir=tmp_path)
    run(logging, steps=range(1, 4))
    (tmp_path / "loss.png").unlink()
    run(replace(logging), steps=range(3, 6))
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(entry["step"], "evaluation" in entry) for entry in entries] == [
        *((step, False) for step in range(1, 6)),
        (5, True),
    ], "the evaluation behind step 3 is not kept, as that step is done again"
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_the_page_of_a_run_is_one_file_with_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pictures are inside, and nothing that it holds is taken for HTML; a resumed run's has what was before, too."""
    logging = LoggingConfig(log_json=tmp_path / "log.jsonl", report_dir=tmp_path)
    with closing(Reporter(logging, train_iters=9, first_step=0, run_config={"lr": 0.1})) as reporter:
        reporter.begin("vision: dp 2 <x pp 1>")
        reporter.step(1, STEP, BALANCE, num_consumed_samples=8)
        reporter.evaluation(1, "charts", EvaluationReport(1.25, 0.0, 0.5, math.nan))
        assert "step 1: charts: loss 1.2500, 50.0% of tokens right" in capsys.readouterr().out, "no answer is in words alone"
        drawn = SampleAnswer("draw", "an image of 1x1 pixels", "", PIXEL)
        reporter.samples(1, [SampleAnswer("how <many>", "two", "three"), drawn])
        reporter.timeline(1, Timeline((), ()), {"predicted": Timeline((), ())})
    with closing(Reporter(logging, train_iters=9, first_step=1)) as reporter:
        reporter.begin("llm: dp 4")
        reporter.step(2, replace(STEP, loss=1.0), BALANCE, num_consumed_samples=16)
    page = (tmp_path / "index.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == [
        *("Loss", "Throughput", "Balance", "Timeline of the last measured step", "Evaluations", "Answers after step 1", "Plan")
    ]
    assert page.count('src="data:image/png;base64,') == 5 and not re.search('(src|href)="(?!data:|timeline.html)|url[(]', page)
    assert '"title": "predicted"' in (tmp_path / "timeline.html").read_text()
    assert (
        "<title>Braid: 2 steps, loss 1.0000</title>" in page and "<td>charts</td><td>1.2500</td><td>0.5000</td><td></td>" in page
    )
    assert "<td>how &lt;many&gt;</td><td>two</td><td>three</td>" in page and "<pre>llm: dp 4</pre>" in page


def entry(step: int) -> dict[str, object]:
    return {"step": step, "loss": 1 / step, "text": "x" * 20}


def write(path: Path, steps: range, *, keep_until: int = 0) -> None:
    log = JsonLog(path, keep_until=keep_until)
    for step in steps:
        log.append(entry(step))
    log.close()


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond; the system then refuses to write as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    with patch.object(sys, "dont_write_bytecode", True):  # Python would leave what it imports now in part, for every later import
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_new_run_starts_anew_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    write(path, range(1, 4))
    write(path, range(1, 6))
    assert read(path) == [entry(step) for step in range(1, 6)]
    log = JsonLog(path, keep_until=3)
    assert [kept["step"] for kept in log.kept] == [1, 2, 3]
    log.append(entry(4))
    assert read(path) == [entry(step) for step in range(1, 5)]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 4, "lo',
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]\n",
        b'{"loss": 1}\n',
        b'{"step": "4", "loss": 1}\n',
        b'{"step": 2}\n',
    ],
)
def test_what_is_no_entry_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """The last line of a run that was killed, and whatever else got in."""
    path = tmp_path / "log.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes() + torn)
    write(path, range(4, 6), keep_until=3)
    assert read(path) == [entry(step) for step in range(1, 6)]


def test_a_line_that_does_not_fit_is_undone(tmp_path: Path) -> None:
    """When there is room again, later lines follow whole ones."""
    path = tmp_path / "log.jsonl"
    log = JsonLog(path, keep_until=0)
    log.append(entry(1))
    with room_for(path.stat().st_size + 10), pytest.raises(OSError) as problem:
        log.append(entry(2))
    assert problem.value.errno == errno.EFBIG
    log.append(entry(3))
    assert read(path) == [entry(1), entry(3)]


def test_a_link_keeps_leading_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "log.jsonl")
    write(tmp_path / "log.jsonl", range(1, 4))
    write(tmp_path / "link.jsonl", range(3, 5), keep_until=2)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert read(tmp_path / "log.jsonl") == [entry(step) for step in range(1, 5)]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path, tmp_path / "file" / "log.jsonl", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=f"--log-json {wrong}: cannot be written .*; give another path"):
            JsonLog(wrong, keep_until=0)
