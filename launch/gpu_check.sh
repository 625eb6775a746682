#!/usr/bin/env bash
# Under ten minutes on one GPU: bf16 SFT with ZeRO-3 and rows laid end to end, and what was planned against what it took.
#   bash launch/gpu_check.sh [out.json]      DRY=1 rehearses it on a CPU with the tiny model
# In the image: docker run --gpus all --entrypoint bash rbd-train launch/gpu_check.sh
# Prints one JSON object as its last line; needs no hub: weights are random, in the shape of R1-Distill-Qwen-1.5B.
set -euo pipefail
out=$(realpath -m "${1:-gpu_check.json}")
cd "$(dirname "$0")/.." # `benchmarks` is no installed package
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
export RBD_CHECK_ROOT="$root" RBD_CHECK_DRY="${DRY:-}"

python -m benchmarks.gpu_check make
words="root=$root name=check train=[$root/train.jsonl] model=plain model.path=$root/model trainer.padding_free=true \
  trainer.max_steps=${STEPS:-12} trainer.global_batch=8 trainer.micro_batch=${MICRO:-4} trainer.max_length=2048 debug=true"
rbd sft $words launch=zero3 processes="${PROCESSES:-1}"
python -m benchmarks.gpu_check report "$out"
