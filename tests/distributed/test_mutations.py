"""Random single mutations of a run that works: each is refused with one message, or trains as one process does.

`benchmarks/mutated_inputs.py` runs as many as one wants.
"""

from pathlib import Path

import pytest

from tests.distributed.conftest import Once
from tests.distributed.mutations.mutation import Mutation
from tests.distributed.mutations.run import run_mutation, save_given
from tests.distributed.mutations.table import draw_mutations, list_mutations

AREAS = {mutation.area for mutation in list_mutations()}
MUTATIONS = draw_mutations(len(AREAS), seed=12)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutated_run_is_refused_with_a_message_or_trains_as_one_process(mutation: Mutation, tmp_path: Path, once: Once) -> None:
    outcome = run_mutation(mutation, folder=tmp_path / "run", given=once(save_given))
    assert not outcome.problems, f"{outcome.problems}\n{outcome.message}\n{outcome.output}"


def test_there_are_enough_kinds() -> None:
    assert len(list_mutations()) >= 500
    assert {mutation.area for mutation in MUTATIONS} == AREAS
