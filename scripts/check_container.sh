#!/usr/bin/env bash
# In a container (NVIDIA's image, with Braid installed): do its megatron-core, Transformer Engine and Triton have the signatures that
# Braid calls? Uses $PYTHON or python. Exit code 1 if not, or if one of them is missing. See benchmarks/check_calls.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python}" benchmarks/check_calls.py --require megatron.core transformer_engine triton "$@"
