#!/bin/sh
# ./train_gpt on a GPU: the same run twice and a resumed one end with the same bits, checkpoints go to the CPU and back,
# and memory that is not there is told with the plan.
train=${FLASHGPT_TRAINER:-./train_gpt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
check() { # check NAME CONDITION...
    name=$1
    shift
    if "$@" >"$work/why" 2>&1; then
        passed=$((passed + 1))
        echo "  ok $name"
    else
        failed=$((failed + 1))
        echo "  FAILED $name: $(cat "$work/why")"
    fi
}
losses() { # the losses of steps $2..$3 of run $1, as they stand in its log
    sed -n 's/.*"type":"step","step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/p' "$work/$1/log.jsonl" |
        awk -v a="$2" -v b="$3" '$1 >= a && $1 <= b'
}
same_losses() {
    losses "$1" "$3" "$4" >"$work/left"
    losses "$2" "$3" "$4" >"$work/right"
    [ -s "$work/left" ] && diff "$work/left" "$work/right"
}
near_losses() { # within 0.02
    losses "$1" "$3" "$4" >"$work/left"
    losses "$2" "$3" "$4" >"$work/right"
    [ -s "$work/left" ] && paste "$work/left" "$work/right" | awk '{ d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || d > 0.02) { print; bad = 1 } } END { exit bad }'
}
same_weights() {
    cmp "$work/$1/checkpoints/step-0000000$3/model.safetensors" "$work/$2/checkpoints/step-0000000$3/model.safetensors"
}
small="--train-data synthetic --layers 2 --channels 256 --heads 4 --kv-heads 2 --seq-len 128 --vocab-size 1000
    --micro-batch 4 --global-batch 1024 --learning-rate 1e-3 --warmup-steps 2 --quiet --keep 0"

$train $small --device cuda --run-dir "$work/a" --steps 8 --checkpoint-every 4 || echo "run a failed"
$train $small --device cuda --run-dir "$work/b" --steps 8 --checkpoint-every 4 || echo "run b failed"
check "the same run twice has the same losses" same_losses a b 1 8
check "the same run twice ends with the same weights" same_weights a b 8

mkdir "$work/c" && cp "$work/a/log.jsonl" "$work/c" && mkdir "$work/c/checkpoints" &&
    cp -r "$work/a/checkpoints/step-00000004" "$work/c/checkpoints"
cp -r "$work/c" "$work/d"
$train $small --device cuda --run-dir "$work/c" --steps 8 --checkpoint-every 4 --resume || echo "run c failed"
check "a resumed run has the losses of one that was not stopped" same_losses a c 1 8
check "a resumed run ends with the same weights" same_weights a c 8

$train $small --device cpu --run-dir "$work/d" --steps 6 --checkpoint-every 2 --resume || echo "run d failed"
check "a checkpoint of the GPU goes on on the CPU" near_losses a d 5 6
$train $small --device cuda --run-dir "$work/d" --steps 8 --checkpoint-every 4 --resume || echo "run d failed"
check "and back on the GPU" near_losses a d 7 8

$train --model gpt3-6.7b --device cuda --train-data synthetic --steps 1 --micro-batch 512 --run-dir "$work/e" \
    >"$work/out" 2>"$work/err"
code=$?
check "too little memory ends with code 1" [ $code -eq 1 ]
check "too little memory is told in the first line" sh -c "head -n 1 '$work/err' | grep -q 'out of memory'"
check "too little memory shows the plan" grep -q "memory plan" "$work/err"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
