#!/usr/bin/env bash
# Trains a model of Hugging Face on LLaVA's JSON in two stages, the projector and then all, and writes it back for transformers.
#
#   ./examples/llava/train.sh RUN              RUN holds `model`, `data` and `held_out`, as make_inputs.py writes them
#   ./examples/llava/train.sh RUN MODEL DATA   a model's folder, and a file of conversations beside its images
#
# Further flags of both stages: FLAGS="--vision-dp 2 --llm-tp 2" NUM_PROCESSES=4 ./examples/llava/train.sh ...
set -euo pipefail
cd "$(dirname "$0")/../.."

run=${1:?name the folder of the run}
model=${2:-$run/model}
data=${3:-$run/data/conversations.json}
read -ra flags <<< "${FLAGS:-}"

train() {
    python tools/launch.py --nproc-per-node "${NUM_PROCESSES:-2}" pretrain_mllm.py --data-path "$data" "$@" ${flags[@]+"${flags[@]}"}
}

train --config examples/llava/projector.yaml --load-hf "$model" --save "$run/projector"
train --config examples/llava/all.yaml --model "$model" --tokenizer-model "$model" --load "$run/projector" --save "$run/all" \
    --save-hf "$run/trained"
echo "transformers loads the model from $run/trained"
if [[ -f "$run/held_out/conversations.json" ]]; then
    python examples/llava/ask.py --model "$run/trained" --data "$run/held_out/conversations.json"
fi
