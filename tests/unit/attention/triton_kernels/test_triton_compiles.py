"""The attention kernels compile for GPUs that need not be there: Triton brings the whole compiler along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'braid[triton]')")

ROOT = Path(__file__).parents[4]
GPUS = ((128, 90, 227 * 1024), (80, 86, 99 * 1024))
"""Channels of a head, compute capability, shared memory of a program in bytes."""


@pytest.mark.deep(when=lambda gpu: gpu != GPUS[0])
@pytest.mark.parametrize("gpu", GPUS, ids=["H100", "A40"])
def test_kernels_compile_and_fit(tmp_path: Path, gpu: tuple[int, int, int]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "tests/unit/attention/triton_kernels/compile_kernels.py", *map(str, gpu)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels, (_, capability, shared_bytes) = [json.loads(line) for line in ended.stdout.splitlines()], gpu
    assert all(kernel["shared_bytes"] <= shared_bytes for kernel in kernels)
    assert [kernel["has_matrix_instructions"] for kernel in kernels] == [capability == 90] * 3 + [False] * 3
    sizes = {size for kernel in kernels for size in kernel["specialized_sizes"]}
    assert sizes == {"num_heads", "num_groups"}, "others change with the microbatch, and each variant takes a while to compile"
