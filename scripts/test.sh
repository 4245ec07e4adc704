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

# Transformer Engine's package is pure Python and runs over a stand-in for its compiled module. It lies where only those tests look,
# since megatron-core would find it anywhere else. NVIDIA's images have 2.8; the others are the oldest that works and the newest.
export BRAID_TRANSFORMER_ENGINE="$(realpath "$venv")/transformer_engine"
for version in 2.3.0 2.8.0 2.20.2; do
    if [[ ! -d "$BRAID_TRANSFORMER_ENGINE/$version" ]]; then
        python -m pip install --quiet --no-deps --target "$BRAID_TRANSFORMER_ENGINE/$version" "transformer-engine==$version" ||
            echo "note: Transformer Engine $version could not be had; its tests will be skipped"
    fi
done

step "ruff check" ruff check
step "mypy" mypy
# Three at a time, on two cores: while ranks of one test wait for each other, others compute.
python -m pytest --numprocesses 3 --dist worksteal "$@"
