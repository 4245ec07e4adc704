"""Tells the person and the files how training goes: progress bar or lines, JSON lines, TensorBoard, pictures. Rank 0 only."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron.runtime.balance_report import BalanceReport
from megatron.runtime.configuration import LoggingConfig
from megatron.runtime.trainer import EvaluationReport, StepReport
from multimodal.schedule.draw import draw_timeline
from multimodal.values.errors import ConfigError
from multimodal.values.timeline import Timeline


class Reporter(Protocol):
    """What a training loop tells of itself."""

    def say(self, message: str) -> None:
        """One line for the person."""

    def step(self, number: int, report: StepReport, balance: BalanceReport) -> None:
        """A training step is done."""

    def evaluation(self, number: int, name: str, report: EvaluationReport) -> None:
        """An evaluation is done; name: on what."""

    def timeline(self, number: int, timeline: Timeline) -> None:
        """A step's measured timeline."""

    def close(self) -> None:
        """Training is over."""


class SilentReporter:
    """What all ranks but the first report to."""

    def say(self, message: str) -> None:
        """Nothing."""

    def step(self, number: int, report: StepReport, balance: BalanceReport) -> None:
        """Nothing."""

    def evaluation(self, number: int, name: str, report: EvaluationReport) -> None:
        """Nothing."""

    def timeline(self, number: int, timeline: Timeline) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class ConsoleReporter:
    """Reports to the terminal and to the files that the flags name."""

    def __init__(self, logging: LoggingConfig, *, train_iters: int, first_step: int) -> None:
        """first_step: steps that were done before this run, 0 for a new one. Raises ConfigError when a file cannot be written."""
        self._logging, self._train_iters = logging, train_iters
        self._console = Console()
        self._losses: list[tuple[int, float]] = []
        self._json_file = _open_log(logging.log_json, keep_until=first_step, losses=self._losses) if logging.log_json else None
        self._tensorboard = _open_tensorboard(logging.tensorboard_dir) if logging.tensorboard_dir else None
        if logging.report_dir:
            logging.report_dir.mkdir(parents=True, exist_ok=True)
        self._bar = (
            _Bar(self._console, total=train_iters, done=first_step)
            if logging.progress_bar and self._console.is_terminal
            else None
        )
        self._smooth_seconds: float | None = None

    def say(self, message: str) -> None:
        """Print a line (above the progress bar)."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def step(self, number: int, report: StepReport, balance: BalanceReport) -> None:
        """Count a step everywhere."""
        self._losses.append((number, report.loss))
        if self._json_file is not None:
            self._json_file.write(json.dumps({"step": number, **asdict(report), **balance.to_dict()}) + "\n")
            self._json_file.flush()
        if self._tensorboard is not None:
            for name, value in asdict(report).items():
                self._tensorboard.add_scalar(f"train/{name}", value, number)
            for unit, imbalance in balance.imbalance_after.items():
                self._tensorboard.add_scalar(f"imbalance/{unit}", imbalance.replica, number)
        seconds = report.step_seconds
        self._smooth_seconds = seconds if self._smooth_seconds is None else 0.9 * self._smooth_seconds + 0.1 * seconds
        if self._bar is not None:
            self._bar.advance(report)
        elif number % self._logging.log_interval == 0 or number == self._train_iters:
            self.say(self._line(number, report))
            self.say(f"    {balance.describe()}")

    def evaluation(self, number: int, name: str, report: EvaluationReport) -> None:
        """Report held-out results."""
        self.say(
            f"step {number}: {name}: {_shown_loss(report)}, {report.answer_accuracy:.1%} of answers right "
            f"({report.token_accuracy:.1%} of tokens)"
        )
        if self._tensorboard is not None:
            for key, value in asdict(report).items():
                self._tensorboard.add_scalar(f"{name}/{key}", value, number)

    def timeline(self, number: int, timeline: Timeline) -> None:
        """Write the timeline as JSON and as a picture."""
        if self._logging.report_dir:
            timeline.to_file(self._logging.report_dir / f"timeline_step_{number}.json")
            draw_timeline(timeline, self._logging.report_dir / "timeline.png", title=f"Measured pipeline of step {number}")

    def close(self) -> None:
        """Draw the loss curve and close the files."""
        if self._bar is not None:
            self._bar.stop()
        if self._logging.report_dir and self._losses:
            draw_loss_curve(self._losses, self._logging.report_dir / "loss.png")
        if self._json_file is not None:
            self._json_file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> "ConsoleReporter":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _line(self, number: int, report: StepReport) -> str:
        left = (self._smooth_seconds or 0.0) * (self._train_iters - number)
        return (
            f"step {number}/{self._train_iters}  {_shown_loss(report)}  grad norm {report.grad_norm:.2f}  "
            f"lr {report.learning_rate:.2e}  "
            f"{report.step_seconds * 1000:.0f} ms  {report.tokens_per_second:,.0f} tokens/s  MFU {report.mfu:.1%}  "
            f"left {int(left // 60)}:{int(left % 60):02d}"
        )


class _Bar:
    """The progress bar: loss, tokens/s, time left."""

    def __init__(self, console: Console, *, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=total, completed=done, numbers="")
        self._progress.start()

    def advance(self, report: StepReport) -> None:
        """One step more."""
        self._progress.update(self._task, advance=1, numbers=f"{_shown_loss(report)}  {report.tokens_per_second:,.0f} tokens/s")

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()


def _shown_loss(report: StepReport | EvaluationReport) -> str:
    part = f" (generators {report.generator_loss:.4f})" if report.generator_loss else ""
    return f"loss {report.loss:.4f}{part}"


def draw_loss_curve(losses: list[tuple[int, float]], path: Path) -> None:
    """Loss by step as PNG, with its running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = zip(*losses, strict=True)
    axes.plot(steps, values, linewidth=0.6, color="#9ab8d8", label="each step")
    axes.plot(steps, _running_mean(values), linewidth=1.8, color="#1f4e8c", label="running mean")
    axes.set(xlabel="step", ylabel="loss per target token", title="Training loss", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _running_mean(values: tuple[float, ...]) -> list[float]:
    width = max(1, len(values) // 40)
    return [statistics.fmean(values[max(0, last - width) : last]) for last in range(1, len(values) + 1)]


def _open_log(path: Path, *, keep_until: int, losses: list[tuple[int, float]]) -> Any:
    """Open for appending, after dropping what a resumed run will do again; a new run starts an empty file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if keep_until and path.exists():
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # the last line of a run that was killed
                    continue
                if entry["step"] <= keep_until:
                    kept.append(line)
                    losses.append((entry["step"], entry["loss"]))
        path.write_text("".join(line + "\n" for line in kept))
        return path.open("a")
    except OSError as problem:
        raise ConfigError(f"--log-json {path}: cannot be written ({problem.strerror}); give another path") from problem


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise ConfigError("--tensorboard-dir needs the package tensorboard: pip install 'braid[tensorboard]'") from problem
    return SummaryWriter(str(folder))
