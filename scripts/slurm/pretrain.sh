#!/usr/bin/env bash
# Trains on Slurm: one torchrun per node, which meet at the first node. Adapt the lines marked <>, then: sbatch scripts/slurm/pretrain.sh
#
# Submitting it again, or Slurm requeueing it after a node failed, resumes from the newest checkpoint in $RUN.
# More flags of pretrain_mllm.py may follow the script's name: sbatch scripts/slurm/pretrain.sh --lr 1e-4

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

RUN="${RUN:-$SLURM_SUBMIT_DIR/runs/corpus}"                               # <> on a file system that all nodes share
CONFIG="${CONFIG:-examples/corpus/config.yaml}"                           # <>
IMAGE="${IMAGE:-$SLURM_SUBMIT_DIR/braid.sqsh}"                            # <> built from ./Dockerfile: enroot import dockerd://braid
MOUNTS="${MOUNTS:-$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR,$RUN:$RUN}"         # <> add the data

mkdir -p "$RUN"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# --container-* are pyxis's flags; leave them out where Braid is installed on the nodes.
srun --kill-on-bad-exit=1 \
    --container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir="$SLURM_SUBMIT_DIR" \
    torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" \
    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    pretrain_mllm.py --config "$CONFIG" \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" \
    --tensorboard-dir "$RUN/tensorboard" --log-json "$RUN/log.jsonl" --report-dir "$RUN" "$@"
