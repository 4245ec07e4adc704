"""A run of the small model with one mutation, or with none to save the checkpoint that others change."""

import random
import shutil
from pathlib import Path

from tests.distributed.launch import launch
from tests.distributed.mutations.judge import Outcome, judge
from tests.distributed.mutations.launch_inputs import HANG_SECONDS, as_arguments, base_flags, launch_inputs
from tests.distributed.mutations.mutation import Inputs, Mutation
from tests.distributed.small_run import NUM_RANKS, write_working_files


def save_checkpoint_to_mutate(folder: Path) -> Path:
    """Train the small run and save it; returns the folder of its checkpoints, for `run_mutation`."""
    folder.mkdir(parents=True)
    write_working_files(folder)
    launched = launch(as_arguments(base_flags(folder) | {"--save": folder / "saved"}), num_ranks=NUM_RANKS)
    assert launched.exit_codes == (0,) * NUM_RANKS, launched.output
    return folder / "saved"


def run_mutation(mutation: Mutation, *, folder: Path, checkpoint: Path, seed: int = 0) -> Outcome:
    """Launch the small run with one mutation and judge what became of it.

    folder: a new folder for its files; checkpoint: what `save_checkpoint_to_mutate` returned.
    """
    folder.mkdir(parents=True)
    write_working_files(folder)
    inputs = Inputs(folder, random.Random(f"{seed} {mutation.name}"), base_flags(folder))
    if mutation.needs_checkpoint:
        shutil.copytree(checkpoint, folder / "saved")
        inputs.flags |= {"--load": folder / "saved", "--train-iters": 4, "--exit-interval": 4}
    mutation.apply(inputs)
    launched = launch_inputs(inputs)
    if isinstance(launched, str):
        return Outcome(mutation, False, (launched,), "", HANG_SECONDS, "")
    return judge(mutation, inputs, launched)
