"""`scripts/slurm/*.sh` with stand-ins for Slurm's commands: what they start must be flags that a run accepts."""

import os
import subprocess

import pytest

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.recovery.supervisor import read_flags
from tests.sanity.repository import ROOT

NOW = 10**9
STAND_INS = {
    "date": f'[[ "$1" == +%s ]] && echo {NOW} || exec /bin/date "$@"',
    "scontrol": "echo node1; echo node2",
    "srun": 'while [[ "$1" == --* ]]; do echo "srun $1"; shift; done; exec "$@"',
    "torchrun": 'for argument in "$@"; do echo "torchrun $argument"; done',
}
SLURM = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}


def script_runs(folder, script, bodies, **given):
    """Return a function that runs a script as Slurm would, beside stand-ins for the programs that it calls."""
    commands = folder / "bin"
    commands.mkdir()
    for name, body in bodies.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    base = {**SLURM, "SLURM_SUBMIT_DIR": str(folder), "BRAID": str(ROOT), "PATH": f"{commands}:{os.environ['PATH']}", **given}

    def run(*flags, **environment):
        command = [ROOT / "scripts" / "slurm" / script, *flags]
        return subprocess.run(command, env=base | environment, check=True, capture_output=True, text=True, timeout=60).stdout

    return run


@pytest.fixture
def submit(tmp_path):
    """Run the script as Slurm would; returns the arguments of srun and of torchrun."""
    run = script_runs(tmp_path, "pretrain.sh", STAND_INS, SLURM_CPUS_PER_TASK="64")

    def arguments(*flags, **environment):
        lines = [line.split(" ", 1) for line in run(*flags, **environment).splitlines()]
        return [[argument for name, argument in lines if name == command] for command in ("srun", "torchrun")]

    return arguments


def flags_of(torchrun):
    return torchrun[torchrun.index(str(ROOT / "pretrain_mllm.py")) + 1 :]


def parse(torchrun):
    return parse_arguments(flags_of(torchrun), environ={"WORLD_SIZE": "16", "RANK": "0"})


def test_as_it_stands_it_starts_a_run_that_saves_and_resumes(submit, tmp_path):
    srun, torchrun = submit()
    assert any(argument.startswith("--container-image=") for argument in srun)
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=node1:20012"} <= set(torchrun)
    checkpoint = parse(torchrun).checkpoint
    assert checkpoint.save == checkpoint.load == tmp_path / "runs" / "slurm" / "checkpoints"
    assert checkpoint.save_interval == 100


def test_flags_after_the_script_and_the_environment_reach_the_run(submit):
    config = ROOT / "examples" / "corpus" / "config.yaml"
    srun, torchrun = submit("--data-path", "my/manifest.jsonl", CONFIG=str(config), SAVE_INTERVAL="7", IMAGE="")
    assert srun == ["--kill-on-bad-exit=1", "--cpus-per-task=64"]
    assert parse(torchrun).data.data_path == ("my/manifest.jsonl",)
    assert parse(torchrun).checkpoint.save_interval == 7


@pytest.mark.parametrize(("minutes_left", "expected"), [(60, 49), (5, 1)])
def test_it_leaves_time_to_save_before_the_job_ends(submit, minutes_left, expected):
    _, torchrun = submit(SLURM_JOB_END_TIME=str(NOW + 60 * minutes_left - 1))
    flags = flags_of(torchrun)
    assert int(flags[flags.index("--exit-duration-in-mins") + 1]) == expected


@pytest.fixture
def submit_elastic(tmp_path, monkeypatch):
    """Run the script of elastic runs as Slurm would, on the first of two nodes; returns the calls of srun."""
    calls = tmp_path / "calls"
    noting = f"""echo ${{*//$'\\n'/ }} >> {calls}
[[ "$*" != *--elastic* || -n "$JOIN" ]] || until [[ $(wc -l < {calls}) == 3 ]]; do sleep 0.02; done"""
    bodies = {"srun": noting, "scontrol": "echo node1", "squeue": "echo node7"}
    given = {"SLURMD_NODENAME": "node1", "IMAGE": "", "CONFIG": "c.yaml", "PLAN": "templates.yaml"}
    run = script_runs(tmp_path, "elastic.sh", bodies, **given)
    monkeypatch.setenv("SLURM_PROCID", "1")

    def commands(*flags, **environment):
        run(*flags, **environment)
        return [line.split() for line in calls.read_text().splitlines()]

    return commands


def supervisor_flags(call):
    return read_flags(call[call.index("megatron.runtime.recovery.supervisor") + 1 :])


def test_elastic_runs_have_a_keeper_and_on_each_node_a_supervisor_and_a_watch(submit_elastic):
    calls = submit_elastic("--lr", "0.1")
    (ranks,) = (call for call in calls if "--elastic" in call)
    (keeper,) = (call for call in calls if "--keeps-store" in call)
    (watch,) = (call for call in calls if "requeue" in call)
    assert {"--no-kill", "--kill-on-bad-exit=0"} <= set(ranks) & set(watch)
    flags, command = supervisor_flags(ranks)
    assert (flags.nodes, flags.node, flags.nodes_here, flags.nproc_per_node) == (2, 1, 1, 8)
    assert (flags.address, flags.port, flags.return_after, flags.keeps_store) == ("node1", 20012, 30.0, False)
    assert command[:2] == [str(ROOT / "pretrain_mllm.py"), "--elastic"] and command[-2:] == ["--lr", "0.1"]
    token = flags.token
    assert token.stat().st_mode & 0o777 == 0o600 and len(flags.secret) == 64
    flags, command = supervisor_flags(keeper)
    assert flags.token == token
    assert "--nodelist=node1" in keeper and (flags.port, flags.supervisors, flags.keeps_store, command) == (20012, 2, True, [])
    assert "/dev/tcp/node1/20012'" in watch and watch[-4:] == ["scontrol", "requeue", "12;", "done"]


def test_a_job_of_one_node_takes_a_place_in_an_elastic_run(submit_elastic, tmp_path):
    token = tmp_path / "runs" / "slurm" / "token-4711"
    token.parent.mkdir(parents=True)
    token.write_text("that of the run which is joined")
    (call,) = submit_elastic(JOIN="4711", NODE="3", NODES="16", SLURM_JOB_NUM_NODES="1")
    flags, command = supervisor_flags(call)
    assert (flags.nodes, flags.node, flags.nodes_here, flags.address, flags.port) == (16, 3, 1, "node7", 24711)
    assert flags.token == token and token.read_text() == "that of the run which is joined"
    assert command[:2] == [str(ROOT / "pretrain_mllm.py"), "--elastic"]
