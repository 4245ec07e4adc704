"""The shipped Slurm script under a real controller: jobs that are cut short go on as if nothing had happened."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.runtime.launch.meeting import wait_until
from tests.distributed.launch import read_log
from tests.slurm.slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

NUM_STEPS = 60
FLAGS = ("--train-iters", NUM_STEPS, "--num-workers", 0, "--eval-iters", 0, "--log-interval", 1)

pytestmark = needs_slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def submit(cluster: SlurmCluster, run: Path, *options: str, minutes_to_save: int = 0) -> str:
    """Submit a job of the script that trains on two nodes; returns its number."""
    run.mkdir(exist_ok=True)
    saving = {"SAVE_INTERVAL": "1000", "MINUTES_TO_SAVE": str(minutes_to_save)}
    return cluster.submit("pretrain.sh", run, *options, arguments=FLAGS, **saving)


def losses(run: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_log(run / "log.jsonl")}


def wait_for_steps(run: Path, count: int) -> None:
    assert wait_until(lambda: len(losses(run)) >= count, seconds=180), f"{len(losses(run))} steps in {run}"


@pytest.fixture(scope="module")
def uninterrupted(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = tmp_path_factory.mktemp("uninterrupted")
    cluster.wait(submit(cluster, run), until="COMPLETED")
    found = losses(run)
    assert list(found) == list(range(1, NUM_STEPS + 1))
    return found


def test_a_requeued_job_resumes_where_it_was(cluster, uninterrupted, tmp_path):
    """Slurm requeues a job when a node fails or something more urgent comes; a drained node makes it wait."""
    job = submit(cluster, tmp_path)
    wait_for_steps(tmp_path, 3)
    cluster.call("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    cluster.call("scontrol", "requeue", job)
    cluster.wait(job, until="PENDING")
    num_before = len(losses(tmp_path))
    assert num_before < NUM_STEPS
    cluster.call("scontrol", "update", "nodename=node2", "state=resume")
    cluster.wait(job, until="COMPLETED")
    assert f"resumed after step {num_before}" in "".join(path.read_text() for path in tmp_path.glob("braid-*.log"))
    assert losses(tmp_path) == uninterrupted


def test_a_job_that_ends_before_its_time_limit_is_gone_on_with(cluster, uninterrupted, tmp_path):
    """The first job stops itself after its first minute; steps are held up so that this comes in the middle."""
    first = submit(cluster, tmp_path, "--time=5", minutes_to_save=4)
    wait_for_steps(tmp_path, 3)
    for action, seconds in (("STOP", 60), ("CONT", 0)):
        subprocess.run(["pkill", f"-{action}", "--full", str(tmp_path)], check=True)
        time.sleep(seconds)
    cluster.wait(first, until="COMPLETED")
    assert 3 <= len(losses(tmp_path)) < NUM_STEPS
    cluster.wait(submit(cluster, tmp_path), until="COMPLETED")
    assert losses(tmp_path) == uninterrupted
