#!/usr/bin/env bash
# Trains a small vision-language model on real handwritten digits over 4 processes, in .venv (made on first use).
#
#   ./scripts/quickstart.sh            train; a run that was stopped goes on where its last checkpoint left it
#   ./scripts/quickstart.sh --fresh    forget the earlier run and start anew
#
# All other arguments go to pretrain_mllm.py: ./scripts/quickstart.sh --fresh --train-iters 50 --vision-dp 1 --llm-pp 3
set -euo pipefail
extras=examples,hf,plots,tensorboard
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

run=runs/digits
arguments=()
for argument in "$@"; do
    if [[ "$argument" == --fresh ]]; then
        rm -rf "$run"
    else
        arguments+=("$argument")
    fi
done
mkdir -p "$run"

python tools/launch.py --nproc-per-node 4 pretrain_mllm.py \
    --config examples/digits/config.yaml \
    --save "$run/checkpoints" --load "$run/checkpoints" --save-interval 625 \
    --tensorboard-dir "$run/tensorboard" --log-json "$run/log.jsonl" --report-dir "$run" \
    ${arguments[@]+"${arguments[@]}"}

printf '\n%s\n' "Three questions about pictures that it was not trained on:"
exec python tools/generate.py --load "$run/checkpoints" --held-out 3 --max-new-tokens 16 \
    --run-flags --config examples/digits/config.yaml ${arguments[@]+"${arguments[@]}"}
