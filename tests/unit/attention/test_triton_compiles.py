"""The attention kernels compile for a Hopper GPU; needs none, for Triton brings the whole compiler along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'braid[triton]')")

ROOT = Path(__file__).parents[3]
SHARED_BYTES_OF_HOPPER = 227 * 1024


@pytest.mark.parametrize("channels", [80, 128])
def test_kernels_compile_for_sm_90(channels: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "tests/unit/attention/compile_kernels.py", str(channels)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(kernels) == 5
    assert all(kernel["shared_bytes"] <= SHARED_BYTES_OF_HOPPER for kernel in kernels)
    assert [kernel["has_matrix_instructions"] for kernel in kernels] == [True, True, True, False, False]
