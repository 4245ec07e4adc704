"""Runs whose ranks are killed go on in the processes that are left, and log what a run logs in which nothing happened."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.elastic_run import ElasticRun, Nodes, read_losses
from tests.distributed.launch import REPOSITORY, launch
from tests.distributed.small_run import working_flags, write_working_files

NUM_STEPS, BATCH = 18, 6
DYING = REPOSITORY / "tests" / "distributed" / "dying_rank.py"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the inputs of all runs, with the log of one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("inputs")
    write_working_files(folder)
    values = {**working_flags(folder), "--global-batch-size": BATCH, "--train-iters": NUM_STEPS, "--dtype": "float64"}
    values["--log-json"] = folder / "log.jsonl"
    found = launch([word for pair in values.items() for word in pair], num_ranks=2, timeout_seconds=300)
    assert found.exit_codes == (0, 0), found.output
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return the run's own folder."""
    yield tmp_path


def check(run: ElasticRun, inputs: Path) -> str:
    """Wait for the end and compare the losses; returns what the run printed."""
    try:
        exit_code = run.wait(seconds=240)
    finally:
        run.close()
    assert exit_code == 0, run.output
    expected, found = read_losses(inputs), run.losses()
    assert list(found) == list(range(1, NUM_STEPS + 1)), "no step is lost or repeated"
    assert np.allclose(list(found.values()), list(expected.values()), rtol=0, atol=1e-9)
    return run.output


def test_ranks_die_anywhere_and_nodes_return(folder: Path, inputs: Path) -> None:
    """In a forward; the first rank, once it knows the norm that others wait for; in the recovery from that; in a reduction."""
    deaths = "3:forward:3,0:norm:6,2:copy:6,4:reduction:10"
    environment = {"BRAID_TEST_DEATHS": deaths}
    run = ElasticRun(folder, Nodes(6), num_steps=NUM_STEPS, batch=BATCH, inputs=inputs, program=DYING, environment=environment)
    try:
        run.wait_for_step(4)
        run.let_return(3)
        run.wait_for_step(11)
        run.let_return(0)
    except BaseException:
        run.close()
        raise
    output = check(run, inputs)
    assert output.count("goes on after step") >= 4


def test_a_node_of_two_ranks_dies_as_one_and_returns(folder: Path, inputs: Path) -> None:
    """A pipeline of two stages on each node; the second time, all ranks have updated, and the first has not reported."""
    environment = {"BRAID_TEST_DEATHS": "0:report:11"}
    nodes = Nodes(3, gpus=2)
    run = ElasticRun(folder, nodes, num_steps=NUM_STEPS, batch=BATCH, inputs=inputs, program=DYING, environment=environment)
    try:
        run.wait_for_step(3)
        for local_rank in range(2):
            run.kill(1, local_rank)
        run.let_return(1)
    except BaseException:
        run.close()
        raise
    output = check(run, inputs)
    assert "1 node may be lost at once, down to 2; 3 replicas each keep all of the optimizer state" in output


def test_replicas_that_differ_become_alike_and_differ_again(folder: Path, inputs: Path) -> None:
    """Pipelines of two and three nodes; without one node there are two of two."""
    nodes = Nodes(5, sizes=(2, 3), replicas=(2, 3))
    run = ElasticRun(folder, nodes, num_steps=NUM_STEPS, batch=BATCH, inputs=inputs, program=DYING)
    try:
        run.wait_for_step(3)
        run.kill(4)
        run.wait_for_step(5)
        run.let_return(4)
        run.wait_until(lambda: "with 5 nodes" in run.output, "return of the node")
    except BaseException:
        run.close()
        raise
    assert "with 4 nodes" in check(run, inputs)


def test_more_losses_than_copies_go_back_to_the_newest_checkpoint(folder: Path, inputs: Path) -> None:
    """One replica over two nodes: half of the state is lost with either, and nothing can be done without both."""
    flags = ("--save", folder / "saved", "--save-interval", 4)
    run = ElasticRun(
        folder, Nodes(2, fault_tolerance=0, sizes=(2,)), num_steps=NUM_STEPS, batch=BATCH, inputs=inputs, flags=flags
    )
    try:
        run.wait_for_step(6)
        run.kill(0)
        run.wait_until(lambda: "waiting: 1 nodes are left" in run.output, "wait for nodes")
        run.let_return(0)
    except BaseException:
        run.close()
        raise
    assert "going back to a checkpoint" in check(run, inputs)


def test_shared_copies_of_the_state_outlive_one_node(folder: Path, inputs: Path) -> None:
    """Two copies, of three replicas each; one node dies where weights are about to be gathered, one after it knows the norm.

    The first one returns before the second one dies, at the same time or later.
    """
    environment = {"BRAID_TEST_DEATHS": "4:gathering:4,1:norm:9"}
    nodes = Nodes(6, replicas_per_copy=2)
    run = ElasticRun(folder, nodes, num_steps=NUM_STEPS, batch=BATCH, inputs=inputs, program=DYING, environment=environment)
    try:
        run.wait_for_step(6)
        run.let_return(4)
        run.wait_until(
            lambda: re.search(r"goes on after step (9|1\d) with 5 nodes", run.output) is not None, "return of the node"
        )
    except BaseException:
        run.close()
        raise
    output = check(run, inputs)
    assert "down to 4; 2 copies of the optimizer state, each shared by 3 or more of 6 replicas" in output
    assert "going back" not in output


def test_bfloat16_goes_on_from_the_very_same_state(folder: Path, inputs: Path) -> None:
    """Up to the step that is done again every loss is the same; later ones differ as sums in another order do."""
    found = []
    for name, deaths in (("undisturbed", ""), ("disturbed", "0:reduction:6")):
        (folder / name).mkdir()
        environment, flags = {"BRAID_TEST_DEATHS": deaths}, ("--dtype", "bfloat16")
        run = ElasticRun(
            folder / name, Nodes(3), num_steps=8, batch=BATCH, inputs=inputs, flags=flags, program=DYING, environment=environment
        )
        try:
            assert run.wait(seconds=240) == 0, run.output
        finally:
            run.close()
        found.append(run.losses())
    assert "goes on after step 5 with 2 nodes" in run.output
    differences = [abs(found[0][step] - found[1][step]) for step in range(1, 9)]
    assert max(differences[:6]) < 1e-6 and max(differences) < 1e-2
