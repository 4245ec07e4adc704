"""The Slurm script of elastic runs under a real controller: nodes fail as a whole, and others take their places."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from megatron.runtime.launch.meeting import wait_until
from tests.distributed.elastic_run import Nodes, read_losses, write_templates
from tests.distributed.launch import REPOSITORY
from tests.distributed.small_run import working_flags, write_working_files
from tests.slurm.slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

BATCH = 4

pytestmark = needs_slurm


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster(folder) as started:
        yield started


def write_run(run: Path) -> None:
    """Write a run of two nodes of two ranks, which goes on with one."""
    run.mkdir()
    write_working_files(run)
    write_templates(run / "templates.yaml", run / "model.yaml", Nodes(2, gpus=2, fault_tolerance=0), num_microbatches=BATCH)
    flags = {name[2:]: value for name, value in working_flags(run).items() if not name.endswith("-dp")}
    flags |= {"global-batch-size": BATCH, "train-iters": 100_000, "log-interval": 1}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    (run / "config.yaml").write_text(yaml.safe_dump(plain))


def submit(cluster: SlurmCluster, run: Path, *options: str, **environment: str) -> str:
    """Submit a job of the script of elastic runs; returns its number."""
    given = {"CONFIG": str(run / "config.yaml"), "PLAN": str(run / "templates.yaml"), "SAVE_INTERVAL": "5"}
    return cluster.submit("elastic.sh", run, *options, PYTHONPATH=str(REPOSITORY), **given, **environment)


def output(run: Path) -> str:
    return "".join(path.read_text() for path in sorted(run.glob("braid-*.log")))


def wait_for(run: Path, has_happened: Callable[[], bool]) -> None:
    assert wait_until(has_happened, seconds=300), output(run)


def stop(cluster: SlurmCluster, run: Path, job: str) -> None:
    """Let the run save and end, as Slurm does before it ends a job; all steps must be in the log once."""
    cluster.call("scancel", "--signal=TERM", job)
    cluster.wait(job, until="COMPLETED")
    losses = read_losses(run)
    assert list(losses) == list(range(1, len(losses) + 1))
    assert f"after step {len(losses)}" in output(run) and (run / "checkpoints" / f"step_{len(losses):08d}").exists()


def test_a_run_outlives_a_node_and_another_job_takes_its_place(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run)
    job = submit(cluster, run)
    wait_for(run, lambda: len(read_losses(run)) >= 3)
    cluster.crash("node2")
    wait_for(run, lambda: "with 1 nodes" in output(run))
    cluster.restart("node2")
    submit(cluster, run, "--nodes=1", JOIN=job, NODE="1", NODES="2")
    wait_for(run, lambda: "with 2 nodes" in output(run))
    stop(cluster, run, job)


def test_a_job_whose_first_node_fails_is_requeued_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run)
    job = submit(cluster, run)
    wait_for(run, lambda: len(read_losses(run)) >= 13)
    cluster.crash("node1")
    wait_for(run, lambda: cluster.state(job) == "PENDING")
    cluster.restart("node1")
    wait_for(run, lambda: "resumed after step" in output(run))
    stop(cluster, run, job)
