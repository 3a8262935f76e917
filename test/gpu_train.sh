#!/bin/sh
# ./train_gpt on a GPU: the same run twice and a resumed one end with the same bits, checkpoints go to the CPU and back,
# and memory that is not there is told with the plan.
. test/frame.sh
losses() { # the losses of steps $2..$3 of run $1, as they stand in its log
    steps "$folder/$1" loss | awk -v a="$2" -v b="$3" '$1 >= a && $1 <= b'
}
same_losses() {
    losses "$1" "$3" "$4" >"$folder/left"
    losses "$2" "$3" "$4" >"$folder/right"
    [ -s "$folder/left" ] && diff "$folder/left" "$folder/right"
}
near_losses() { # within 0.02
    losses "$1" "$3" "$4" >"$folder/left"
    losses "$2" "$3" "$4" >"$folder/right"
    [ -s "$folder/left" ] && paste "$folder/left" "$folder/right" | awk '{ d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || d > 0.02) { print; bad = 1 } } END { exit bad }'
}
same_weights() {
    cmp "$folder/$1/checkpoints/step-0000000$3/model.safetensors" "$folder/$2/checkpoints/step-0000000$3/model.safetensors"
}
small="--train-data synthetic --layers 2 --channels 256 --heads 4 --kv-heads 2 --seq-len 128 --vocab-size 1000
    --micro-batch 4 --global-batch 1024 --learning-rate 1e-3 --warmup-steps 2 --quiet --keep 0"

"$train_gpt" $small --device cuda --run-dir "$folder/a" --steps 8 --checkpoint-every 4 || echo "run a failed"
"$train_gpt" $small --device cuda --run-dir "$folder/b" --steps 8 --checkpoint-every 4 || echo "run b failed"
check "the same run twice has the same losses" same_losses a b 1 8
check "the same run twice ends with the same weights" same_weights a b 8

mkdir "$folder/c" && cp "$folder/a/log.jsonl" "$folder/c" && mkdir "$folder/c/checkpoints" &&
    cp -r "$folder/a/checkpoints/step-00000004" "$folder/c/checkpoints"
cp -r "$folder/c" "$folder/d"
"$train_gpt" $small --device cuda --run-dir "$folder/c" --steps 8 --checkpoint-every 4 --resume || echo "run c failed"
check "a resumed run has the losses of one that was not stopped" same_losses a c 1 8
check "a resumed run ends with the same weights" same_weights a c 8

"$train_gpt" $small --device cpu --run-dir "$folder/d" --steps 6 --checkpoint-every 2 --resume || echo "run d failed"
check "a checkpoint of the GPU goes on on the CPU" near_losses a d 5 6
"$train_gpt" $small --device cuda --run-dir "$folder/d" --steps 8 --checkpoint-every 4 --resume || echo "run d failed"
check "and back on the GPU" near_losses a d 7 8

"$train_gpt" --model gpt3-6.7b --device cuda --train-data synthetic --steps 1 --micro-batch 512 --run-dir "$folder/e" \
    >"$folder/out" 2>"$folder/err"
code=$?
check "too little memory ends with code 1" [ $code -eq 1 ]
check "too little memory is told in the first line" sh -c "head -n 1 '$folder/err' | grep -q 'out of memory'"
check "too little memory shows the plan" grep -q "memory plan" "$folder/err"

finish
