#!/bin/sh
# Bad input: each case must end with exit code 1 and one line on stderr that names the option, file or value and the
# remedy, and must leave what was there as it was.
build=${FLASHGPT_BUILD:-build}
train=${FLASHGPT_TRAINER:-./train_gpt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

ok() {
    passed=$((passed + 1))
    echo "  ok $1"
}
bad() {
    failed=$((failed + 1))
    echo "  FAILED $1: $2"
}

# fails NAME PATTERN OPTION...: train_gpt with these options is refused in one line that matches the pattern
fails() {
    name=$1
    pattern=$2
    shift 2
    timeout 60 $train "$@" >"$work/out" 2>"$work/err"
    code=$?
    if [ $code -ne 1 ]; then
        bad "$name" "exit code $code: $(cat "$work/err")"
    elif [ "$(wc -l <"$work/err")" -ne 1 ]; then
        bad "$name" "not one line: $(cat "$work/err")"
    elif ! grep -Eq -- "$pattern" "$work/err"; then
        bad "$name" "$(cat "$work/err") does not match $pattern"
    else
        ok "$name"
    fi
}

# bytes of a little-endian int32
int32() {
    printf "\\$(printf %03o $(($1 & 255)))\\$(printf %03o $((($1 >> 8) & 255)))"
    printf "\\$(printf %03o $((($1 >> 16) & 255)))\\$(printf %03o $((($1 >> 24) & 255)))"
}
# shard MAGIC VERSION COUNT TOKENS: a shard file on stdout whose header says COUNT and whose body has TOKENS tokens of 1
shard() {
    int32 "$1"
    int32 "$2"
    int32 "$3"
    head -c 1012 /dev/zero
    head -c "$4" /dev/zero | tr '\0' '\1' | sed 's/./&\x00/g' | head -c $(($4 * 2))
}

shard 20240520 1 5000 5000 >"$work/good.bin"
shape="--model tiny --device cpu --layers 1 --channels 32 --heads 2 --seq-len 16 --micro-batch 2"
small="$shape --train-data $work/good.bin --steps 3 --eval-every 0 --sample-every 0 --quiet"

# ---- the command line ----
fails "unknown option suggests the nearest" "--layer.*--layers" $small --layer 3
fails "value that is no number" "--steps.*ten" $small --steps ten
fails "value that is no number after =" "--learning-rate.*1e-3x" $small --learning-rate=1e-3x
fails "value out of range" "--beta1.*1\.5" $small --beta1 1.5
fails "learning rate that learns nothing" "--learning-rate 0" $small --learning-rate 0
fails "negative count" "--layers.*-2" $small --layers -2
fails "number too large for 64 bits" "--steps.*99999999999999999999" $small --steps 99999999999999999999
fails "option without its value" "--steps" $small --steps
fails "choice that does not exist" "--schedule.*cosine" $small --schedule cosin
fails "model that does not exist" "--model.*gpt2-124m" $small --model gpt2-124
fails "word that is no option" "shard\.bin" $small shard.bin
fails "heads that do not divide channels" "--heads 3.*--channels 32" $small --heads 3
fails "kv-heads that do not divide heads" "--kv-heads 3.*--heads 4" $small --heads 4 --kv-heads 3
fails "global batch that is no multiple" "--global-batch 33.*(32|64)" $small --global-batch 33
fails "resume without a run folder" "--resume.*--run-dir" $small --resume
fails "no training data" "--train-data" $shape --steps 1
fails "GPU that is not known to the plan" "--gpu.*voodoo" $small --plan --gpu voodoo
CUDA_VISIBLE_DEVICES="" fails "CUDA where there is no GPU" "--device.*cuda" $small --device cuda

# ---- the config file ----
printf 'steps = 3\nlayrs = 2\n' >"$work/unknown.conf"
fails "config file with an unknown key" "unknown\.conf:2:.*layrs.*layers" $small --config "$work/unknown.conf"
printf 'steps: 3\n' >"$work/syntax.conf"
fails "config file that is none" "syntax\.conf:1:" $small --config "$work/syntax.conf"
fails "config file that is not there" "nothere\.conf" $small --config "$work/nothere.conf"

# ---- data ----
fails "no shard matches" "--train-data.*nothing-\*\.bin" $small --train-data "$work/nothing-*.bin"
shard 20240521 1 100 100 >"$work/magic.bin"
fails "wrong magic" "magic\.bin.*20240520" $small --train-data "$work/magic.bin"
shard 20240520 7 100 100 >"$work/version.bin"
fails "wrong version" "version\.bin.*version 7" $small --train-data "$work/version.bin"
shard 20240520 1 9000 5000 >"$work/count.bin"
fails "header count beyond the file" "count\.bin.*9000" $small --train-data "$work/count.bin"
{ cat "$work/good.bin"; printf x; } >"$work/odd.bin"
fails "odd byte at the end" "odd\.bin" $small --train-data "$work/odd.bin"
head -c 100 "$work/good.bin" >"$work/header.bin"
fails "file shorter than a header" "header\.bin" $small --train-data "$work/header.bin"
: >"$work/empty.bin"
fails "empty file" "empty\.bin" $small --train-data "$work/empty.bin"
shard 20240520 1 9 9 >"$work/short.bin"
fails "shard shorter than a sequence" "short\.bin.*9 tokens" $small --train-data "$work/short.bin"
shard 20240520 1 40 40 >"$work/few.bin"
fails "shard shorter than one batch times ranks" "few\.bin" $small --train-data "$work/few.bin" --micro-batch 4 --ranks 2
{ shard 20240520 1 5000 4999; printf '\377\377'; } >"$work/token.bin"
fails "token over the vocabulary" "token\.bin.*65535.*257" $small --train-data "$work/token.bin" --epochs 1 --steps 0 \
    --run-dir "$work/token-run"
fails "folder in place of a shard" "$work" $small --train-data "$work"
fails "validation data that is not there" "--val-data" $small --val-data "$work/nothing*.bin"

# ---- the run folder ----
: >"$work/file"
fails "run folder below a file" "$work/file" $small --run-dir "$work/file/run"
fails "run folder with too long a name" "--run-dir.*1500" $small --run-dir "$work/$(head -c 4000 /dev/zero | tr '\0' x)"
fails "run folder where nothing can be written" "/proc/flashgpt" $small --run-dir /proc/flashgpt
if ! $train $small --run-dir "$work/run" --steps 4 --checkpoint-every 2 >"$work/out" 2>&1; then
    bad "a good run" "$(cat "$work/out")"
fi
before=$(find "$work/run" -type f -exec cksum {} + | sort)
fails "run folder that holds another run" "$work/run.*--resume" $small --run-dir "$work/run"
if [ "$before" = "$(find "$work/run" -type f -exec cksum {} + | sort)" ]; then
    ok "the other run is untouched"
else
    bad "the other run is untouched" "files changed"
fi
mv "$work/run/log.jsonl" "$work/log"
fails "run folder that holds checkpoints but no log" "$work/run.*--resume" $small --run-dir "$work/run"
mv "$work/log" "$work/run/log.jsonl"
# stdin, stdout and stderr closed: what is printed ends up in no file of the run
$train $small --quiet=false --run-dir "$work/closed" --checkpoint-every 1 <&- >&- 2>&-
if [ $? -eq 0 ] && [ -s "$work/closed/log.jsonl" ] && ! grep -qv '^{' "$work/closed/log.jsonl"; then
    ok "closed standard files"
else
    bad "closed standard files" "$(grep -v '^{' "$work/closed/log.jsonl")"
fi
# passes over the data that are given to a resume count, whatever its checkpoint has as steps
epochs="$shape --train-data $work/good.bin --quiet --run-dir $work/epochs"
$train $epochs --epochs 0.05 >"$work/out" 2>&1
first=$(grep -c '"type":"step"' "$work/epochs/log.jsonl")
$train $epochs --epochs 0.1 --resume >>"$work/out" 2>&1
second=$(grep -c '"type":"step"' "$work/epochs/log.jsonl")
if [ "$first" -eq 8 ] && [ "$second" -eq 16 ]; then
    ok "more epochs at a resume"
else
    bad "more epochs at a resume" "$first and then $second steps: $(cat "$work/out")"
fi
fails "warm-up longer than the epochs" "--warmup-steps 100.*--steps 16" $epochs --epochs 0.1 --resume --warmup-steps 100
# a full disk, as a limit on the size of files: the run ends, the older checkpoint stays good
(
    trap '' XFSZ
    ulimit -f 60
    exec timeout 60 $train $small --layers 2 --channels 64 --run-dir "$work/full" --checkpoint-every 1
) >"$work/out" 2>"$work/err"
code=$?
if [ $code -eq 1 ] && [ "$(wc -l <"$work/err")" -eq 1 ] && grep -q "$work/full" "$work/err" &&
    [ -z "$(find "$work/full/checkpoints" -mindepth 1 2>/dev/null)" ]; then
    ok "full output folder"
else
    bad "full output folder" "exit code $code, $(cat "$work/err"), $(find "$work/full" 2>/dev/null | tr '\n' ' ')"
fi

# ---- checkpoints ----
newest=$work/run/checkpoints/step-00000004
older=$work/run/checkpoints/step-00000002
resumed() { # resumed NAME STEP FAULT: the run goes on from STEP and says what is wrong with the newer one
    if timeout 60 $train $small --run-dir "$work/again" --resume --steps 5 --checkpoint-every 0 --quiet=false >"$work/out" 2>&1 &&
        grep -aq "step-0000000$2.*step $2 of 5" "$work/out" && grep -aEq "$3" "$work/out"; then
        ok "$1"
    else
        bad "$1" "$(cat "$work/out")"
    fi
}
again() {
    rm -rf "$work/again"
    cp -r "$work/run" "$work/again"
}
again
head -c 1000 "$newest/model.safetensors" >"$work/again/checkpoints/step-00000004/model.safetensors"
resumed "truncated checkpoint falls back to the one before" 2 "step-00000004.*model\.safetensors"
for file in model.safetensors state.json config.json checksums.xxh64 optimizer-00000-of-00001.safetensors; do
    again
    target=$work/again/checkpoints/step-00000004/$file
    size=$(wc -c <"$target")
    printf '\376' | dd of="$target" bs=1 seek=$((size / 2)) conv=notrunc 2>/dev/null
    resumed "flipped byte in $file falls back to the one before" 2 "step 4 is damaged.*step-00000004"
done
again
rm "$work/again/checkpoints/step-00000004/optimizer-00000-of-00001.safetensors"
resumed "checkpoint with a file missing falls back to the one before" 2 "step-00000004.*optimizer"
again
for step in 2 4; do
    printf x >>"$work/again/checkpoints/step-0000000$step/state.json"
done
fails "no checkpoint is valid" "$work/again" $small --run-dir "$work/again" --resume
again
fails "resume with another seed" "--seed 5.*1337" $small --seed 5 --run-dir "$work/again" --resume
fails "resume with another order of the data" "--shuffle=false" $small --shuffle=false --run-dir "$work/again" --resume
fails "resume as another model" "--model gpt2-124m.*tiny" $small --model gpt2-124m --run-dir "$work/again" --resume
fails "checkpoint of another shape" "--layers 2.*1" $small --layers 2 --run-dir "$work/again" --resume
fails "seq-len over the model's" "--seq-len 32.*16" $small --seq-len 32 --run-dir "$work/again" --resume
fails "weights of another shape to start from" "--channels 64.*32" $small --channels 64 --init-from "$older" \
    --run-dir "$work/init"
fails "weights that are not there" "$work/none" $small --init-from "$work/none" --run-dir "$work/init"

# ---- memory ----
timeout 60 $train --model gpt3-6.7b --device cpu --train-data synthetic --steps 1 --micro-batch 64 --run-dir "$work/oom" \
    >"$work/out" 2>"$work/err"
code=$?
if [ $code -eq 1 ] && head -n 1 "$work/err" | grep -q memory && grep -q "memory plan" "$work/err"; then
    ok "out of memory shows the plan"
else
    bad "out of memory shows the plan" "exit code $code: $(head -c 2000 "$work/err")"
fi

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
