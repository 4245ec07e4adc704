#!/usr/bin/env bash
# Checks Braid on one CUDA device: kernels, training on every path, hardware queues, host synchronisation, attention's speed.
# --ranks 8 [--bench]: every schedule and layout on several devices, or their speed.
# Uses the python that is active, in NGC's images the one with CUDA, or $PYTHON: ./scripts/gpu_check.sh [--quick] [--only GROUP,...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for python in ${PYTHON:-} python python3 .venv/bin/python; do
    if "$python" -c 'import torch' 2>/dev/null; then
        exec "$python" benchmarks/gpu_check.py "$@"
    fi
done
echo "gpu_check.sh: no python here has torch; install Braid ('pip install -e .') or name one that has it: PYTHON=..." >&2
exit 2
