#!/usr/bin/env bash
# The small twin of pipeline.sh: the whole job on two CPU cores with the embedded model, on generated questions.
# Interrupted anywhere, the same command goes on where it was: finished stages are skipped, answered calls are kept.
set -euo pipefail
run="name=${NAME:-demo} seed=${SEED:-0}"

say() { printf '\n== %s\n' "$*"; }

# word problems for four biases; a third of the cues favours the right answer, so that content-blind rules fail
rbd pairs $run congruent_share=0.3333 source.train=${TRAIN:-220} source.test=50
say "the judge decides (about a minute on two cores)"
# a real model with a declared planted leaning decides every pair, in an order drawn per pair
rbd judgements $run orders=one judge=embedded_leaning sham=true noise_limit=50
# a template works each case out from what is shown; its records say that it is a template
rbd traces $run teacher=template
# keep what agrees with the label; generated questions come with their split
rbd curate $run definitions=known
say "the detector is distilled (about 9 minutes)"
# distil: bfloat16 weights with float32 masters, one global batch of 8 short rows per step; each row once, and all
# biases in every batch: grouped by length, position's long rows come by themselves and are learned last
rbd sft $run model.dtype=bfloat16 trainer.learning_rate=5e-4 trainer.epochs=1 trainer.micro_batch=4 \
  trainer.max_length=1024 trainer.weight_decay=0.0 trainer.save_every=40 trainer.group_by_length=false
say "the detector reads cases that it has never seen (about 2 minutes)"
# the detector reads held-out cases, beside rules and ceiling, in the number format that it was trained in
rbd detection $run detector.definitions=known detector.max_new_tokens=128 detector.engine.dtype=bfloat16
say "the judge decides again (about a minute)"
# where it says Yes, its reasoning goes back to the judge, which decides again
rbd debias $run judge=embedded_leaning detector.definitions=known detector.max_new_tokens=128 \
  detector.engine.dtype=bfloat16 max_rounds=1 rivals=true unbiased=false
rbd report $run
