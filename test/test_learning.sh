#!/bin/sh
# A model that sees one batch again and again learns it by heart: loss under 0.01, with and without grouped-query
# attention, whatever is recomputed.
build=${FLASHGPT_BUILD:-build}
train=${FLASHGPT_TRAINER:-./train_gpt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
head -c 257 LICENSE >"$work/text"
"$build/prepare" --out-dir "$work" --val-fraction 0 "$work/text" >/dev/null || failed=1

for recompute in none block; do
    for kv_heads in 4 1; do
        $train --model tiny --device cpu --layers 2 --channels 64 --heads 4 --kv-heads $kv_heads --seq-len 64 \
            --micro-batch 4 --steps 150 --learning-rate 5e-3 --weight-decay 0 --recompute $recompute --quiet \
            --train-data "$work/train_*.bin" --run-dir "$work/$recompute$kv_heads" --checkpoint-every 0 --threads 1
        loss=$(sed -n 's/.*"type":"step".*"loss":\([^,]*\),.*/\1/p' "$work/$recompute$kv_heads/log.jsonl" | tail -n 1)
        if echo "${loss:-9}" | awk '{ exit !($1 < 0.01) }'; then
            passed=$((passed + 1))
            echo "  ok one batch is learnt by heart, $kv_heads key/value heads, recompute $recompute: loss $loss"
        else
            failed=$((failed + 1))
            echo "  FAILED one batch is learnt by heart, $kv_heads key/value heads, recompute $recompute: loss $loss"
        fi
    done
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
