"""A Slurm cluster of two nodes on this machine, for as long as a test runs: real munged, slurmctld and slurmds, in one folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatron.runtime.launch.meeting import wait_until
from tests.distributed.launch import REPOSITORY

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("node1", "node2")


def _missing_programs() -> list[str]:
    """Return what is not installed; root is needed, too."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return missing if os.geteuid() == 0 else [*missing, "root"]


needs_slurm = pytest.mark.skipif(
    not os.environ.get("BRAID_TEST_SLURM") or bool(_missing_programs()),
    reason="starts a Slurm cluster: set BRAID_TEST_SLURM=1, as root, with Debian's slurm-wlm and munge installed",
)


class SlurmCluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self, daemon: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(subprocess.Popen(daemon.split(), env=self.environment, stdout=log, stderr=log))
        time.sleep(1)

    def crash(self, node: str) -> None:
        """Let a node fail as if its power went: its slurmd and all that runs there is gone, and Slurm learns of it."""
        self.kill(node)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def kill(self, node: str) -> None:
        for process in self._processes(node):
            os.kill(process, signal.SIGKILL)

    def restart(self, node: str) -> None:
        """Let a failed node come back, and Slurm notice it."""
        self.start(f"slurmd -D -N {node}")

    def _processes(self, node: str) -> list[int]:
        """Return slurmd, tasks, and their slurmstepds, which are known by their sockets."""
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        inodes = {f"socket:[{row[6]}]" for row in sockets if f"{self.folder}/spool-{node}/" in row[-1]}
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words, values = ((process / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
                if f"SLURM_CONF={self.folder}/slurm.conf".encode() not in values:
                    continue
                links = {os.readlink(each) for each in (process / "fd").iterdir()}
                is_daemon = words[0].endswith(b"slurmd") and node.encode() in words
                if is_daemon or inodes & links or f"SLURMD_NODENAME={node}".encode() in values:
                    found.append(int(process.name))
        return found

    def call(self, *command: object, **environment: str) -> str:
        given = {**self.environment, **environment}
        return subprocess.run(list(map(str, command)), env=given, check=True, capture_output=True, text=True, timeout=60).stdout

    def submit(self, script: str, run: Path, *options: str, arguments: Sequence[object] = (), **environment: str) -> str:
        """Submit a script of `scripts/slurm` as it is shipped, for two ranks per node; returns the job's number.

        run: the folder of its run; options: of sbatch; arguments: of the script, all besides `environment`.
        """
        given = {"IMAGE": "", "BRAID": str(REPOSITORY), "RUN": str(run), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        given |= {"PATH": f"{REPOSITORY}/.venv/bin:{os.environ['PATH']}", **environment}
        smaller = ("--gpus-per-node=2", "--cpus-per-task=1", f"--chdir={run}")
        path = REPOSITORY / "scripts" / "slurm" / script
        return self.call("sbatch", "--parsable", *smaller, *options, path, *arguments, **given).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING."""
        return next(word for word in self.call("scontrol", "show", "job", job).split() if word.startswith("JobState="))[9:]

    def node_states(self) -> list[str]:
        return self.call("sinfo", "--noheader", "--format=%t").split()

    def wait(self, job: str, *, until: str, seconds: float = 300.0) -> None:
        """Wait until a job is in a state; raises AssertionError when it takes too long."""
        has_come = wait_until(lambda: self.state(job) == until, seconds=seconds, pause_seconds=1.0)
        assert has_come, f"job {job} is {self.state(job)}, not {until}, after {seconds:.0f} s"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    _write_configuration(folder)
    cluster = SlurmCluster(folder)
    munge = f"--key-file={folder}/munge.key --socket={folder}/munge.socket --pid-file={folder}/munged.pid"
    daemons = [
        f"munged --foreground --force {munge} --seed-file={folder}/seed --log-file={folder}/munged.log",
        "slurmctld -D",
        *(f"slurmd -D -N {node}" for node in NODES),
    ]
    try:
        for command in daemons:
            cluster.start(command)
        is_idle = wait_until(lambda: cluster.node_states() == ["idle"], seconds=30, pause_seconds=0.5)
        assert is_idle, f"nodes are {cluster.node_states()}: see the logs beside slurm.conf"
        yield cluster
    finally:
        for daemon in reversed(cluster.daemons):
            daemon.terminate()
        for daemon in cluster.daemons:
            daemon.wait(timeout=60)
        for node in NODES:  # jobs go on without daemons
            cluster.kill(node)


def _write_configuration(folder: Path) -> None:
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for index in range(2):  # looked at, never opened: the runs are on CPUs
        os.mknod(folder / f"gpu{index}", 0o020666, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    ports = _free_ports()
    values = {"host": socket.gethostname().split(".")[0], "folder": folder, "cpus": os.cpu_count()}
    values |= {"port": ports, "first": ports + 1, "last": ports + 2}
    template = Path(__file__).with_name("slurm.conf").read_text()
    (folder / "slurm.conf").write_text(template.format(**values))


def _free_ports() -> int:
    """Return the first of three ports that nobody listens on."""
    for first in range(16817, 32000, 3):
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            try:
                for offset, each in enumerate((one, two, three)):
                    each.bind(("127.0.0.1", first + offset))
            except OSError:
                continue
            return first
    raise OSError("no three ports in a row are free")
