"""Checks Braid on one CUDA device in about ten minutes: kernels, training on every path, hardware queues, host synchronisation.

./scripts/gpu_check.sh [--output FILE.json] [--only tests,queues,...] [--quick]
./scripts/gpu_check.sh --ranks 8 [--bench] [--only NAME,...]    several ranks: rank_checks.py
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # ranks are forked from here: CUDA must not start
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import rank_checks
from benchmarks.rank_checks import watch_host_waits
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import ConfigError
from tools.command_line import Parser, count, program

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHECK_SECONDS = 240.0
"""Seconds after which a check is stopped."""
NUM_STEPS = 8
WAITS = "waits of the host: "
TRAINING = (
    *("--config", str(ROOT / "examples/digits/config.yaml"), "--vision-dp", "1", "--llm-pp", "1", "--num-workers", "0"),
    *("--eval-iters", "0", "--train-iters", str(NUM_STEPS), "--lr-warmup-fraction", "0"),
)
_SPLIT = next(name for name, row in BUILDERS.items() if row.splits_backwards and row.layout is None)
PATHS: Mapping[str, tuple[str, ...]] = {
    "float32": ("--dtype", "float32"),
    "bf16": ("--bf16", "--transformer-impl", "local"),
    "bf16, blocks": ("--bf16", "--attention-backend", "blocks", "--attention-mask", "embedded"),
    "bf16, flex": ("--bf16", "--attention-backend", "flex", "--attention-mask", "embedded"),
    "bf16, triton": ("--bf16", "--attention-backend", "triton", "--attention-mask", "embedded"),
    "bf16, dense": ("--bf16", "--attention-backend", "dense", "--attention-mask", "embedded"),
    "bf16, recomputed": ("--bf16", "--recompute-granularity", "full"),
    f"bf16, {_SPLIT}": ("--bf16", "--schedule", _SPLIT),
    "defaults": (),
    "bf16, Transformer Engine": ("--bf16", "--transformer-impl", "transformer_engine"),
    f"{_SPLIT}, Transformer Engine": ("--bf16", "--transformer-impl", "transformer_engine", "--schedule", _SPLIT),
    "adapters, Transformer Engine": ("--bf16", "--transformer-impl", "transformer_engine", "--lora-rank", "8"),
    "FP8, Transformer Engine": ("--bf16", "--transformer-impl", "transformer_engine", "--fp8-format", "hybrid"),
}
"""Name -> flags of runs of one process."""


@dataclass(frozen=True)
class Check:
    """A program to run, and the function that reads its output."""

    group: str
    name: str
    command: tuple[str, ...]
    read: Callable[[str, Path], str]
    """(output, folder of the check) -> the result in a few words; raises ValueError if the result is bad."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a check."""

    group: str
    name: str
    is_good: bool
    result: str
    seconds: float
    end_of_output: str = ""
    """The last lines of the output of a failed check."""


def all_checks(folder: Path, *, is_quick: bool) -> Iterator[Check]:
    """Yield every check; folder: for the files that checks write."""
    python = sys.executable
    here = str(Path(__file__).resolve())
    tests = (python, "-m", "pytest", "-q", str(ROOT / "tests/gpu"), "-k")
    yield Check("tests", "tests/gpu", (*tests, "not on_one_gpu"), _read_tests)
    yield Check("ranks", "several ranks on one GPU, over gloo", (*tests, "on_one_gpu"), _read_tests)
    for queues in ("1", "8"):
        command = (python, here, "--measure", "queues")
        yield Check("queues", f"{queues} hardware queues", command, _read_last, {"CUDA_DEVICE_MAX_CONNECTIONS": queues})
    for number, (name, flags) in enumerate(PATHS.items()):
        if "transformer_engine" in flags and find_spec("transformer_engine") is None:
            continue
        log = folder / f"{number}.jsonl"
        trained = (python, str(ROOT / "pretrain_mllm.py"), *TRAINING, "--log-json", str(log), *flags)
        yield Check("training", name, trained, partial(_read_log, log=log))
    yield Check("synchronisation", "one step, bf16", (python, here, "--measure", "synchronisation"), _read_waits)
    tokens = ("8192",) if is_quick else ("8192", "32768", "65536")
    benchmark = (python, str(ROOT / "benchmarks/attention_gpu.py"), "--json", "--repeats", "10", "--tokens", *tokens)
    yield Check("attention", "Triton against FlexAttention", benchmark, read_attention)


