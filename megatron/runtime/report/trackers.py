"""Where a run's numbers and answers go: a log in JSON lines, TensorBoard, Weights & Biases and MLflow."""

import io
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from megatron.runtime.flags.configuration import LoggingConfig
from megatron.runtime.generation.sample_prompts import SampleAnswer
from multimodal.values.errors import ConfigError


class TrackedRun(NamedTuple):
    """A run, as trackers are told of it at its start."""

    settings: Mapping[str, Any]
    is_resumed: bool
    save_folder: Path | None
    """Folder of the checkpoints, where the names of runs are kept, so that a resumed run goes on in the same."""

    def kept_name(self, tracker: str) -> str | None:
        """Return the name that the interrupted run had; None: the run is new."""
        path = None if self.save_folder is None else self.save_folder / f"{tracker}_id"
        return path.read_text().strip() if path is not None and self.is_resumed and path.is_file() else None

    def keep_name(self, tracker: "Tracker") -> None:
        """Keep the name that the run has there; raises OSError."""
        if self.save_folder is not None and tracker.run_name is not None:
            self.save_folder.mkdir(parents=True, exist_ok=True)
            (self.save_folder / f"{tracker.kept_as}_id").write_text(tracker.run_name)


class Tracker(ABC):
    """A place that gets numbers and answers; all methods may raise OSError."""

    place: str
    """The flag that names it, for messages."""
    kept_as = ""
    """The beginning of the name of the file that keeps `run_name`."""
    run_name: str | None = None
    """The tracker's name of the run; None where the flag's folder says it."""
    survives_failure = True
    """False: nothing more can be added after an OSError."""

    @abstractmethod
    def add_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers of a step by their tags."""

    @abstractmethod
    def add_answers(self, answers: Sequence[SampleAnswer], step: int) -> None:
        """Add the model's answers to --sample-prompts."""

    @abstractmethod
    def close(self) -> None:
        """End the run there."""


class _TensorBoard(Tracker):
    survives_failure = False  # its writing thread has ended then

    def __init__(self, logging: LoggingConfig, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.place = f"--tensorboard-dir {logging.tensorboard_dir}"
        self._writer: Any = SummaryWriter(str(logging.tensorboard_dir))

    def add_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, step)

    def add_answers(self, answers: Sequence[SampleAnswer], step: int) -> None:
        told = (f"{each.asked}\n\n**{each.answer}** (expected: {each.expected})" for each in answers)
        self._writer.add_text("samples", "\n\n".join(told), step)
        for tag, image in _images(answers).items():
            self._writer.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")
        from scipy.io import wavfile

        for index, each in enumerate(answers):
            if each.kind == "sound":
                rate, samples = wavfile.read(io.BytesIO(each.file))
                self._writer.add_audio(f"samples/{index}", samples[None] / 2**15, step, sample_rate=rate)

    def close(self) -> None:
        self._writer.close()


