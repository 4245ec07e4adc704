"""A small elastic run under its supervisor, whose ranks a test kills, and the losses that it logs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron.runtime.recovery.ledger import Ledger, open_ledger
from multimodal.cost.layers.registry import read_model
from multimodal.plan.planners.templates import template_set as sets
from tests.distributed.launch import HANG_SECONDS, REPOSITORY, Forked, Started, read_steps
from tests.distributed.small_run import working_flags, write_working_files
from tools.launch import free_port

TOKEN = "the secret of elastic test runs"


@dataclass(frozen=True)
class Nodes:
    count: int
    gpus: int = 1
    fault_tolerance: int = 1
    sizes: tuple[int, ...] = (1,)
    """Nodes of each template."""
    replicas: tuple[int, ...] = ()
    """Nodes of each replica at the start; by default all of the first template."""
    replicas_per_copy: int = 1
    """Replicas that share a copy of the optimizer state."""


def write_templates(path: Path, model: Path, nodes: Nodes, *, num_microbatches: int) -> None:
    """Write templates of one stage for each GPU, the first of which has the encoder and more."""
    graph = read_model(model)
    num_layers = sum(len(unit.layers) for unit in graph.units)
    replicas = nodes.replicas or nodes.sizes[:1] * (nodes.count // nodes.sizes[0])
    chain = tuple(sets.ChainUnit(unit.name, len(unit.layers)) for unit in graph.units)
    instances = tuple(sets.Instance(size, num_microbatches // len(replicas)) for size in replicas)
    templates = tuple(sets.PipelineTemplate(size, 1, 0.01, stages_of(size, nodes.gpus, num_layers)) for size in nodes.sizes)
    counts = (nodes.count, nodes.gpus, sets.Tolerance(nodes.fault_tolerance, nodes.replicas_per_copy), 1, num_microbatches, None)
    found = sets.TemplateSet(*counts, chain, (1000,) * num_layers, instances, templates)
    found.to_file(path)


def stages_of(num_nodes: int, gpus: int, num_layers: int) -> tuple[sets.TemplateStage, ...]:
    num_stages = num_nodes * gpus
    bounds = [0, *range(num_layers - num_stages, num_layers - 1), num_layers]
    return tuple(
        sets.TemplateStage(first, end - 1, 1, index // gpus, 0.001, 0.002) for index, (first, end) in enumerate(pairwise(bounds))
    )


def read_losses(folder: Path) -> dict[int, float]:
    """Return the losses that a run in this folder has logged; fails where a step is there twice."""
    entries = read_steps(folder / "log.jsonl")
    assert len({entry["step"] for entry in entries}) == len(entries), "a step is logged twice"
    return {entry["step"]: entry["loss"] for entry in entries}


class ElasticRun:
    def __init__(
        self,
        folder: Path,
        nodes: Nodes,
        *,
        inputs: Path | None = None,
        num_steps: int,
        batch: int = 8,
        flags: Sequence[object] = (),
        environment: Mapping[str, str] | None = None,
        is_new_program: bool = True,
    ) -> None:
        """is_new_program: start the supervisor as scripts/elastic.sh does; else fork it, which saves seconds of imports."""
        self.folder, self.nodes = folder, nodes
        given = inputs or folder
        if not (given / "model.yaml").exists():
            write_working_files(given)
        write_templates(folder / "templates.yaml", given / "model.yaml", nodes, num_microbatches=batch)
        values = {name: value for name, value in working_flags(given).items() if not name.endswith("-dp")}
        values |= {"--plan": folder / "templates.yaml", "--global-batch-size": batch, "--train-iters": num_steps}
        values |= {"--dtype": "float64", "--log-json": folder / "log.jsonl", "--log-interval": 1, "--elastic-timeout": 30}
        values |= dict(zip(flags[::2], flags[1::2], strict=True))
        self.port = free_port()
        (folder / "token").write_text(TOKEN)
        where = f"--port {self.port} --token {folder / 'token'} --nodes {nodes.count} --nproc-per-node {nodes.gpus}".split()
        words = [str(word) for pair in values.items() for word in pair]
        command = [*where, str(REPOSITORY / "pretrain_mllm.py"), "--elastic", *words]
        variables = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", **(environment or {})}
        self._processes: list[Started | Forked] = []
        """The supervisor, which keeps the store unless the process behind it does."""
        if is_new_program:
            argv = ["megatron.runtime.recovery.supervisor", "--keeps-store", *command]
            self._processes.append(Started("-m", argv, variables, output=folder / "output"))
        else:  # a process that forks ranks has one thread
            keeper = Forked("keeper of the store", [*where, "--keeps-store"])
            self._processes += [Forked("supervisor", command, variables, output=folder / "output"), keeper]
        self._ledger: Ledger | None = None
        self._seen = {entry["step"]: (0.0, entry["step_seconds"]) for entry in read_steps(folder / "log.jsonl")}
        self._recoveries: list[dict[str, float]] = []
        self._last_sign = time.monotonic()
        self.longest_silence = 0.0
        """Seconds between two steps in the log, or until the first one."""

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = open_ledger("127.0.0.1", self.port, TOKEN.encode())
        return self._ledger

    def processes(self, node: int) -> list[int]:
        return [int(each) for each in (self.ledger.flag(f"processes/{node}") or ":").partition(":")[2].split(",")]

    def kill(self, node: int, local_rank: int = 0) -> float:
        """Kill a rank; returns when."""
        now = time.time()
        with suppress(ProcessLookupError):
            os.kill(self.processes(node)[local_rank], signal.SIGKILL)
        return now

    def freeze_store(self, number: int = signal.SIGSTOP) -> None:
        """Stop the program that keeps the store, and is the only supervisor; or with SIGCONT let it go on."""
        os.kill(self._processes[0].pid, number)

    def let_return(self, node: int) -> None:
        incarnation = (self.ledger.flag(f"processes/{node}") or ":").partition(":")[0]
        self.ledger.set_flag(f"return/{node}/{incarnation}")

    def losses(self) -> dict[int, float]:
        return read_losses(self.folder)

    def step_times(self) -> list[tuple[float, float]]:
        """Return when each step was first seen in the log, by this process, and its seconds."""
        known = len(self._seen)
        for entry in read_steps(self.folder / "log.jsonl"):
            self._seen.setdefault(entry["step"], (time.time(), entry["step_seconds"]))
        if len(self._seen) > known:
            now = time.monotonic()
            self.longest_silence, self._last_sign = max(self.longest_silence, now - self._last_sign), now
        return list(self._seen.values())

    def recoveries(self) -> list[dict[str, float]]:
        """Return what the first rank told of recoveries so far: when each phase ended."""
        return [each for each in self.recoveries_of_nodes() if each["rank"] == 0]

    def recoveries_of_nodes(self) -> list[dict[str, float]]:
        while (event := self.ledger.next_event(seconds=0.0)) is not None:
            if event.pop("kind") == "recovered":
                self._recoveries.append(event)
        return list(self._recoveries)

    def wait_for_step(self, step: int, *, seconds: float = HANG_SECONDS) -> None:
        """Wait until a step is in the log; fails where none is added for so many seconds."""
        self.wait_until(lambda: max(self.losses(), default=0) >= step, f"step {step}", seconds=seconds)

    def wait_until(self, has_happened: Callable[[], bool], what: str, *, seconds: float = HANG_SECONDS) -> None:
        """Wait for something; fails where no step is added to the log for so many seconds."""
        since = time.monotonic()
        while not has_happened():
            self.step_times()
            code = self._processes[0].poll()
            assert code is None, f"ended with {code} before {what}:\n{self.output}"
            silence = time.monotonic() - max(since, self._last_sign)
            assert silence < seconds, f"no {what}, and no step in {seconds:.0f} s:\n{self.output}"
            time.sleep(0.02)

    def wait(self, *, seconds: float = HANG_SECONDS) -> int:
        """Wait for the end; returns the exit code. Raises TimeoutExpired when no step is added to the log for so many seconds."""
        since = time.monotonic()
        while (silence := time.monotonic() - max(since, self._last_sign)) < seconds:
            self.step_times()
            with suppress(subprocess.TimeoutExpired):
                return self._processes[0].wait(0.05)
        raise subprocess.TimeoutExpired("an elastic run", silence)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def output(self) -> str:
        return self._processes[0].said
