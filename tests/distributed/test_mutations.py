"""Random single mutations of a run that works: each is refused with one message, or trains as one process does.

`benchmarks/mutated_inputs.py` runs as many as one wants.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.distributed.mutations.judge import Outcome
from tests.distributed.mutations.run import run_mutation, save_given
from tests.distributed.mutations.table import draw_mutations, list_mutations

MUTATIONS = draw_mutations(40, seed=12)
OF_EVERY_AREA = MUTATIONS[:14]
NUM_AT_ONCE = 3


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The runs of all mutations that are to be tested, a few at a time."""
    chosen = OF_EVERY_AREA if not request.config.getoption("all") else MUTATIONS
    folder = tmp_path_factory.mktemp("mutations")
    given = save_given(folder / "base")
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        launched = pool.map(lambda item: run_mutation(item[1], folder=folder / str(item[0]), given=given), enumerate(chosen))
        return {outcome.mutation.name: outcome for outcome in launched}


@pytest.mark.deep(when=lambda mutation: mutation not in OF_EVERY_AREA)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutated_run_is_refused_with_a_message_or_trains_as_one_process(mutation, outcomes) -> None:
    outcome = outcomes[mutation.name]
    assert not outcome.problems, f"{outcome.problems}\n{outcome.message}\n{outcome.output}"


def test_some_are_refused_and_some_train(outcomes: dict[str, Outcome]) -> None:
    assert {outcome.is_refused for outcome in outcomes.values()} == {True, False}


def test_there_are_enough_kinds() -> None:
    assert len(list_mutations()) >= 500
    assert {mutation.area for mutation in OF_EVERY_AREA} == {mutation.area for mutation in list_mutations()}
