#!/usr/bin/env bash
# Trains on this machine, and goes on when ranks are lost (docs/elasticity.md). The ranks of a node, which live and die together:
#
#   scripts/elastic.sh --nodes 4 --nproc-per-node 2 pretrain_mllm.py --elastic --plan templates.yaml --config C.yaml ...
#
# --return-after S starts the ranks of a lost node again after S seconds. `scripts/elastic.sh --help` lists the other flags.
set -euo pipefail
exec python -m megatron.runtime.recovery.supervisor --keeps-store "$@"
