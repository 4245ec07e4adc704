"""Reports the progress of training: progress bar or lines, JSON lines, TensorBoard, a page. Rank 0 only.

A file that cannot be written is an error before training, and a warning during it: a full disk costs reports, not steps.
"""

import errno
import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron.runtime.flags.configuration import LoggingConfig
from megatron.runtime.generation.sample_prompts import SampleAnswer
from megatron.runtime.report.json_log import JsonLog, check_log_file
from megatron.runtime.report.run_page import RunPage
from megatron.runtime.step.balance_report import BalanceMean, BalanceReport
from multimodal.schedule.chrome_trace import write_chrome_trace
from multimodal.schedule.draw import draw_timeline
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


@dataclass(frozen=True)
class EvaluationReport:
    """The model's results on held-out samples."""

    loss: float
    generator_loss: float
    """The generators' part of the loss; 0 without generators."""
    token_accuracy: float
    """Share of target tokens that greedy decoding gets right, given all tokens before."""
    answer_accuracy: float
    """Share of samples whose whole answer greedy decoding gives: each token is its first choice, given the right ones before.

    For samples with answers in words only, as tokens cannot show if an image is right; NaN without such samples.
    """


LINES_PER_BALANCE_LINE = 10
"""Lines about steps for each line about the balance of these steps."""


class Reporter:
    """The places that a training loop reports to; this one, of all ranks but the first, reports nothing."""

    def say(self, message: str) -> None:
        """Print one line for the user."""

    def say_if(self, message: str | None) -> None:
        """Print a line if there is one."""
        if message:
            self.say(message)

    def begin(self, description: str) -> None:
        """Report what will be trained, and where."""
        self.say(description)

    def step(self, number: int, report: StepReport, balance: BalanceReport, *, num_consumed_samples: int) -> None:
        """Report that a training step is done; num_consumed_samples: up to its end."""

    def evaluation(self, number: int, name: str, report: EvaluationReport) -> None:
        """Report an evaluation; name: the evaluated data."""

    def samples(self, number: int, answers: Sequence[SampleAnswer]) -> None:
        """Report the model's answers to --sample-prompts."""

    def timeline(self, number: int, timeline: Timeline) -> None:
        """Report a step's measured timeline."""

    def close(self) -> None:
        """End reporting after training."""


