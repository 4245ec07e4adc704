"""Checks of several ranks, one GPU each over NCCL or, as a rehearsal, CPU processes over gloo: `gpu_check.py --ranks N`.

Every schedule and layout trains some steps and has the losses of one rank; what its ranks called ends in a replay; its hosts do
not wait. Ranks are forked from this process, which has imported what they need and leaves CUDA alone. Each check has a deadline.
"""

import json
import os
import pickle
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.nccl_replay import hosts_of, run_kernels
from benchmarks.recorded_calls import EventKind, Recorded, recording_calls
from megatron.runtime.flags.arguments import build_plan, parse_arguments
from megatron.runtime.flags.cross_checks import check_plan
from multimodal.cost.layers.registry import read_model
from multimodal.schedule.builders import BUILDERS, VirtualStages
from multimodal.values.action import Resource
from multimodal.values.errors import BraidError
from multimodal.values.timeline import Timeline
from tools.launch import free_port, import_for_ranks

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 240.0
NUM_STEPS = 4
BENCH_STEPS = 12
RUN = ("--config", str(ROOT / "examples/digits/config.yaml"), "--eval-iters", "0", "--num-workers", "0", "--log-interval", "1")
ONE_RANK = ("--vision-dp", "1", "--llm-pp", "1")
EXACT = ("--dtype", "float64")
TOLERANCES = {"float64": 1e-9, "bf16": 0.02, "FP8": 0.05}
"""Relative, of losses."""


@dataclass(frozen=True)
class Row:
    """A run of several ranks, and the one whose losses it has."""

    name: str
    flags: tuple[str, ...]
    kind: str
    """A key of TOLERANCES."""

    @property
    def reference(self) -> tuple[str, ...]:
        """Flags of one rank."""
        return (*ONE_RANK, *(EXACT if self.kind == "float64" else ("--bf16",)))


def layouts(num_ranks: int) -> dict[str, str]:
    """Name -> flags, of those that so many ranks can have."""
    half, pairs = num_ranks // 2, f"--vision-tp 2 --vision-dp {num_ranks // 2} --llm-pp 1 --llm-tp 2 --llm-dp {num_ranks // 2}"
    replicas = f"--colocate-units --vision-dp {num_ranks} --llm-pp 1 --llm-dp {num_ranks}"
    return {
        "replicas": replicas,
        "replicas with collectives inside": f"{replicas} --schedule-passes gather-parameters,reduce-by-layer",
        "ZeRO-3": f"{replicas} --data-parallel-sharding-strategy optim_grads_params",
        "tensor parallel": f"--colocate-units {pairs}",
        "sequence parallel": f"--colocate-units {pairs} --sequence-parallel",
        "sequence parallel overlapped": f"--colocate-units {pairs} --sequence-parallel --tp-comm-overlap",
        "context parallel": f"--colocate-units --vision-dp {num_ranks} --llm-pp 1 --llm-cp 2 --llm-dp {half}",
        "tensor and context and pipeline parallel": f"--colocate-units --vision-dp {num_ranks} --llm-pp 2 --llm-tp 2 --llm-cp 2 "
        f"--llm-dp {num_ranks // 8} --sequence-parallel",
        "units on ranks of their own": f"--vision-dp 1 --llm-pp 1 --llm-dp {num_ranks - 1}",
    }


