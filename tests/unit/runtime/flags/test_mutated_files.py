"""Every single mutation of a model or plan file is refused with its place, or is a file that means something."""

import random
import shutil
from pathlib import Path

import pytest

from megatron.runtime.flags.arguments import parse_arguments
from multimodal.values.errors import BraidError
from tests.distributed.mutations.mutation import Inputs, Mutation
from tests.distributed.mutations.table import list_mutations
from tests.distributed.small_run import NUM_RANKS, working_flags, write_working_files

MUTATIONS = [mutation for mutation in list_mutations() if mutation.area in ("model", "plan")]


def refusal_of(mutation: Mutation, folder: Path) -> str:
    """What the flags' parser says to the run with this mutation, in a new folder; empty where it takes it."""
    inputs = Inputs(folder, random.Random(0), working_flags(folder) | {"--data-path": folder.parent / "data" / "manifest.jsonl"})
    folder.mkdir()
    shutil.copy(folder.parent / "model.yaml", folder)
    mutation.apply(inputs)
    flags = [str(part) for pair in inputs.flags.items() for part in pair]
    try:
        parse_arguments(flags, environ={"WORLD_SIZE": str(NUM_RANKS)})
    except BraidError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("area", ["model", "plan"])
def test_every_mutation_of_a_file_is_refused_in_one_line_or_taken(area: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every fourth without --all."""
    write_working_files(tmp_path)
    wrong = []
    mutations = [mutation for mutation in MUTATIONS if mutation.area == area]
    for number, mutation in enumerate(mutations[:: 1 if pytestconfig.getoption("all") else 4]):
        message = refusal_of(mutation, tmp_path / str(number))
        is_of_a_value = "." in mutation.name and " is " not in mutation.name and mutation.names
        names = (*mutation.names, f"{area}.yaml, line" if is_of_a_value else "")
        if message and (not all(name in message for name in names) or not message.isprintable() or len(message) > 1000):
            wrong.append(f"{mutation.name}: {message}")
        if mutation.must_be_refused and not message:
            wrong.append(f"{mutation.name}: taken")
    assert not wrong, "\n".join(wrong)
