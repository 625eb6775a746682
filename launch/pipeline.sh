#!/usr/bin/env bash
# The whole job, in order: eight GPUs, a judge and DeepSeek-R1 over HTTP. Run again, it continues.
#   export TOGETHER_API_KEY=...   RBD_DATA=<folder with the RBD evaluation files>   GSM8K=<GSM8K train.jsonl>
set -euo pipefail
judge="judge=generative judge.name=Llama-3.1-8B engine@judge.engine=http judge.engine.model=meta-llama/Llama-3.1-8B-Instruct-Turbo"

# 50 decisions per bias are judged again with a courtesy before the question: how often one flips by itself
noise="sham=true noise_limit=50"

# training pairs from questions whose answers are known; a weak model writes the wrong answers, each checked to be wrong
rbd pairs name=train source=gsm8k source.path="$GSM8K" weak=local limit=500
# the judge decides D and D_bias in both orders: a decision right on D and wrong on D_bias is a biased one
rbd judgements name=train $judge $noise
# DeepSeek-R1 reasons about every case, without gold or label, four times
rbd traces name=train teacher=r1 teacher.samples=4
# the items of the final measurement, made first so that their questions can be held out
rbd pairs name=test source=rbd source.folder="$RBD_DATA"
# keep readable traces that agree with the label, no question on both sides
rbd curate name=train 'held_out=[runs/test/pairs/pairs.jsonl]'
# distil under ZeRO-3 on eight GPUs
rbd sft name=train experiment=r1_qwen_7b launch=zero3 processes=8
# what the detector knows, beside rules, teacher and ceiling
rbd detection name=train
# the same judge on the held-out items, before and after
rbd judgements name=test $judge $noise
rbd debias name=test from=train records=runs/test/judgements/records.jsonl $judge max_rounds=3
# find biases that the library does not name, on preference pairs ($PREFERENCES: a .parquet in JudgeBench's columns); the
# judge reasons here, since a teacher names what drew it from its own explanation
teacher="engine@rewriter=http rewriter.model=Qwen/Qwen2.5-72B-Instruct"
rbd discover name=train source=preference source.path="$PREFERENCES" $judge judge.reason=true judge.max_new_tokens=512 \
  $teacher
# harden the pairs that discovery left alone: a set for other judges (docs/discovery.md: its reviews, and `rbd judging`)
rbd benchmark name=train source=preference source.path="$PREFERENCES" $judge $teacher
# the loop closed: training pairs with the found biases, for the next detector (judgements, traces, curate, sft as above)
rbd pairs name=found source=gsm8k source.path="$GSM8K" weak=local limit=500 \
  'bias=["library:runs/train/discover/library.jsonl"]' $teacher
# train them away: preference pairs with the biases written into the rejected answers, and plain DPO to compare with
rbd preferences name=train source=preference source.path="$PREFERENCES" $teacher
rbd dpo name=train model=r1_qwen_7b model.lora_rank=16 launch=zero3 processes=8
rbd dpo name=plain from=train plain_only=true model=r1_qwen_7b model.lora_rank=16 launch=zero3 processes=8
# before and after: the models as prompted judges in both orders, and the implicit reward
rbd before_after name=train 'runs=[plain,train]' judge=generative engine@judge.engine=local judge.engine.reasoning=true \
  judge.max_new_tokens=2048
# scores across ranges by two models of a family, one forward of each, beside greedy, prior subtraction and calibration
rbd contrast name=test experiment=contrast_llama_8b_1b launch=ddp processes=8
# one page with everything
rbd report name=test from=train
