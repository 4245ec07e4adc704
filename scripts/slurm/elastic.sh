#!/usr/bin/env bash
# Trains on Slurm, and goes on when nodes fail (docs/elasticity.md): one supervisor per node, and on the first node a process that
# keeps the store in which all meet. Adapt the lines marked <>, then:
#
#   PLAN=templates.yaml CONFIG=my/config.yaml sbatch scripts/slurm/elastic.sh
#
# PLAN has the templates, for as many nodes as the job gets: tools/plan.py --planner oobleck --fault-tolerance F --output templates.yaml.
# More flags of pretrain_mllm.py may follow the script's name. The first node, on which the script itself runs, must not fail: when it
# does, the others have the job requeued, and it resumes from the newest checkpoint in $RUN.
#
# Slurm takes a node that fails out of the job for good. Its place, numbered from 0, is taken by a job of one node, with the number of
# nodes that the run began with; where that node fails, too, Slurm requeues this job, and it joins again:
#
#   JOIN=job NODE=3 NODES=16 PLAN=templates.yaml CONFIG=my/config.yaml sbatch --nodes=1 scripts/slurm/elastic.sh

#SBATCH --job-name=braid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=braid-%j.log

set -euo pipefail

RUN="${RUN:-$SLURM_SUBMIT_DIR/runs/slurm}"                                # <> on a file system that all nodes share
BRAID="${BRAID:-/opt/braid}"                                              # <> where Braid is installed: this is the container's
CONFIG="${CONFIG:?a configuration file}"                                  # <>
PLAN="${PLAN:?a file of templates}"                                       # <>
IMAGE="${IMAGE-$SLURM_SUBMIT_DIR/braid.sqsh}"                             # <> built from ./Dockerfile: enroot import dockerd://braid
MOUNTS="${MOUNTS:-$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR,$RUN:$RUN}"         # <> add the data
SAVE_INTERVAL="${SAVE_INTERVAL:-1000}"                                    # <> steps whose work more losses than templates allow for cost
RETURN_AFTER="${RETURN_AFTER:-30}"                                        # <> seconds until a node whose ranks died starts them again
JOIN="${JOIN:-}"

mkdir -p "$RUN"
if [[ -n "$JOIN" ]]; then
    place=(--nodes "${NODES:?nodes that the run began with}" --node "${NODE:?the place to take, from 0}")
    MASTER_ADDR="${MASTER_ADDR:-$(squeue --noheader --jobs "$JOIN" --format %B)}"
else
    place=(--nodes "$SLURM_JOB_NUM_NODES" --node-from SLURM_PROCID)
    MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}"
fi
# The run's secret, new with each start of the job: only events of those who know it count (SECURITY.md).
TOKEN="$RUN/token-${JOIN:-$SLURM_JOB_ID}"
if [[ -z "$JOIN" ]]; then
    (umask 077 && rm -f "$TOKEN" && od -An -tx1 -N32 /dev/urandom | tr -d ' \n' > "$TOKEN")
fi
MASTER_PORT=$((20000 + ${JOIN:-$SLURM_JOB_ID} % 20000))

# Microbatches of all sizes would leave holes in the memory of a GPU.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# These are pyxis's flags. IMAGE= (empty) leaves them out, where Braid is installed on the nodes themselves.
container=()
if [[ -n "$IMAGE" ]]; then
    container=(--container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir="$SLURM_SUBMIT_DIR")
fi

supervisor=(python -m megatron.runtime.recovery.supervisor --address "$MASTER_ADDR" --port "$MASTER_PORT" --token "$TOKEN" "${place[@]}")
beside=(srun --overlap --cpus-per-task=1 --gpus-per-node=0) # steps that share what the ranks have

if [[ -z "$JOIN" ]]; then
    "${beside[@]}" --nodes=1 --ntasks=1 --nodelist="${SLURMD_NODENAME:-$(hostname -s)}" \
        ${container[@]+"${container[@]}"} "${supervisor[@]}" --keeps-store --supervisors "$SLURM_JOB_NUM_NODES" &
    keeper=$!
    # A job of --no-kill whose first node has failed runs on in Slurm's eyes, without this script. So every node looks for the store.
    is_there="timeout 10 bash -c ': < /dev/tcp/$MASTER_ADDR/$MASTER_PORT'"
    "${beside[@]}" --no-kill --kill-on-bad-exit=0 bash -c "exec > /dev/null 2>&1
        until $is_there; do sleep 10; done
        while sleep 20; do $is_there || { sleep 20; $is_there; } || scontrol requeue $SLURM_JOB_ID; done" &
    watch=$!
    trap 'kill "$keeper" "$watch" 2>/dev/null || true' EXIT
fi

srun --no-kill --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" ${container[@]+"${container[@]}"} \
    "${supervisor[@]}" --nodes-here 1 --nproc-per-node "$SLURM_GPUS_ON_NODE" --return-after "$RETURN_AFTER" \
    "$BRAID/pretrain_mllm.py" --elastic --config "$CONFIG" --plan "$PLAN" \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval "$SAVE_INTERVAL" \
    --tensorboard-dir "$RUN/tensorboard" --log-json "$RUN/log.jsonl" --report-dir "$RUN" "$@"
