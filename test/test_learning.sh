#!/bin/sh
# A model that sees one batch again and again learns it by heart: loss under 0.01, with and without grouped-query
# attention, whatever is recomputed.
. test/frame.sh
head -c 257 LICENSE >"$folder/text"
"$prepare" --out-dir "$folder" --val-fraction 0 "$folder/text" >/dev/null || failed=1

below_a_hundredth() {
    echo "loss ${1:-missing}"
    echo "${1:-9}" | awk '{ exit !($1 < 0.01) }'
}
for recompute in none block; do
    for kv_heads in 4 1; do
        "$train_gpt" --model tiny --device cpu --layers 2 --channels 64 --heads 4 --kv-heads $kv_heads --seq-len 64 \
            --micro-batch 4 --steps 150 --learning-rate 5e-3 --weight-decay 0 --recompute $recompute --quiet \
            --train-data "$folder/train_*.bin" --run-dir "$folder/$recompute$kv_heads" --checkpoint-every 0 --threads 1
        loss=$(steps "$folder/$recompute$kv_heads" loss | tail -n 1)
        check "one batch is learnt by heart, $kv_heads key/value heads, recompute $recompute" below_a_hundredth "${loss##* }"
    done
done
finish