class _WandB(Tracker):
    place, kept_as = "--wandb-project", "wandb"

    def __init__(self, logging: LoggingConfig, run: TrackedRun) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        self._package = wandb
        names = {"project": logging.wandb_project, "name": logging.wandb_exp_name, "entity": logging.wandb_entity}
        folder = None if logging.wandb_save_dir is None else str(logging.wandb_save_dir)
        if (kept := run.kept_name(self.kept_as)) is not None:
            names |= {"id": kept, "resume": "allow"}
        self._run = wandb.init(**names, dir=folder, config=dict(run.settings))
        self.run_name = self._run.id

    def add_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def add_answers(self, answers: Sequence[SampleAnswer], step: int) -> None:
        table = self._package.Table(columns=list(_COLUMNS), data=[list(each[: len(_COLUMNS)]) for each in answers])
        images = {tag: self._package.Image(image) for tag, image in _images(answers).items()}
        with _sound_files(answers) as paths:  # which it copies
            sounds = {tag: self._package.Audio(str(path)) for tag, path in paths.items()}
            self._run.log({"samples": table, **images, **sounds}, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow(Tracker):
    place, kept_as = "--mlflow-experiment", "mlflow"

    def __init__(self, logging: LoggingConfig, run: TrackedRun) -> None:
        import mlflow  # type: ignore[import-not-found,unused-ignore]

        self._package = mlflow
        with self._as_os_error():
            mlflow.set_experiment(logging.mlflow_experiment)
            kept = run.kept_name(self.kept_as)
            begun = mlflow.start_run(run_id=kept) if kept else mlflow.start_run(run_name=logging.mlflow_run_name)
            if not kept:
                mlflow.log_params(run.settings)
        self.run_name = begun.info.run_id

    def add_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        with self._as_os_error():
            self._package.log_metrics(dict(numbers), step=step)

    def add_answers(self, answers: Sequence[SampleAnswer], step: int) -> None:
        columns = {name: [each[index] for each in answers] for index, name in enumerate(_COLUMNS)}
        with self._as_os_error():
            self._package.log_dict(columns, f"samples/step_{step:08d}.json")
            for tag, image in _images(answers).items():
                self._package.log_image(image, f"{tag}_step_{step:08d}.png")
            with _sound_files(answers, f"_step_{step:08d}") as paths:
                for path in paths.values():
                    self._package.log_artifact(str(path), "samples")

    def close(self) -> None:
        with self._as_os_error():
            self._package.end_run()

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except self._package.exceptions.MlflowException as problem:
            raise OSError(str(problem)) from problem


TRACKERS: Mapping[str, Callable[[LoggingConfig, TrackedRun], Tracker]] = {
    "tensorboard_dir": _TensorBoard,
    "wandb_project": _WandB,
    "mlflow_experiment": _MLflow,
}
"""Flag's field -> what opens its tracker; raises ConfigError without the package, or OSError."""
_COLUMNS = SampleAnswer._fields[:3]


def _images(answers: Sequence[SampleAnswer]) -> dict[str, Image.Image]:
    found = {f"samples/{index}": each.file for index, each in enumerate(answers) if each.file and each.kind == "image"}
    return {tag: Image.open(io.BytesIO(image)) for tag, image in found.items()}


@contextmanager
def _sound_files(answers: Sequence[SampleAnswer], ending: str = "") -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        found = {f"samples/{index}": each.file for index, each in enumerate(answers) if each.kind == "sound"}
        paths = {tag: Path(folder) / f"{Path(tag).name}{ending}.wav" for tag in found}
        for tag, path in paths.items():
            path.write_bytes(found[tag])
        yield paths


class JsonLog:
    """Appends lines to --log-json."""

    def __init__(self, path: Path, *, keep_until: int) -> None:
        """Open a file, which keeps a resumed run's lines up to step `keep_until`; raises ConfigError if it cannot be written."""
        self.kept: list[dict[str, Any]] = []
        """The entries of the earlier run."""
        with _named_in_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():  # a pipe or a device keeps nothing
                self.kept = list(_entries(path, keep_until)) if keep_until else []
                # Replaced by a new file written beside it, so that a run that is killed now loses nothing.
                beside = path.resolve().with_name(f"{path.resolve().name}.new")
                beside.write_text("".join(json.dumps(entry) + "\n" for entry in self.kept))
                beside.replace(path.resolve())
            self._file = path.open("ab", buffering=0)
            self._size_bytes = os.fstat(self._file.fileno()).st_size

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line as a whole or not at all; raises OSError."""
        line = (json.dumps(entry) + "\n").encode()
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size_bytes)
            raise
        self._size_bytes += len(line)

    def close(self) -> None:
        """Close the file, which already has every line."""
        self._file.close()


def check_log_file(path: Path) -> None:
    """Raise ConfigError if the file cannot be written; its lines stay."""
    with _named_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()


@contextmanager
def _named_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ConfigError(f"--log-json {path}: cannot be written ({problem.strerror}); give another path") from problem


def _entries(path: Path, keep_until: int) -> Iterator[dict[str, Any]]:
    """Yield the readable entries of an earlier run; the last line of a killed run may be incomplete."""
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step, told = (entry.get("step"), entry.get("loss", entry.get("samples"))) if isinstance(entry, dict) else (None, None)
        if isinstance(step, int) and step <= keep_until and isinstance(told, int | float | list):
            yield entry
