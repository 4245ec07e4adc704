"""Reports the progress of training, on rank 0: bar or lines, JSON lines, TensorBoard, a page. A full disk costs reports only."""

import errno
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron.runtime.flags.configuration import LoggingConfig
from megatron.runtime.generation.sample_prompts import SampleAnswer
from megatron.runtime.report.run_page import TIMELINE_PAGE, RunPage
from megatron.runtime.report.trackers import TRACKERS, JsonLog, TrackedRun, Tracker, check_log_file
from megatron.runtime.step.balance_report import BalanceMean, BalanceReport
from multimodal.schedule.chrome_trace import write_chrome_trace, write_timeline_page
from multimodal.schedule.draw import draw_timelines
from multimodal.values.errors import ConfigError
from multimodal.values.timeline import Timeline


@dataclass(frozen=True)
class StepReport:
    """The results of a training step, the same on all ranks; seconds are means over ranks, `step_seconds` the slowest rank's."""

    loss: float
    """The trained loss: the mean over the LLM's target tokens, plus every generator's mean over its values."""
    generator_loss: float
    """The generators' part of the loss; 0 without generators."""
    load_balancing_loss: float
    """The loss that balances experts, in addition to `loss`: the mean over sequences and layers; 1 is even, 0 without experts."""
    grad_norm: float
    learning_rate: float
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float
    optimizer_seconds: float
    tokens_per_second: float
    mfu: float
    tflops_per_device: float
    """The model's FLOPs over the step's time and all devices."""
    peak_activation_bytes: int
    """The largest of all ranks, as the next."""
    memory_bytes: int
    """The most memory that a rank has had so far: reserved on its GPU, or resident on the CPU."""
    data_set_losses: Mapping[int, float] = field(default_factory=dict)
    """Number of a data set of the mixture -> mean over its target tokens; empty: a single data set."""


@dataclass(frozen=True)
class EvaluationReport:
    """The model's results on held-out samples; losses as in `StepReport`."""

    loss: float
    generator_loss: float
    token_accuracy: float
    """Share of target tokens that greedy decoding gets right, given all tokens before."""
    answer_accuracy: float
    """Share of samples whose whole answer greedy decoding gives: each token is its first choice, given the right ones before.

    For samples with answers in words only, as tokens cannot show if an image is right; NaN without such samples.
    """
    data_set_losses: Mapping[int, float] = field(default_factory=dict)


LINES_PER_BALANCE_LINE = 10
"""Lines about steps for each line about the balance of these steps."""