class ConsoleReporter(Reporter):
    """Reports to the terminal and to the files that the flags name."""

    def __init__(
        self,
        logging: LoggingConfig,
        *,
        train_iters: int,
        first_step: int,
        run_config: Mapping[str, Any] | None = None,
        save_folder: Path | None = None,
    ) -> None:
        """Open all places.

        first_step: steps that were done before this run, 0 for a new one; run_config: shown in Weights & Biases; save_folder: of
        the checkpoints, where the name of the run in Weights & Biases is kept, so that a resumed run goes on in it.

        Raises ConfigError if a file cannot be written.
        """
        self._logging, self._train_iters = logging, train_iters
        self._console = Console()
        self._warned_of: set[str] = set()
        check_places(logging)
        self._json_log = JsonLog(logging.log_json, keep_until=first_step) if logging.log_json else None
        self._page = RunPage(run_config or {})
        for entry in self._json_log.kept if self._json_log else ():
            self._page.add(entry)
        self._tensorboard: Any = None
        if logging.tensorboard_dir:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as problem:
                raise ConfigError(
                    "--tensorboard-dir needs the package tensorboard: pip install 'braid[tensorboard]'"
                ) from problem
            self._tensorboard = SummaryWriter(str(logging.tensorboard_dir))
        self._wandb: Any = None
        if logging.wandb_project:  # its own environment variables give keys and servers
            import wandb  # type: ignore[import-not-found,unused-ignore]

            names = {"project": logging.wandb_project, "name": logging.wandb_exp_name, "entity": logging.wandb_entity}
            folder = None if logging.wandb_save_dir is None else str(logging.wandb_save_dir)
            kept = None if save_folder is None else save_folder / "wandb_id"
            if kept is not None and first_step and kept.is_file():
                names |= {"id": kept.read_text().strip(), "resume": "allow"}
            self._wandb = wandb.init(**names, dir=folder, config=dict(run_config or {}))
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                self._write(f"--save {save_folder}", partial(kept.write_text, self._wandb.id))
        self._balance = BalanceMean()
        self._bar: Progress | None = None
        if logging.progress_bar and self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"), TimeElapsedColumn())
            self._bar = Progress("training", *columns, "left", TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("training", total=train_iters, completed=first_step, numbers="")
            self._bar.start()
        self._smooth_seconds: float | None = None

    def say(self, message: str) -> None:
        """Print a line (above the progress bar); if standard output is a file on a full disk, the line is lost."""
        try:
            self._console.print(message, highlight=False, markup=False, soft_wrap=True)
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def begin(self, description: str) -> None:
        """Print the description, and keep it for the page."""
        self._page.description = description
        super().begin(description)

    def step(self, number: int, report: StepReport, balance: BalanceReport, *, num_consumed_samples: int) -> None:
        """Report a step to all places."""
        self._balance.add(number, balance)
        self._log({"step": number, "num_consumed_samples": num_consumed_samples, **asdict(report), **balance.to_dict()})
        scalars = {f"train/{name}": value for name, value in asdict(report).items()}
        for unit, imbalance in balance.imbalance_after.items():
            scalars[f"busiest_replica_over_mean/{unit}"] = imbalance.replica
            scalars[f"busiest_microbatch_over_mean/{unit}"] = imbalance.microbatch
        self._add_scalars(scalars, number)
        seconds = report.step_seconds
        self._smooth_seconds = seconds if self._smooth_seconds is None else 0.9 * self._smooth_seconds + 0.1 * seconds
        if self._bar is not None:
            numbers = f"{_shown_loss(report)}  {report.tokens_per_second:,.0f} tokens/s"
            self._bar.update(self._task, advance=1, numbers=numbers)
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
            if number % (LINES_PER_BALANCE_LINE * self._logging.log_interval) == 0:
                self.say_if(self._balance.tell())

    def evaluation(self, number: int, name: str, report: EvaluationReport) -> None:
        """Report held-out results."""
        self.say(
            f"step {number}: {name}: {_shown_loss(report)}, {report.answer_accuracy:.1%} of answers right "
            f"({report.token_accuracy:.1%} of tokens)"
        )
        numbers = {key: value for key, value in asdict(report).items() if not math.isnan(value)}
        self._log({"step": number, "evaluation": name, **numbers})
        tag = name.replace(",", "").replace(" ", "_")
        self._add_scalars({f"{tag}/{key}": value for key, value in numbers.items()}, number)

    def samples(self, number: int, answers: Sequence[SampleAnswer]) -> None:
        """Report answers, each beside the expected one, to all places; images also as files in the report's folder."""
        files = [self._write_image(each, f"step_{number:08d}_{index}.png") for index, each in enumerate(answers)]
        in_words = [each for each in answers if not each.image]
        num_right = sum(each.answer == each.expected for each in in_words)
        counts = [f"{num_right} of {len(in_words)} answers are the expected ones"] if in_words else []
        if len(in_words) < len(answers):
            counts.append(f"{len(answers) - len(in_words)} images")
        self.say(f"step {number}: samples: {', '.join(counts)}")
        entries = []
        for each, file in zip(answers, files, strict=True):
            if each.image:
                behind = f": {file}" if file else ""
            else:
                behind = "" if each.answer == each.expected else f"    (expected: {each.expected})"
            self.say(f"  {each.asked}\n    -> {each.answer}{behind}")
            entry = {"asked": each.asked, "answer": each.answer, "expected": each.expected}
            entries.append({**entry, "image": file} if file else entry)
        self._log({"step": number, "samples": entries})
        images = {f"samples/{index}": Image.open(io.BytesIO(each.image)) for index, each in enumerate(answers) if each.image}
        if (tensorboard := self._tensorboard) is not None:
            told = "\n\n".join(f"{each.asked}\n\n**{each.answer}** (expected: {each.expected})" for each in answers)

            def add() -> None:
                tensorboard.add_text("samples", told, number)
                for tag, image in images.items():
                    tensorboard.add_image(tag, np.asarray(image.convert("RGB")), number, dataformats="HWC")

            self._write(f"--tensorboard-dir {self._logging.tensorboard_dir}", add)
        if (wandb := self._wandb) is not None:
            import wandb as package  # type: ignore[import-not-found,unused-ignore]

            table = package.Table(columns=list(SampleAnswer._fields[:3]), data=[list(each[:3]) for each in answers])
            shown = {tag: package.Image(image) for tag, image in images.items()}
            self._write("--wandb-project", lambda: wandb.log({"samples": table, **shown}, step=number))

    def _write_image(self, answer: SampleAnswer, name: str) -> str:
        """Write an answer's image, if it has one, into the report's folder; returns its place there, or an empty one."""
        if not answer.image or (folder := self._logging.report_dir) is None:
            return ""

        def write() -> None:
            (folder / "samples").mkdir(exist_ok=True)
            (folder / "samples" / name).write_bytes(answer.image)

        return f"samples/{name}" if self._write(f"--report-dir {folder}", write) else ""

    def timeline(self, number: int, timeline: Timeline) -> None:
        """Write the timeline for ui.perfetto.dev and tools/trace.py, and as a picture."""
        if folder := self._logging.report_dir:
            title, path = f"Measured pipeline of step {number}", folder / f"timeline_step_{number}.json.gz"
            self._write(f"--report-dir {folder}", lambda: write_chrome_trace(timeline, path))
            self._write(f"--report-dir {folder}", lambda: draw_timeline(timeline, folder / "timeline.png", title=title))

    def close(self) -> None:
        """Write the page of the run and close the files."""
        if self._bar is not None:
            self._bar.stop()
        self.say_if(self._balance.tell())
        if folder := self._logging.report_dir:
            self._write(f"--report-dir {folder}", lambda: self._page.write(folder))
        if self._json_log is not None:
            self._json_log.close()
        if self._tensorboard is not None:
            self._write(f"--tensorboard-dir {self._logging.tensorboard_dir}", self._tensorboard.close)
        if self._wandb is not None:
            self._write("--wandb-project", self._wandb.finish)

    def _log(self, entry: Mapping[str, Any]) -> None:
        self._page.add(entry)
        if (log := self._json_log) is not None:
            self._write(f"--log-json {self._logging.log_json}", lambda: log.append(entry))

    def _add_scalars(self, scalars: Mapping[str, float], number: int) -> None:
        if (wandb := self._wandb) is not None:
            self._write("--wandb-project", lambda: wandb.log(dict(scalars), step=number))
        if (tensorboard := self._tensorboard) is None:
            return

        def add() -> None:
            for name, value in scalars.items():
                tensorboard.add_scalar(name, value, number)

        if not self._write(f"--tensorboard-dir {self._logging.tensorboard_dir}", add):
            self._tensorboard = None  # its writing thread has ended
            with suppress(OSError):
                tensorboard.close()

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
