#!/usr/bin/env bash
# Trains on Slurm: one torchrun per node, which meet at the first node. Adapt the lines marked <>, then:
#
#   sbatch scripts/slurm/pretrain.sh                                  the digits of examples/digits: does everything work here?
#   CONFIG=my/config.yaml RUN=/shared/runs/mine sbatch scripts/slurm/pretrain.sh --data-path /shared/data/manifest.jsonl
#
# More flags of pretrain_mllm.py may follow the script's name. A checkpoint is written every SAVE_INTERVAL steps, when Slurm ends
# the job early (it gets SIGTERM), and some minutes before the job's time is over. Submitting the script again, or Slurm requeueing
# the job after a node failed, resumes from the newest one in $RUN.

#SBATCH --job-name=braid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=braid-%j.log

set -euo pipefail

RUN="${RUN:-$SLURM_SUBMIT_DIR/runs/slurm}"                                # <> on a file system that all nodes share
BRAID="${BRAID:-/opt/braid}"                                              # <> where Braid is installed: this is the container's
CONFIG="${CONFIG:-$BRAID/examples/digits/config.yaml}"                    # <>
IMAGE="${IMAGE-$SLURM_SUBMIT_DIR/braid.sqsh}"                             # <> built from ./Dockerfile: enroot import dockerd://braid
MOUNTS="${MOUNTS:-$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR,$RUN:$RUN}"         # <> add the data
SAVE_INTERVAL="${SAVE_INTERVAL:-100}"                                     # <> steps whose work a failed node may cost
MINUTES_TO_SAVE="${MINUTES_TO_SAVE:-10}"                                  # <> before the job's end: a step, a checkpoint, and to spare

mkdir -p "$RUN"
MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

end="${SLURM_JOB_END_TIME:-}" # Slurm before 23.02 does not say when the job will end; then its queue does, or knows of no end.
if [[ -z "$end" ]] && listed="$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e 2>/dev/null)" && [[ "$listed" == *T*:* ]]; then
    end="$(date --date "$listed" +%s)"
fi
limits=()
if [[ -n "$end" ]]; then
    minutes=$(((end - $(date +%s)) / 60 - MINUTES_TO_SAVE))
    limits=(--exit-duration-in-mins "$((minutes > 1 ? minutes : 1))")
fi

# Microbatches of all sizes would leave holes in the memory of a GPU.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# These are pyxis's flags. IMAGE= (empty) leaves them out, where Braid is installed on the nodes themselves.
container=()
if [[ -n "$IMAGE" ]]; then
    container=(--container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir="$SLURM_SUBMIT_DIR")
fi

# Ranks are counted in Slurm's order of nodes, in which neighbours are close; torchrun's own rendezvous would sort them by name.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" ${container[@]+"${container[@]}"} \
    bash -c 'exec torchrun --node-rank="$SLURM_NODEID" "$@"' torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" \
    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-backend=static --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    "$BRAID/pretrain_mllm.py" --config "$CONFIG" \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval "$SAVE_INTERVAL" ${limits[@]+"${limits[@]}"} \
    --tensorboard-dir "$RUN/tensorboard" --log-json "$RUN/log.jsonl" --report-dir "$RUN" "$@"
