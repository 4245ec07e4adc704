"""The launch of a run with its inputs, mutated or not."""

import subprocess
from pathlib import Path

from tests.distributed.launch import HANG_SECONDS, Launched, as_arguments, launch
from tests.distributed.mutations.mutation import Inputs
from tests.distributed.small_run import working_flags


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
