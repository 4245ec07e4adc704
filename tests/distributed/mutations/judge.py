"""The launch of a run with its inputs, mutated or not, and what became of it, held against what must be true of every launch."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.distributed.launch import HANG_SECONDS, Launched, as_arguments, launch
from tests.distributed.mutations.mutation import Inputs, Mutation
from tests.distributed.small_run import NUM_RANKS, working_flags

_SIZES = ("--vision-", "--llm-")
_WITHOUT_EFFECT = frozenset(
    {
        *("--plan", "--colocate-units", "--sequence-parallel", "--data-parallel-sharding-strategy", "--schedule"),
        *("--schedule-passes", "--recompute-granularity", "--micro-batch-size", "--balance", "--balance-granularity"),
        *("--balance-num-microbatches", "--merge-encoders", "--refine-encoders", "--unit-costs", "--rearrange-nodes"),
        *("--context-parallel-distribution", "--context-parallel-block-size", "--lengths-from", "--num-workers"),
        *("--save", "--tensorboard-dir", "--report-dir", "--cluster", "--producers", "--producer-token"),
    }
)
"""Flags that say how a run trains or what it writes, and not what it learns: one process does without them."""
_FIX = re.compile(
    r"\b(use|set|give|leave|remove|choose|raise|lower|add|keep|write|rename|replace|correct|change|launch|install|start|list|take|make|"
    r"must be|must|expected|expects|needs|make room|save|resume|put|name|regenerate|copy|repair|convert|re-create|delete|shorten|"
    r"pass|did you mean|has no|are|is one of|invalid choice|lists all flags)\b"
)


def launch_inputs(inputs: Inputs) -> Launched | str:
    """Launch a run and wait for its end; returns how it ended, or that it hangs."""
    shared = {
        flag: value for flag, value in inputs.flags.items() if not any(flag in own for own in inputs.flags_of_rank.values())
    }
    own = {
        rank: as_arguments(
            {flag: value for flag, value in inputs.flags.items() if flag not in shared} | inputs.flags_of_rank.get(rank, {})
        )
        for rank in range(inputs.num_ranks)
    }
    try:
        return launch(
            shared,
            num_ranks=inputs.num_ranks,
            flags_of_rank=own,
            environment_of_rank=inputs.environment_of_rank,
            folder=inputs.folder,
        )
    except subprocess.TimeoutExpired:
        return f"it hangs: no end after {HANG_SECONDS:g} s"


def base_flags(folder: Path) -> dict[str, object]:
    """Return the flags that mutations start from; the run's files are in `folder`."""
    return working_flags(folder) | {
        "--dtype": "float64",
        "--exit-interval": 2,
        "--log-json": folder / "log.jsonl",
        "--no-progress-bar": None,
        "--distributed-timeout-minutes": 0.25,
    }


class Outcome(NamedTuple):
    """What became of one mutation."""

    mutation: Mutation
    exit_codes: tuple[int, ...]
    """By rank; none where it hangs."""
    problems: tuple[str, ...]
    """Empty: as it should be."""
    message: str
    """The refusal, or nothing."""
    seconds: float
    output: str

    @property
    def is_refused(self) -> bool:
        """Tell whether every rank ended by itself, and with an error."""
        return bool(self.exit_codes) and 0 not in self.exit_codes


def judge(mutation: Mutation, inputs: Inputs, launched: Launched) -> Outcome:
    """Hold a launch against what must be true of every launch."""
    output, codes = launched.output, launched.exit_codes
    messages = [line for line in output.splitlines() if "error:" in line]
    message = messages[0] if messages else ""
    if all(code == 0 for code in codes):
        problems = ["it was accepted, but must be refused"] if mutation.must_be_refused else _compare(inputs)
    elif 0 in codes:
        problems = [f"some ranks ended well and some did not: {codes}"]
    else:
        problems = _problems_of_refusal(mutation, messages)
    if "Traceback" in output or "frame #" in output:
        problems.append("the output holds a traceback")
    return Outcome(mutation, codes, tuple(problems), message, launched.seconds, output)


def _problems_of_refusal(mutation: Mutation, messages: Sequence[str]) -> list[str]:
    if mutation.area == "environment":  # ranks that do not know each other all say the same
        messages = list(dict.fromkeys(message.rpartition(" [")[0] for message in messages))
    if len(messages) != 1:
        return [f"expected one message, found {len(messages)}"]
    problems = [f"the message does not name {name!r}" for name in mutation.names if name not in messages[0]]
    if not _FIX.search(messages[0].split("error:", 1)[1]):
        problems.append("the message names no fix")
    return problems


def _compare(inputs: Inputs) -> list[str]:
    """What is different from one process that trains on the same inputs."""
    log = inputs.flags.get("--log-json")
    if log != inputs.folder / "log.jsonl":
        return []
    found = _losses(inputs.folder / "log.jsonl")
    flags = {flag: value for flag, value in inputs.flags.items() if flag not in _WITHOUT_EFFECT and not flag.startswith(_SIZES)}
    alone = Inputs(inputs.folder, inputs.random, flags | {"--log-json": inputs.folder / "alone.jsonl"}, num_ranks=1)
    launched = launch_inputs(alone)
    if isinstance(launched, str) or launched.exit_codes != (0,):
        return [
            f"it was accepted on {NUM_RANKS} ranks, but not on one: {launched if isinstance(launched, str) else launched.output}"
        ]
    expected = _losses(inputs.folder / "alone.jsonl")
    tolerance = 1e-9 if inputs.flags["--dtype"] == "float64" else 2e-2
    if len(found) != len(expected) or any(abs(a - b) > tolerance * abs(b) for a, b in zip(found, expected, strict=True)):
        return [f"losses and norms {found} differ from one process's {expected}"]
    return []


def _losses(log: Path) -> list[float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "grad_norm") if "grad_norm" in line]
