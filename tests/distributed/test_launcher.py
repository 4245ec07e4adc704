"""tools/launch.py starts ranks as torchrun does; of a run that fails, Braid's own message remains."""

import subprocess
import sys
from pathlib import Path

from tests.distributed.launch import REPOSITORY, free_port


def test_a_failed_run_ends_in_one_line_and_with_its_own_exit_code(tmp_path: Path) -> None:
    place = ("--nproc-per-node", 3, "--master-port", free_port())
    command = [sys.executable, REPOSITORY / "tools" / "launch.py", *place, REPOSITORY / "pretrain_mllm.py", "--lr", "high"]
    ended = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "pretrain_mllm.py: error: argument --lr: expected a number, found 'high' [ConfigError, rank 0]\n"
