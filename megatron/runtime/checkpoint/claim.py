"""Ensures that one run at a time writes into a folder of checkpoints, by a mark, `.writer.json`, which rank 0 keeps touching.

It is taken over if its run is gone: its process, on this machine, has ended; or it is an earlier attempt of the same job, which
Slurm requeued or torchrun started again; or nothing touched it for a minute. If none of this is certain (a recent mark of another
machine), it is watched: a touch proves that the run lives. Times are the file system's own, so clocks need not agree.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.runtime.checkpoint.folder import is_alive
from multimodal.values.errors import CheckpointError
from multimodal.values.typed_reader import Plain

MARK_NAME = ".writer.json"
_TOUCH_SECONDS = 10.0
_SILENT_SECONDS = 60.0
"""Seconds without a touch after which another run is gone."""
_ENDING_SECONDS = 5.0
"""Seconds that a process of this machine may take to end."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks at another run's mark; ranks meet after each, so that none waits long for another."""


@dataclass(frozen=True)
class Writer:
    """A run that writes, as described in its mark."""

    token: str
    """Identifies this start of the run; no two starts share it."""
    host: str
    process: int
    """Number of rank 0's process."""
    process_start: str
    """Distinguishes it from a later process with the same number."""
    machine: str
    """Scope of process numbers: a boot of a host, and a container's process table."""
    job: str
    """The job, which is started again after a failure; empty if no launcher names it."""
    attempt: tuple[int, ...]
    """Numbers of restarts."""
    started: str

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str]) -> "Writer":
        """Return this process as a writer."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            machine = socket.gethostname()
        run = environ.get("TORCHELASTIC_RUN_ID", "none")
        job = f"Slurm {environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environ else "" if run == "none" else f"torchrun {run}"
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            process=os.getpid(),
            process_start=_process_start(os.getpid()) or "",
            machine=machine,
            job=job,
            attempt=tuple(int(environ.get(f"{launcher}_RESTART_COUNT", "0")) for launcher in ("SLURM", "TORCHELASTIC")),
            started=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        )

    def continues(self, other: "Writer") -> bool:
        """True if this is a later attempt of the same job."""
        return bool(self.job) and self.job == other.job and self.attempt > other.attempt

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, started {self.started}"


class _Mark(NamedTuple):
    writer: Writer | None
    """None: it cannot be read, as while it is being written."""
    touched: float


class FolderClaim:
    """The right to write into a folder; used on rank 0 only, except for construction."""

    def __init__(self, folder: Path, *, environ: Mapping[str, str]) -> None:
        self._folder, self._path = folder, folder / MARK_NAME
        self._writer = Writer.of_this_process(environ)
        self._first_look: tuple[float, _Mark] | None = None
        self._is_released = threading.Event()

    def try_to_take(self) -> bool:
        """Take the folder if no run writes there; False: not certain yet, call it again. Raises CheckpointError or OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._create():
            mark = _read(self._path)
            if mark is None or not self._is_gone(mark):
                time.sleep(_LOOK_SECONDS)
                return False
            self._write(self._spare).replace(self._path)
        threading.Thread(target=self._keep_touching, daemon=True).start()
        return True

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the folder, which it does when this run was silent for long."""
        self._folder.mkdir(exist_ok=True)  # not its parents, which may be of a file system that is no longer mounted
        mark = _read(self._path)
        if mark is None and self._create():
            return
        if not self._owns(mark):
            raise self._occupied(mark)

    def release(self) -> None:
        """Let other runs write there."""
        self._is_released.set()
        with suppress(OSError):
            if self._owns(_read(self._path)):
                self._path.unlink()

    def _owns(self, mark: _Mark | None) -> bool:
        return mark is not None and mark.writer is not None and mark.writer.token == self._writer.token

    def _is_gone(self, mark: _Mark) -> bool:
        """Return True if the run of a mark has ended; False: uncertain yet. Raises CheckpointError if it is alive."""
        now = time.monotonic()
        self._first_look = first_time, first_mark = self._first_look or (now, mark)
        writer = mark.writer
        if writer is not None and self._writer.continues(writer):
            return True
        if writer is not None and writer.machine == self._writer.machine:
            if writer.process == os.getpid() or _process_start(writer.process) != writer.process_start:
                return True
            if now - first_time >= _ENDING_SECONDS:
                raise self._occupied(mark)
            return False
        if mark != first_mark:
            raise self._occupied(mark)
        try:
            file_system_time = self._write(self._spare).stat().st_mtime
        finally:
            self._spare.unlink(missing_ok=True)
        return max(now - first_time, file_system_time - mark.touched) >= _SILENT_SECONDS

    def _occupied(self, mark: _Mark | None) -> CheckpointError:
        return CheckpointError(
            f"--save {self._folder}: another run writes there ({mark.writer if mark and mark.writer else self._path}); give this "
            f"run another --save, or end that one first; if it has ended for certain, remove {self._path}"
        )

    @property
    def _spare(self) -> Path:
        return self._path.with_name(f"{MARK_NAME}.{self._writer.token}")

    def _create(self) -> bool:
        try:
            self._write(self._path, mode="x")
        except FileExistsError:
            return False
        return True

    def _write(self, path: Path, *, mode: str = "w") -> Path:
        with open(path, mode) as file:
            json.dump(asdict(self._writer), file)
        return path

    def _keep_touching(self) -> None:
        while not self._is_released.wait(_TOUCH_SECONDS):
            with suppress(OSError):
                if self._owns(_read(self._path)):
                    os.utime(self._path)


def _read(path: Path) -> _Mark | None:
    try:
        with open(path, "rb") as file:  # opening makes network file systems refresh the times
            content, touched = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        return _Mark(Plain(json.loads(content), "its content", CheckpointError).build(Writer), touched)
    except (ValueError, RecursionError, CheckpointError):
        return _Mark(None, touched)


def _process_start(process: int) -> str | None:
    """Return the start time of a process of this machine, in the system's units; None if it does not exist or has ended."""
    try:
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() or not is_alive(process) else ""
    except ProcessLookupError:
        return None
    return None if state in "ZX" else rest[18]