def _read_tests(output: str, folder: Path) -> str:
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    if not lines or re.search(r"failed|error", lines[-1]):
        raise ValueError(lines[-1] if lines else "no test ran")
    return lines[-1].strip("= ")


def _read_last(output: str, folder: Path) -> str:
    return output.strip().splitlines()[-1]


def _read_waits(output: str, folder: Path) -> str:
    """Return the line about the last step; earlier steps also wait for setup."""
    return [line for line in output.splitlines() if line.startswith(WAITS)][-1]


def _read_log(output: str, folder: Path, *, log: Path) -> str:
    return read_training(log.read_text())


def read_training(log: str) -> str:
    """Summarize a run's log of steps; raises ValueError unless the loss falls."""
    steps = [json.loads(line) for line in log.splitlines()]
    first, last = steps[0]["loss"], steps[-1]["loss"]
    result = f"loss {first:.3f} -> {last:.3f}, {1e3 * min(step['step_seconds'] for step in steps):.0f} ms a step, "
    result += f"{max(step['peak_activation_bytes'] for step in steps) / 2**20:.0f} MiB of activations"
    if not last < first:
        raise ValueError(result)
    return result


def read_attention(output: str, folder: Path) -> str:
    """Summarize the benchmark's rows: speedup over FlexAttention, median and worst."""
    (folder / "attention.json").write_text(output)
    rows = json.loads(output.strip().splitlines()[-1])["rows"]
    seconds: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in rows:
        seconds[row["mask"], row["num_tokens"]][row["backend"]] = row["forward_ms"] + row["backward_ms"]
    ratios = sorted(
        ways["FlexAttention"] / min(took for way, took in ways.items() if way.startswith("Braid")) for ways in seconds.values()
    )
    if not ratios:
        raise ValueError("nothing was compared")
    return f"{ratios[len(ratios) // 2]:.2f} times as fast in the median, {ratios[0]:.2f} at worst"


def run_check(check: Check, folder: Path) -> Outcome:
    """Run one check; never raises."""
    start = time.monotonic()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **check.environment}
    try:
        ended = subprocess.run(
            check.command, env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(check.group, check.name, False, f"not done after {CHECK_SECONDS:.0f} s", time.monotonic() - start)
    seconds = time.monotonic() - start
    try:
        if ended.returncode:
            raise ValueError(f"ended with exit code {ended.returncode}")
        return Outcome(check.group, check.name, True, check.read(ended.stdout, folder), seconds)
    except (ValueError, KeyError, IndexError, OSError) as problem:
        tail = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
        return Outcome(check.group, check.name, False, str(problem), seconds, tail)


def measure_queues() -> None:
    """Issue a long kernel, a second one behind it on its stream, and a short one on another stream; print whether it waited.

    Streams that share a hardware queue start their kernels in the order in which they were issued: then the second kernel delays
    the short one until the long one has ended.
    """
    streams, short_end = (torch.cuda.Stream(), torch.cuda.Stream()), torch.cuda.Event(enable_timing=True)
    start, long_end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 200_000_000
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start.record(streams[0])
    streams[1].wait_event(start)
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(cycles)
        long_end.record()
        torch.cuda._sleep(1000)
    with torch.cuda.stream(streams[1]):
        torch.cuda._sleep(1000)
        short_end.record()
    torch.cuda.synchronize()
    took, waited = start.elapsed_time(long_end), start.elapsed_time(short_end)
    print(f"a kernel {'waits' if waited > took / 2 else 'does not wait'} for another stream's: {waited:.1f} of {took:.1f} ms")


def measure_synchronisation() -> None:
    """Train, and print after every step the places where the host waited for the device during the step's actions."""
    import pretrain_mllm

    def show_waits(places: Counter[str]) -> None:
        shown = ", ".join(f"{place} ({count})" for place, count in places.most_common(6))
        print(f"{WAITS}{places.total()} in a step: {shown}", flush=True)

    watch_host_waits(show_waits)
    pretrain_mllm.main([*TRAINING, "--bf16"])  # ends the process


def check_ranks(name: str, check: Callable[[], str]) -> Outcome:
    """Make a check of several ranks; never raises for what it finds."""
    start = time.monotonic()
    try:
        return Outcome("ranks", name, True, check(), time.monotonic() - start)
    except (ValueError, OSError, KeyError) as problem:
        said = str(problem)
        return Outcome("ranks", name, False, said.partition("\n")[0], time.monotonic() - start, said)


MEASURES: Mapping[str, Callable[[], None]] = {"queues": measure_queues, "synchronisation": measure_synchronisation}
"""Name -> measurement that this file makes itself, in a process of its own."""


def show(outcomes: Sequence[Outcome], *, card: str) -> None:
    """Print the table, and the last output of each failed check."""
    table = Table("", "check", "", "result", "s", title=card)
    for each in outcomes:
        table.add_row(each.group, each.name, "ok" if each.is_good else "FAILED", each.result, f"{each.seconds:.0f}")
    console = Console(width=160)
    console.print(table)
    for each in outcomes:
        if each.end_of_output:
            console.print(f"\n{each.group}, {each.name}:\n{each.end_of_output}", markup=False, highlight=False)


def build_parser() -> Parser:
    """Return the parser of all flags."""
    parser = Parser(prog="gpu_check.py", description=__doc__)
    parser.add_argument("--only", default="", metavar="GROUP,...", help="Groups of checks; all by default.")
    parser.add_argument("--quick", action="store_true", help="Leave long sequences out.")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="By default benchmarks/results/gpu_check_<card>.json.")
    parser.add_argument("--ranks", type=count, metavar="N", help="Check N ranks, one a GPU; on a CPU as a rehearsal.")
    parser.add_argument("--bench", action="store_true", help="With --ranks: step, MFU, overlap, predicted beside measured.")
    parser.add_argument("--measure", choices=list(MEASURES), help=argparse.SUPPRESS)
    return parser