class Silence:
    """The reporter of all ranks but the first: whatever it is told, it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Reporter:
    """Reports to the terminal and to the files that the flags name."""

    def __init__(
        self,
        logging: LoggingConfig,
        *,
        train_iters: int,
        first_step: int,
        run_config: Mapping[str, Any] | None = None,
        save_folder: Path | None = None,
        data_sets: Sequence[str] = (),
    ) -> None:
        """Open all places; raises ConfigError if a file cannot be written.

        first_step: steps that were done before this run; run_config: shown in Weights & Biases; save_folder: of the checkpoints,
        where trackers' names of the run are kept, for a resumed run; data_sets: the paths of a mixture, in order.
        """
        self._logging, self._train_iters = logging, train_iters
        names = [Path(path).name for path in data_sets]
        self._data_sets = [path if names.count(name) > 1 else name for path, name in zip(data_sets, names, strict=True)]
        self._console = Console()
        self._warned_of: set[str] = set()
        check_places(logging)
        self._json_log = JsonLog(logging.log_json, keep_until=first_step) if logging.log_json else None
        self._page = RunPage(run_config or {})
        for entry in self._json_log.kept if self._json_log else ():
            self._page.add(entry)
        run = TrackedRun(run_config or {}, is_resumed=bool(first_step), save_folder=save_folder)
        self._trackers = [tracker(logging, run) for flag, tracker in TRACKERS.items() if getattr(logging, flag)]
        for tracker in self._trackers:
            self._write(f"--save {save_folder}", partial(run.keep_name, tracker))
        self._balance = BalanceMean()
        self._bar: Progress | None = None
        if logging.progress_bar and self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"), TimeElapsedColumn())
            self._bar = Progress("training", *columns, "left", TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("training", total=train_iters, completed=first_step, numbers="")
            self._bar.start()
        self._smooth_seconds: float | None = None

    def say(self, message: str | None) -> None:
        """Print a line, if there is one, above the progress bar; if standard output is a file on a full disk, it is lost."""
        if not message:
            return
        try:
            self._console.print(message, highlight=False, markup=False, soft_wrap=True)
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def begin(self, description: str) -> None:
        """Report what will be trained, and where: print it, and keep it for the page."""
        self._page.description = description
        self.say(description)

    def step(self, number: int, report: StepReport, balance: BalanceReport, *, num_consumed_samples: int) -> None:
        """Report a training step to all places; num_consumed_samples: up to its end."""
        self._balance.add(number, balance)
        entry = self._entry(report)
        self._log({"step": number, "num_consumed_samples": num_consumed_samples, **entry, **balance.to_dict()})
        scalars = _tags("train", entry)
        for unit, imbalance in balance.imbalance_after.items():
            scalars[f"busiest_replica_over_mean/{unit}"] = imbalance.replica
            scalars[f"busiest_microbatch_over_mean/{unit}"] = imbalance.microbatch
        self._track(lambda tracker: tracker.add_numbers(scalars, number))
        seconds = report.step_seconds
        self._smooth_seconds = seconds if self._smooth_seconds is None else 0.9 * self._smooth_seconds + 0.1 * seconds
        if self._bar is not None:
            shown = f"{_shown_loss(report)}  {report.tokens_per_second:,.0f} tokens/s"
            self._bar.update(self._task, advance=1, numbers=shown)
        if number % self._logging.log_interval == 0 or number == self._train_iters:
            left = (self._smooth_seconds or 0.0) * (self._train_iters - number)
            self.say(
                f"step {number}/{self._train_iters}  {datetime.now():%Y-%m-%d %H:%M:%S}  "
                f"{_shown_loss(report)}  grad norm {report.grad_norm:.2f}  "
                f"lr {report.learning_rate:.2e}  {report.step_seconds * 1000:.0f} ms  {report.tokens_per_second:,.0f} tokens/s  "
                f"{report.tflops_per_device:.3g} TFLOP/s a device (MFU {report.mfu:.1%})  "
                f"{report.memory_bytes / 1e9:.1f} GB  {num_consumed_samples:,} samples  "
                f"left {int(left // 60)}:{int(left % 60):02d}"
            )
            self.say(_shown_losses(entry))
            if number % (LINES_PER_BALANCE_LINE * self._logging.log_interval) == 0:
                self.say(self._balance.tell())

    def evaluation(self, number: int, name: str, report: EvaluationReport) -> None:
        """Report an evaluation; name: the evaluated data."""
        entry = {key: value for key, value in self._entry(report).items() if isinstance(value, dict) or not math.isnan(value)}
        answers = f"{report.answer_accuracy:.1%} of answers right ({report.token_accuracy:.1%} of tokens)"
        right = f"{report.token_accuracy:.1%} of tokens right" if math.isnan(report.answer_accuracy) else answers
        self.say(f"step {number}: {name}: {_shown_loss(report)}, {right}")
        self.say(_shown_losses(entry))
        self._log({"step": number, "evaluation": name, **entry})
        self._track(lambda tracker: tracker.add_numbers(_tags(name, entry), number))

    def samples(self, number: int, answers: Sequence[SampleAnswer]) -> None:
        """Report answers to --sample-prompts, each beside the expected one; images and sound also as files of the report."""
        suffix = {"image": "png", "sound": "wav"}
        files = [self._write_file(each, f"step_{number:08d}_{index}.{suffix[each.kind]}") for index, each in enumerate(answers)]
        in_words = [each for each in answers if not each.file]
        num_right = sum(each.answer == each.expected for each in in_words)
        counts = [f"{num_right} of {len(in_words)} answers are the expected ones"] if in_words else []
        if len(in_words) < len(answers):
            counts.append(f"{len(answers) - len(in_words)} made")
        self.say(f"step {number}: samples: {', '.join(counts)}")
        entries = []
        for each, file in zip(answers, files, strict=True):
            if each.file:
                behind = f": {file}" if file else ""
            else:
                behind = "" if each.answer == each.expected else f"    (expected: {each.expected})"
            self.say(f"  {each.asked}\n    -> {each.answer}{behind}")
            entry = {"asked": each.asked, "answer": each.answer, "expected": each.expected}
            entries.append({**entry, each.kind: file} if file else entry)
        self._log({"step": number, "samples": entries})
        self._track(lambda tracker: tracker.add_answers(answers, number))

    def _write_file(self, answer: SampleAnswer, name: str) -> str:
        """Write what a generator answered, if it did, into the report's folder; returns its place there, or an empty one."""
        if not answer.file or (folder := self._logging.report_dir) is None:
            return ""

        def write() -> None:
            (folder / "samples").mkdir(exist_ok=True)
            (folder / "samples" / name).write_bytes(answer.file)

        return f"samples/{name}" if self._write(f"--report-dir {folder}", write) else ""

    def timeline(self, number: int, timeline: Timeline, predicted: Mapping[str, Timeline]) -> None:
        """Write a measured timeline for ui.perfetto.dev and tools/trace.py, as a picture, and as a page below predicted ones."""
        if folder := self._logging.report_dir:
            title, path = f"Measured pipeline of step {number}", folder / f"timeline_step_{number}.json.gz"
            self._write(f"--report-dir {folder}", lambda: write_chrome_trace(timeline, path))
            self._write(f"--report-dir {folder}", lambda: draw_timelines({title: timeline}, folder / "timeline.png"))
            both = {**predicted, title: timeline}
            self._write(f"--report-dir {folder}", lambda: write_timeline_page(both, folder / TIMELINE_PAGE))

    def close(self) -> None:
        """Write the page of the run and close the files."""
        if self._bar is not None:
            self._bar.stop()
        self.say(self._balance.tell())
        if folder := self._logging.report_dir:
            self._write(f"--report-dir {folder}", lambda: self._page.write(folder))
        if self._json_log is not None:
            self._json_log.close()
        self._track(lambda tracker: tracker.close())

    def _log(self, entry: Mapping[str, Any]) -> None:
        self._page.add(entry)
        if (log := self._json_log) is not None:
            self._write(f"--log-json {self._logging.log_json}", lambda: log.append(entry))

    def _track(self, add: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            if not self._write(tracker.place, partial(add, tracker)) and not tracker.survives_failure:
                self._trackers.remove(tracker)
                with suppress(OSError):
                    tracker.close()

    def _entry(self, report: StepReport | EvaluationReport) -> dict[str, Any]:
        """Return a report as it is logged: data sets by their names, and left out if there is only one."""
        entry = asdict(report)
        if losses := entry.pop("data_set_losses"):
            entry["data_set_losses"] = {self._data_sets[number]: loss for number, loss in losses.items()}
        return entry

    def _write(self, place: str, write: Callable[[], object]) -> bool:
        """Write, if that must not end training when it fails; returns True on success, and warns of each place once."""
        try:
            write()
        except OSError as problem:
            if place not in self._warned_of:
                self._warned_of.add(place)
                self.say(f"warning: {place}: cannot be written ({problem.strerror or problem}); training goes on without it")
            return False
        return True


def _shown_loss(report: StepReport | EvaluationReport) -> str:
    part = f" (generators {report.generator_loss:.4f})" if report.generator_loss else ""
    return f"loss {report.loss:.4f}{part}"


def _shown_losses(entry: Mapping[str, Any]) -> str:
    """Return a line about the losses of data sets; empty if there is one only."""
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in entry.get("data_set_losses", {}).items())
    return f"  loss by data set: {losses}" if losses else ""


def _tags(prefix: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """Return an entry's numbers under tags that all trackers take."""
    losses = {f"data_set_loss/{name}": loss for name, loss in entry.get("data_set_losses", {}).items()}
    numbers = {name: value for name, value in entry.items() if name != "data_set_losses"}
    return {re.sub(r"[^\w./-]+", "_", f"{prefix}/{name}"): value for name, value in {**numbers, **losses}.items()}


def check_places(logging: LoggingConfig) -> None:
    """Create the folders for reports; raises ConfigError if one cannot be created or written to."""
    folders = {"--tensorboard-dir": logging.tensorboard_dir, "--report-dir": logging.report_dir}
    for flag, folder in folders.items():
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
                    probe.write(b"a full disk takes no byte")
        except OSError as problem:
            raise ConfigError(f"{flag} {folder}: cannot be written to ({problem.strerror}); give another folder") from problem
    if logging.log_json:
        check_log_file(logging.log_json)
