#!/usr/bin/env bash
# Serve a model on every machine of a Slurm job: one vLLM server each, a copy of the model per GPU. The servers' addresses go
# into a file, as engine.base_url takes them.
#   sbatch --nodes=4 --gpus-per-node=8 launch/serve.sh Qwen/Qwen2.5-7B-Instruct
#   rbd judgements judge=generative engine@judge.engine=http judge.engine.model=Qwen/Qwen2.5-7B-Instruct \
#     judge.engine.base_url="$(cat servers.txt)" judge.engine.provider=pool judge.engine.api_key_env=null
# More words go to vLLM: --tensor-parallel-size 8 --data-parallel-size 1 for a model that needs all GPUs of a machine.
#SBATCH --job-name=rbd-serve
#SBATCH --ntasks-per-node=1
set -euo pipefail
model=${1:?name the model to serve}
shift
port=${PORT:-8000}
urls=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s|.*|http://&:$port/v1|" | paste -sd,)
echo "[$urls]" > "${SERVERS:-servers.txt}"
srun vllm serve "$model" --port "$port" --data-parallel-size "${SLURM_GPUS_ON_NODE:-1}" "$@"
