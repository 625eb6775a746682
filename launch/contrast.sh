#!/usr/bin/env bash
# The embedded model and a smaller relative of it on SummEval and Newsroom, all ranges: the tables of docs/results.md.
# Interrupted anywhere, the same command goes on: finished stages are skipped, answered calls and checkpoints are kept.
#   export GSM8K=<test.jsonl>   SUMMEVAL=<summeval_dev.json>   NEWSROOM=<newsroom.json>
# STEPS=2 LIMIT=limit=2 tries it in minutes: two steps of healing, two documents of each set.
set -euo pipefail

# half of the layers, healed on questions and articles; no score is read
rbd relative name=relative texts="[$GSM8K,$NEWSROOM]" steps=${STEPS:-300}
# a setting fixed a priori, then one chosen on other documents: the second finds every reply in the ledger
for choose in fixed cross; do
  rbd contrast name=summeval-$choose from=relative source=summeval source.path="$SUMMEVAL" choose=$choose ${LIMIT:-}
  rbd contrast name=newsroom-$choose from=relative source=newsroom source.path="$NEWSROOM" choose=$choose ${LIMIT:-}
  rbd report name=summeval-$choose
  rbd report name=newsroom-$choose
done
# the runs side by side: ranges, grid, published figures
rbd report name=ranges from=summeval-fixed layout=contrast_ranges \
  'runs=[summeval-fixed,summeval-cross,newsroom-fixed,newsroom-cross]'
