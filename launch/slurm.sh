#!/usr/bin/env bash
# Train under Slurm, on one machine or several. Five minutes before its time is up it saves, is queued again, and goes on.
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh experiment=r1_qwen_14b launch=zero3 processes=16
# The folder of runs must be shared by the machines.
#SBATCH --job-name=rbd-sft
#SBATCH --ntasks-per-node=1
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
told=""
# the signal reaches this shell alone; the first machine's rbd leaves a stop file that all workers read
trap 'told=yes; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
srun rbd sft "$@" &
step=$!
code=0
wait "$step" || code=$?
if [ -n "$told" ]; then
  wait "$step" || true # the first wait ended with the signal; now the checkpoint is written
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