def all_rows(num_ranks: int) -> Iterator[Row]:
    """Yield every layout and schedule; with Transformer Engine on GPUs layouts in bfloat16, and FP8, too."""
    for name, flags in layouts(num_ranks).items():
        yield Row(name, (*flags.split(), *EXACT), "float64")
    stages = f"--colocate-units --vision-dp {num_ranks} --llm-pp 2 --llm-dp {num_ranks // 2}".split()
    for name, row in BUILDERS.items():
        virtual = ("--llm-vpp", "2") if row.virtual_stages is VirtualStages.EXPECTED else ()
        yield Row(f"schedule {name}", (*stages, *virtual, "--schedule", name, *EXACT), "float64")
    yield Row("zb-h1 with fill", (*stages, "--schedule", "zb-h1", "--schedule-passes", "fill", *EXACT), "float64")
    if torch.cuda.is_available() and find_spec("transformer_engine") is not None:
        for name, flags in layouts(num_ranks).items():
            yield Row(f"{name} by Transformer Engine", (*flags.split(), "--bf16"), "bf16")
        for recipe in ("tensorwise", "delayed", "blockwise"):
            flags = layouts(num_ranks)["sequence parallel"]
            yield Row(f"FP8 {recipe}", (*flags.split(), "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe), "FP8")


def refusal_of(flags: Sequence[str], num_ranks: int) -> str | None:
    """Return why a run cannot be, if so."""
    try:
        config = parse_arguments([*RUN, "--train-iters", "1", *flags], environ={"WORLD_SIZE": str(num_ranks), "RANK": "0"})
        graph = read_model(config.model.model)
        check_plan(config, graph=graph, plan=build_plan(config, graph, num_ranks))
    except BraidError as problem:
        return str(problem)
    return None


def watch_host_waits(note: Callable[[Counter[str]], None]) -> None:
    """Call a function after each step, from now on, with the places where its actions made the host wait for the device."""
    from megatron.runtime.execution.executor import Executor

    original = Executor.execute

    def counting(self: Executor, *arguments: Any, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = original(self, *arguments, **options)
        torch.cuda.set_sync_debug_mode("default")
        note(Counter(f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)))
        return result

    Executor.execute = counting  # type: ignore[method-assign]


def _train(flags: Sequence[str], notes: Path) -> None:
    """Train on this rank; the file gets what the last step called, where its host waited, and its timelines."""
    import pretrain_mllm
    from megatron.runtime.training import loop
    from megatron.runtime.training.prediction import predict_timeline
    from megatron.runtime.training.trainer import Trainer

    noted: dict[str, Any] = {"waits": Counter()}
    if torch.cuda.is_available():
        watch_host_waits(lambda waits: noted.update(waits=waits))
    train_step, predict = Trainer.train_step, predict_timeline

    def recording(self: Trainer, *arguments: Any, **options: Any) -> Any:
        with recording_calls() as events:
            result = train_step(self, *arguments, **options)
        notes.write_bytes(pickle.dumps({**noted, "events": events}))
        return result

    def predicting(config: Any, step: Any, timeline: Timeline, *arguments: Any) -> Any:
        found = predict(config, step, timeline, *arguments)
        seconds = [each.duration_seconds for each in found.values()]
        print(f"{BENCH}{json.dumps([timeline.duration_seconds, overlap_of(timeline), *seconds])}", flush=True)
        return found

    if "--report-dir" in flags:
        patch.object(loop, "predict_timeline", predicting).start()
    else:
        Trainer.train_step = recording  # type: ignore[method-assign]
    pretrain_mllm.main([*flags])


BENCH, LEFT_OUT = "timelines: ", "left out: "


def overlap_of(timeline: Timeline) -> float:
    """Return the share of communication during which the lane computes, from 0 to 1; without communication 1."""
    hidden = total = 0.0
    resources = [(each, each.action.kind.resource) for each in timeline.events]
    for event, resource in resources:
        if resource is not Resource.COMPUTE:
            total += event.end_seconds - event.start_seconds
            for other, its in resources:
                if its is Resource.COMPUTE and other.lane == event.lane:
                    shared = min(event.end_seconds, other.end_seconds) - max(event.start_seconds, other.start_seconds)
                    hidden += max(0.0, shared)
    return hidden / total if total else 1.0


def run_ranks(flags: Sequence[str], num_ranks: int, folder: Path) -> str:
    """Run a row, and return what its first rank said; raises ValueError with the end of what ranks said that failed."""
    folder.mkdir()
    shares_gpu = torch.cuda.is_available() and torch.cuda.device_count() < num_ranks
    given = [*RUN, *flags, *(("--distributed-backend", "gloo") if shares_gpu and num_ranks > 1 else ())]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    left: dict[int, int] = {}
    for rank in range(num_ranks):
        if not (process := os.fork()):
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
            said = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(said, 1)
            os.dup2(said, 2)
            code: Any = 1
            try:
                _train(given, folder / f"{rank}.pickle")
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        left[process] = rank
    deadline, failed = time.monotonic() + DEADLINE_SECONDS, dict[int, str]()
    while left and time.monotonic() < deadline:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in left:
            rank = left.pop(process)
            failed |= {rank: f"ended with exit code {os.waitstatus_to_exitcode(status)}"} if status else {}
        elif not process:
            time.sleep(0.05)
    for process, rank in left.items():
        failed[rank] = f"not done after {DEADLINE_SECONDS:.0f} s"
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    said = {rank: (folder / f"{rank}.log").read_text(errors="replace") for rank in range(num_ranks)}
    if failed:
        ends = "\n".join(f"rank {rank}: {how}\n" + "\n".join(said[rank].splitlines()[-12:]) for rank, how in failed.items())
        raise ValueError(ends)
    return said[0]


def losses_of(flags: Sequence[str], num_ranks: int, folder: Path) -> list[float]:
    """Run some steps and return their losses."""
    log = folder.with_suffix(".jsonl")
    run_ranks([*flags, "--train-iters", str(NUM_STEPS), "--log-json", str(log)], num_ranks, folder)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def check_row(row: Row, expected: Sequence[float], num_ranks: int, folder: Path) -> str:
    """Run a row and return the result in a few words; raises ValueError if it is bad."""
    found = losses_of(row.flags, num_ranks, folder)
    worst = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    noted = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(num_ranks)]
    recorded: list[Recorded] = [each["events"] for each in noted]
    for creates_lazily in (False, True):
        stuck = run_kernels(hosts_of(recorded, creates_lazily=creates_lazily), num_queues=8).stuck
        if stuck:
            raise ValueError(f"its calls do not end in a replay: {stuck}")
    waits: Counter[str] = sum((each["waits"] for each in noted), Counter())
    num_calls = max(sum(event.kind is EventKind.CALL for event in events) for events in recorded)
    result = f"losses differ from one rank's by {worst:.1e}; {num_calls} calls in a step; {waits.total()} host waits"
    if not worst <= TOLERANCES[row.kind]:
        raise ValueError(f"{result}: more than {TOLERANCES[row.kind]:.0e}; {found}, not {expected}")
    if waits and torch.cuda.device_count() >= num_ranks:
        raise ValueError(f"{result}: {', '.join(place for place, _ in waits.most_common(6))}")
    return result


def bench_row(flags: Sequence[str], num_ranks: int, folder: Path) -> str:
    """Measure a run: its step, MFU, overlap, and the predicted step beside the measured one."""
    log, report = folder.with_suffix(".jsonl"), folder.with_suffix(".report")
    given = [*flags, "--train-iters", str(BENCH_STEPS), "--log-json", str(log), "--report-dir", str(report)]
    said = run_ranks(given, num_ranks, folder)
    steps = [json.loads(line) for line in log.read_text().splitlines()][2:]
    (line,) = [each for each in said.splitlines() if each.startswith(BENCH)]
    measured, overlap, *predicted = json.loads(line.removeprefix(BENCH))
    seconds, mfu = (statistics.median(step[name] for step in steps) for name in ("step_seconds", "mfu"))
    beside = f"predicted {1e3 * predicted[0]:.1f} ms of actions, measured {1e3 * measured:.1f}" if predicted else "not predicted"
    return f"{1e3 * seconds:.1f} ms a step, MFU {100 * mfu:.1f} %, {100 * overlap:.0f} % of communication hidden; {beside}"


def all_checks(num_ranks: int, folder: Path, *, is_bench: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check, and the function that makes it; rows that cannot be say why."""
    references: dict[tuple[str, ...], list[float]] = {}

    def compared(row: Row, place: Path) -> str:
        if row.reference not in references:
            references[row.reference] = losses_of(row.reference, 1, place.with_name(f"{place.name}-reference"))
        return check_row(row, references[row.reference], num_ranks, place)

    import_for_ranks()
    if is_bench:
        stages = f"--colocate-units --vision-dp {num_ranks} --llm-pp 2 --llm-dp {num_ranks // 2}"
        rows = {**layouts(num_ranks), "1f1b": stages, "zb-h1": f"{stages} --schedule zb-h1"}
        benched = {name: tuple(flags.split()) for name, flags in rows.items()}
        for number, (name, flags) in enumerate(benched.items()):
            if refusal_of(flags, num_ranks) is None:
                yield name, lambda flags=flags, place=folder / str(number): bench_row(flags, num_ranks, place)
        return
    for number, row in enumerate(all_rows(num_ranks)):
        if (refusal := refusal_of(row.flags, num_ranks)) is not None:
            yield row.name, lambda refusal=refusal: f"{LEFT_OUT}{refusal}"
        else:
            yield row.name, lambda row=row, place=folder / str(number): compared(row, place)