@program("gpu_check.py")
def main(argv: Sequence[str]) -> None:
    """Run the checks, print a table, write a file; raises ConfigError if there is no GPU or a check failed."""
    flags = build_parser().parse_args(argv)
    has_cuda, wanted = torch.cuda.is_available(), {name for name in flags.only.split(",") if name}
    if not has_cuda and flags.ranks is None:
        raise ConfigError(
            "gpu_check needs a CUDA device, and torch finds none here; run it where nvidia-smi shows one, or rehearse: --ranks 2"
        )
    if flags.bench and flags.ranks is None:
        raise ConfigError("--bench measures several ranks; add --ranks N")
    if flags.measure is not None:
        MEASURES[flags.measure]()
        return
    with tempfile.TemporaryDirectory() as name:
        folder, checks = Path(name), list[tuple[str, Callable[[], Outcome]]]()
        if flags.ranks is None:
            checks = [(each.group, partial(run_check, each, folder)) for each in all_checks(folder, is_quick=flags.quick)]
        else:
            several = rank_checks.all_checks(flags.ranks, folder, is_bench=flags.bench)
            checks = [(each, partial(check_ranks, each, check)) for each, check in several]
        if unknown := wanted - {group for group, _ in checks}:
            groups = ", ".join(dict.fromkeys(group for group, _ in checks))
            raise ConfigError(f"--only {','.join(sorted(unknown))}: no such group of checks; choose from {groups}")
        outcomes = [check() for group, check in checks if not wanted or group in wanted]
    card = torch.cuda.get_device_name() if has_cuda else "CPU, a rehearsal over gloo"
    show(outcomes, card=card)
    ranks = "" if flags.ranks is None else f"_{flags.ranks}_ranks{'_bench' if flags.bench else ''}"
    output = flags.output or RESULTS / f"gpu_check_{re.sub(r'[^a-z0-9]+', '_', card.lower())}{ranks}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    output.write_text(json.dumps({"card": card, **versions, "checks": list(map(asdict, outcomes))}, indent=2) + "\n")
    failed = [f"{each.group}, {each.name}" for each in outcomes if not each.is_good]
    if failed:
        raise ConfigError(f"{len(failed)} of {len(outcomes)} checks failed ({'; '.join(failed)}); see above and {output}")
    num_left_out = sum(each.result.startswith(rank_checks.LEFT_OUT) for each in outcomes)
    print(f"all {len(outcomes) - num_left_out} checks passed{f', {num_left_out} left out' if num_left_out else ''}; {output}")


if __name__ == "__main__":
    sys.exit(main())
