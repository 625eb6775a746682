#!/usr/bin/env bash
# Discovery to DPO on real preference pairs, on two CPU cores: the embedded model is judge and policy, and a rule-based
# teacher (no model, named so in every record) writes and names biases. Run again, it continues.
#   DATA=<folder with rewardbench_filtered.parquet and judge_bench.parquet> bash launch/discover.sh
set -euo pipefail
run="name=${NAME:-discovery}"
pairs="source=preference source.format=rewardbench source.path=$DATA/rewardbench_filtered.parquet"
judge="judge=embedded judge.name=SmolLM2-135M"

# biases of the judge that the library did not name, tested on items of their own
rbd discover $run $pairs $judge engine@rewriter=rules explain_tokens=64
# the other set, hardened with them: what fools this judge in both orders
rbd benchmark $run source=preference source.path="$DATA/judge_bench.parquet" $judge \
  engine@rewriter=rules limit=${ITEMS:-60} variants=4
# pairs to train on; the held-out ones are rewritten with other templates
rbd preferences $run $pairs limit=${PAIRS:-200} engine@rewriter=rules rewriter.templates=train \
  engine@held_out_rewriter=rules held_out_rewriter.templates=test
# plain DPO and DPO with biases written in, three seeds; the latter has more rows, so a longer plain DPO has its steps
train="from=${NAME:-discovery} model.dtype=bfloat16 trainer.learning_rate=5e-6 trainer.max_length=640 trainer.micro_batch=2"
for seed in 0 1 2; do
  rbd dpo name=plain-$seed $train seed=$seed plain_only=true
  rbd dpo name=augmented-$seed $train seed=$seed
  steps=$(wc -l < runs/augmented-$seed/dpo/losses.jsonl)
  rbd dpo name=longer-$seed $train seed=$seed plain_only=true trainer.max_steps=$steps
done
# before and after: the models as prompted judges in both orders, and the implicit reward (PROMPTED=false: that alone)
runs=plain-0,augmented-0,longer-0,plain-1,augmented-1,longer-1,plain-2,augmented-2,longer-2
rbd before_after $run $judge "runs=[$runs]" prompted=${PROMPTED:-true}
rbd report $run
