#!/usr/bin/env bash
# The paper's whole run: 500 training items per bias, each decided by one judge, about 1.67K traces of DeepSeek-R1 kept of
# 2,000, detectors of four sizes, and 8 judges x 4 biases x 500 test items before and after.
#   export TOGETHER_API_KEY=... OPENAI_API_KEY=... ANTHROPIC_API_KEY=...   RBD_DATA=<RBD's files>   GSM8K=<train.jsonl>
#   bash launch/rbd_paper.sh           interrupted anywhere, the same command goes on; DRY=1 prints the commands
# What each size takes: rbd plan experiment=r1_qwen_14b launch=zero3_offload gpus=6 gpu_gb=80
set -euo pipefail
if [ -n "${DRY:-}" ]; then : "${GSM8K:=train.jsonl}" "${RBD_DATA:=rbd_bias4_eval}"; fi
step() { if [ -n "${DRY:-}" ]; then echo "rbd $*"; else rbd "$@"; fi; }

# name, model, server and key's variable of each judge (arXiv 2505.17100)
together=https://api.together.xyz/v1 openai=https://api.openai.com/v1 anthropic=https://api.anthropic.com/v1
judges=(
  "gpt-4o gpt-4o $openai OPENAI_API_KEY" "gpt-4o-mini gpt-4o-mini $openai OPENAI_API_KEY"
  "llama-8b meta-llama/Meta-Llama-3.1-8B-Instruct-Turbo $together TOGETHER_API_KEY"
  "llama-70b meta-llama/Meta-Llama-3.1-70B-Instruct-Turbo $together TOGETHER_API_KEY"
  "llama-405b meta-llama/Meta-Llama-3.1-405B-Instruct-Turbo $together TOGETHER_API_KEY"
  "deepseek-v3 deepseek-ai/DeepSeek-V3 $together TOGETHER_API_KEY"
  "haiku claude-3-5-haiku-latest $anthropic ANTHROPIC_API_KEY" "sonnet claude-3-5-sonnet-latest $anthropic ANTHROPIC_API_KEY"
)
sizes=(r1_qwen_1_5b:ddp:2 r1_qwen_7b:zero3:8 r1_llama_8b:zero3:8 r1_qwen_14b:zero3_offload:6)

# the judge whose decisions a bias's detector is trained on (the paper's appendix)
trains() { case $1 in llama-405b) echo verbosity ;; gpt-4o) echo position ;; gpt-4o-mini) echo bandwagon ;; haiku) echo sentiment ;; esac; }

# training items; the paper takes position and bandwagon from Arena, sentiment from ScienceQA: with those files at hand,
# source=jsonl
for bias in verbosity position bandwagon sentiment; do
  step pairs "name=paper-$bias" "bias=[$bias]" source=gsm8k "source.path=${GSM8K:?}" weak=local limit=500
done
step pairs name=paper-test source=rbd "source.folder=${RBD_DATA:?}" limit=500    # the published test items
# how often a decision on D_bias flips by itself: beside every bias rate stands this floor
noise=(sham=true noise_limit=50)
train="" tests=""
for entry in "${judges[@]}"; do
  read -r name model url key <<<"$entry"
  judge=(judge=generative "judge.name=$name" engine@judge.engine=http "judge.engine.model=$model"
    "judge.engine.base_url=$url" "judge.engine.api_key_env=$key")
  bias=$(trains "$name")
  if [ -n "$bias" ]; then
    step judgements "name=paper-$name" "pairs=runs/paper-$bias/pairs/pairs.jsonl" orders=one "${judge[@]}" \
      "${noise[@]}"
    step traces "name=paper-$name" teacher=r1
    step curate "name=paper-$name" test_share=0.04 'held_out=[runs/paper-test/pairs/pairs.jsonl]'
    train="$train,runs/paper-$name/curate/train.jsonl"
  fi
  step judgements "name=paper-test-$name" pairs=runs/paper-test/pairs/pairs.jsonl "${judge[@]}" "${noise[@]}"
  tests="$tests,paper-test-$name"
done
sized=""
for entry in "${sizes[@]}"; do
  IFS=: read -r size launch processes <<<"$entry"
  # reasoning, and the ablation's two others on the same data
  for objective in reasoning label classifier; do
    step sft "name=paper-$size-$objective" "experiment=$size" "objective=$objective" "launch=$launch" \
      "processes=$processes" "train=[${train#,}]"
    # on a few unseen training items of one judge, and on every judge's decisions on the published test items
    step detection "name=paper-$size-$objective" "detector=${objective/reasoning/trained}" "also=[${tests#,}]" \
      examples=runs/paper-gpt-4o/curate/test.jsonl
    [ "$size" = r1_qwen_1_5b ] || break # the paper's ablation is of the smallest
  done
  loops=""
  for entry in "${judges[@]}"; do
    read -r name model url key <<<"$entry"
    step debias "name=paper-$size-$name" "from=paper-$size-reasoning" max_rounds=3 judge=generative "judge.name=$name" \
      "trained_on=[${train#,}]" "records=runs/paper-test-$name/judgements/records.jsonl" engine@judge.engine=http "judge.engine.model=$model" \
      "judge.engine.base_url=$url" "judge.engine.api_key_env=$key"
    loops="$loops,paper-$size-$name"
  done
  # the judges side by side, as in the paper's main table
  step report "name=paper-$size" "from=paper-$size-reasoning" "runs=[${loops#,}]" layout=rbd_main
  sized="$sized,paper-$size-reasoning"
done
step report name=paper-sizes from=paper-r1_qwen_1_5b-reasoning "runs=[${sized#,}]" layout=rbd_scaling
step report name=paper-ablation from=paper-r1_qwen_1_5b-reasoning layout=rbd_baselines \
  'runs=[paper-r1_qwen_1_5b-reasoning,paper-r1_qwen_1_5b-label,paper-r1_qwen_1_5b-classifier]'
