#!/usr/bin/env bash
# Checks and tests, in .venv (made on first use). Arguments go to pytest: ./scripts/test.sh tests/unit -k balance
# --all: deep tests, too, and all examples of hypothesis.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Triton's interpreter runs the GPU kernels on the CPU; where there is no wheel of it their tests are skipped.
if ! python -c 'import triton' 2>/dev/null; then
    printf '%s\n' "Installing Triton, for the tests of GPU kernels ..."
    python -m pip install --quiet --constraint "$venv/constraints.txt" "triton>=3.2" ||
        echo "note: Triton could not be installed; the tests of GPU kernels will be skipped"
fi

step "ruff check" ruff check
step "mypy" mypy
# Three at a time, on two cores: while ranks of one test wait for each other, others compute.
python -m pytest --numprocesses 3 --dist worksteal "$@"
