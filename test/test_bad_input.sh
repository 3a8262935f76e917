#!/bin/sh
# Bad input: each case must end with exit code 1 and one line on stderr that names the option, file or value and the
# remedy, and must leave what was there as it was.
. test/frame.sh

# fails NAME PATTERN OPTION...: train_gpt with these options is refused in one line that matches the pattern
fails() {
    name=$1
    pattern=$2
    shift 2
    timeout 60 "$train_gpt" "$@" >"$folder/out" 2>"$folder/err"
    code=$?
    if [ $code -ne 1 ]; then
        bad "$name" "exit code $code: $(cat "$folder/err")"
    elif [ "$(wc -l <"$folder/err")" -ne 1 ]; then
        bad "$name" "not one line: $(cat "$folder/err")"
    elif ! grep -Eq -- "$pattern" "$folder/err"; then
        bad "$name" "$(cat "$folder/err") does not match $pattern"
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

shard 20240520 1 5000 5000 >"$folder/good.bin"
top=$PWD
cd "$folder" || exit 1 # options that are split into words name no folder, which may have a space in its name
shape="--model tiny --device cpu --layers 1 --channels 32 --heads 2 --seq-len 16 --micro-batch 2"
small="$shape --train-data good.bin --steps 3 --eval-every 0 --sample-every 0 --quiet"

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
printf 'steps = 3\nlayrs = 2\n' >"$folder/unknown.conf"
fails "config file with an unknown key" "unknown\.conf:2:.*layrs.*layers" $small --config "$folder/unknown.conf"
printf 'steps: 3\n' >"$folder/syntax.conf"
fails "config file that is none" "syntax\.conf:1:" $small --config "$folder/syntax.conf"
fails "config file without an end" "/dev/zero: does not end within 16 MiB" $small --config /dev/zero
fails "config file that is not there" "--config .*nothere\.conf: cannot open: .*; give a file of lines" $small --config "$folder/nothere.conf"

# ---- data ----
fails "no shard matches" "--train-data.*nothing-\*\.bin" $small --train-data "$folder/nothing-*.bin"
shard 20240521 1 100 100 >"$folder/magic.bin"
fails "wrong magic" "magic\.bin.*20240520" $small --train-data "$folder/magic.bin"
shard 20240520 7 100 100 >"$folder/version.bin"
fails "wrong version" "version\.bin.*version 7" $small --train-data "$folder/version.bin"
shard 20240520 1 9000 5000 >"$folder/count.bin"
fails "header count beyond the file" "count\.bin.*9000" $small --train-data "$folder/count.bin"
{ cat "$folder/good.bin"; printf x; } >"$folder/odd.bin"
fails "odd byte at the end" "odd\.bin" $small --train-data "$folder/odd.bin"
head -c 100 "$folder/good.bin" >"$folder/header.bin"
fails "file shorter than a header" "header\.bin" $small --train-data "$folder/header.bin"
: >"$folder/empty.bin"
fails "empty file" "empty\.bin" $small --train-data "$folder/empty.bin"
shard 20240520 1 9 9 >"$folder/short.bin"
fails "shard shorter than a sequence" "short\.bin.*9 tokens" $small --train-data "$folder/short.bin"
shard 20240520 1 40 40 >"$folder/few.bin"
fails "shard shorter than one batch times ranks" "few\.bin" $small --train-data "$folder/few.bin" --micro-batch 4 --ranks 2
{ shard 20240520 1 5000 4999; printf '\377\377'; } >"$folder/token.bin"
fails "token over the vocabulary" "token\.bin.*65535.*257" $small --train-data "$folder/token.bin" --epochs 1 --steps 0 \
    --run-dir "$folder/token-run"
# a run that fails before its first step is in nobody's way: with other data the same command goes on in its folder
{ head -c 1024 "$folder/good.bin"; tail -c +1025 "$folder/good.bin" | tr '\1' '\377'; } >"$folder/every.bin"
fails "tokens over the vocabulary" "every\.bin.*255.*100" $small --vocab-size 100 --train-data "$folder/every.bin" --run-dir "$folder/first"
"$train_gpt" $small --run-dir "$folder/first" >"$folder/out" 2>&1
code=$?
if [ $code -eq 0 ] && [ "$(grep -c '"type":"step"' "$folder/first/log.jsonl")" -eq 3 ] &&
    [ "$(grep -c '"type":"start"' "$folder/first/log.jsonl")" -eq 2 ]; then
    ok "a run that failed before its first step is in nobody's way"
else
    bad "a run that failed before its first step is in nobody's way" "exit code $code: $(cat "$folder/out")"
fi
# two at once: the second waits a little for the first, which does its steps in that time
mkdir "$folder/twice"
echo '{"type":"start","step":0}' >"$folder/twice/log.jsonl"
exec 9>>"$folder/twice/log.jsonl"
flock 9
"$train_gpt" $small --run-dir "$folder/twice" >"$folder/out" 2>&1 9>&- &
second=$!
sleep 0.7
echo '{"type":"step","step":1}' >&9
exec 9>&-
wait $second
code=$?
if [ $code -eq 1 ] && grep -q 'twice already holds a run' "$folder/out" && [ "$(wc -l <"$folder/twice/log.jsonl")" -eq 2 ]; then
    ok "a run that began meanwhile loses nothing"
else
    bad "a run that began meanwhile loses nothing" "exit code $code: $(cat "$folder/out" "$folder/twice/log.jsonl")"
fi
mkdir "$folder/notes"
echo "a person's notes" >"$folder/notes/log.jsonl"
fails "run folder with a log that is no run's" "--run-dir .*notes already holds" $small --run-dir "$folder/notes"
check "the log that is no run's is untouched" grep -qx "a person's notes" "$folder/notes/log.jsonl"
# of validation it is told, and the run goes on
"$train_gpt" $small --ranks 2 --val-data "$folder/token.bin" --eval-every 2 --eval-batches 0 --run-dir "$folder/val" >"$folder/out" 2>"$folder/err"
code=$?
if [ $code -eq 0 ] && [ -e "$folder/val/checkpoints/step-00000003" ] &&
    [ "$(grep -c "token\.bin.*65535.*257.*; the run goes on without this evaluation" "$folder/err")" -eq 2 ]; then
    ok "token over the vocabulary in validation"
else
    bad "token over the vocabulary in validation" "exit code $code: $(cat "$folder/err")"
fi
fails "folder in place of a shard" "$folder" $small --train-data "$folder"
fails "validation data that is not there" "--val-data: .*build/prepare, with a larger --val-fraction" $small --val-data "$folder/nothing*.bin"

# ---- the run folder ----
: >"$folder/file"
fails "run folder below a file" "--run-dir .*file/run: .*cannot create the folder.*; give a folder" $small --run-dir "$folder/file/run"
fails "run folder with too long a name" "--run-dir.*1500" $small --run-dir "$folder/$(head -c 4000 /dev/zero | tr '\0' x)"
fails "run folder where nothing can be written" "--run-dir /proc/flashgpt: .*cannot create the folder.*; give a folder" $small --run-dir /proc/flashgpt
if ! "$train_gpt" $small --run-dir "$folder/run" --steps 4 --checkpoint-every 2 >"$folder/out" 2>&1; then
    bad "a good run" "$(cat "$folder/out")"
fi
# a checkpoint of 22k parameters takes 261 KiB: a hundred million of them fit on no disk
"$train_gpt" $small --quiet=false --run-dir "$folder/many" --keep 100000000 >"$folder/out" 2>&1
if grep -q "^note  *a checkpoint takes 2.. KiB, 100000001 of them are to fit, and the disk of $folder/many has" "$folder/out"; then
    ok "more checkpoints than the disk holds are noted"
else
    bad "more checkpoints than the disk holds are noted" "$(cat "$folder/out")"
fi
# a weight grows tenfold in every step until it is infinite
fails "weights that explode" "steps in a row that were skipped: 3, the last for a non-finite" $small --steps 1000 \
    --max-skipped 3 --learning-rate 100 --warmup-steps 0 --run-dir "$folder/explodes"
before=$(find "$folder/run" -type f -exec cksum {} + | sort)
fails "run folder that holds another run" "$folder/run.*--resume" $small --run-dir "$folder/run"
if [ "$before" = "$(find "$folder/run" -type f -exec cksum {} + | sort)" ]; then
    ok "the other run is untouched"
else
    bad "the other run is untouched" "files changed"
fi
mv "$folder/run/log.jsonl" "$folder/log"
fails "run folder that holds checkpoints but no log" "$folder/run.*--resume" $small --run-dir "$folder/run"
mv "$folder/log" "$folder/run/log.jsonl"
# stdin, stdout and stderr closed: what is printed ends up in no file of the run
"$train_gpt" $small --quiet=false --run-dir "$folder/closed" --checkpoint-every 1 <&- >&- 2>&-
if [ $? -eq 0 ] && [ -s "$folder/closed/log.jsonl" ] && ! grep -qv '^{' "$folder/closed/log.jsonl"; then
    ok "closed standard files"
else
    bad "closed standard files" "$(grep -v '^{' "$folder/closed/log.jsonl")"
fi
# passes over the data that are given to a resume count, whatever its checkpoint has as steps
epochs="$shape --train-data good.bin --quiet --run-dir epochs"
"$train_gpt" $epochs --epochs 0.05 >"$folder/out" 2>&1
first=$(grep -c '"type":"step"' "$folder/epochs/log.jsonl")
"$train_gpt" $epochs --epochs 0.1 --resume >>"$folder/out" 2>&1
second=$(grep -c '"type":"step"' "$folder/epochs/log.jsonl")
if [ "$first" -eq 8 ] && [ "$second" -eq 16 ]; then
    ok "more epochs at a resume"
else
    bad "more epochs at a resume" "$first and then $second steps: $(cat "$folder/out")"
fi
fails "warm-up longer than the epochs" "--warmup-steps 100.*--steps 16" $epochs --epochs 0.1 --resume --warmup-steps 100
# a full disk, as a limit on the size of files: the run goes on to its end, and fails there
(
    ulimit -f 60
    exec timeout 60 "$train_gpt" $small --layers 2 --channels 64 --run-dir "$folder/full" --checkpoint-every 1
) >"$folder/out" 2>"$folder/err"
code=$?
if [ $code -eq 1 ] && [ "$(grep -c "step . is not saved.*$folder/full" "$folder/err")" -eq 3 ] &&
    [ "$(grep -c "the run goes on to the next checkpoint" "$folder/err")" -eq 2 ] &&
    [ "$(grep -c '"type":"step"' "$folder/full/log.jsonl")" -eq 3 ] &&
    [ -z "$(find "$folder/full/checkpoints" -mindepth 1 2>/dev/null)" ]; then
    ok "full output folder"
else
    bad "full output folder" "exit code $code, $(cat "$folder/err"), $(find "$folder/full" 2>/dev/null | tr '\n' ' ')"
fi

# ---- checkpoints ----
newest=$folder/run/checkpoints/step-00000004
older=$folder/run/checkpoints/step-00000002
resumed() { # resumed NAME STEP FAULT: the run goes on from STEP and says what is wrong with the newer one
    if timeout 60 "$train_gpt" $small --run-dir "$folder/again" --resume --steps 5 --checkpoint-every 0 --quiet=false >"$folder/out" 2>&1 &&
        grep -aq "step-0000000$2.*step $2 of 5" "$folder/out" && grep -aEq "$3" "$folder/out"; then
        ok "$1"
    else
        bad "$1" "$(cat "$folder/out")"
    fi
}
again() {
    rm -rf "$folder/again"
    cp -r "$folder/run" "$folder/again"
}
again
head -c 1000 "$newest/model.safetensors" >"$folder/again/checkpoints/step-00000004/model.safetensors"
resumed "truncated checkpoint falls back to the one before" 2 "step-00000004.*model\.safetensors"
for file in model.safetensors state.json config.json checksums.xxh64 optimizer-00000-of-00001.safetensors; do
    again
    target=$folder/again/checkpoints/step-00000004/$file
    size=$(wc -c <"$target")
    printf '\376' | dd of="$target" bs=1 seek=$((size / 2)) conv=notrunc 2>/dev/null
    resumed "flipped byte in $file falls back to the one before" 2 "step 4 is damaged.*step-00000004"
done
again
rm "$folder/again/checkpoints/step-00000004/optimizer-00000-of-00001.safetensors"
resumed "checkpoint with a file missing falls back to the one before" 2 "step-00000004.*optimizer"
again
for step in 2 4; do
    printf x >>"$folder/again/checkpoints/step-0000000$step/state.json"
done
fails "no checkpoint is valid" "$folder/again" $small --run-dir "$folder/again" --resume
again
fails "resume with another seed" "--seed 5.*1337" $small --seed 5 --run-dir "$folder/again" --resume
fails "resume with another order of the data" "--shuffle=false" $small --shuffle=false --run-dir "$folder/again" --resume
fails "resume as another model" "--model gpt2-124m.*tiny" $small --model gpt2-124m --run-dir "$folder/again" --resume
fails "checkpoint of another shape" "--layers 2.*1" $small --layers 2 --run-dir "$folder/again" --resume
fails "seq-len over the model's" "--seq-len 32.*16" $small --seq-len 32 --run-dir "$folder/again" --resume
fails "weights of another shape to start from" "--channels 64.*32" $small --channels 64 --init-from "$older" \
    --run-dir "$folder/init"
fails "a model by name that is another than the weights" "--model gpt2-124m: the model in .* 1 layers, 32 channels and 2 heads" \
    --model gpt2-124m --train-data good.bin --init-from "$older" --run-dir "$folder/init"
fails "a run's folder for weights" "--init-from .*run: is the folder of a run; give one of its checkpoints, those in .*run/checkpoints" \
    $small --init-from "$folder/run" --run-dir "$folder/init"
fails "a checkpoint's folder for a run" "--run-dir .*: there is no checkpoint in it .*--init-from" --generate x --run-dir "$older"
for place in "$folder/none" "$folder/file" "$folder/run/checkpoints"; do
    fails "weights that are not there" "--init-from $place: there is no config.json in it; give a checkpoint.*data/download.sh" \
        $small --init-from "$place" --run-dir "$folder/init"
done
fails "questions that are not there" "--multiple-choice .*none: cannot open: .*; give a file of questions" $small \
    --tokenizer bytes --vocab-size 257 --multiple-choice "$folder/none" --run-dir "$folder/init"

# ---- memory ----
timeout 60 "$train_gpt" --model gpt3-6.7b --device cpu --train-data synthetic --steps 1 --micro-batch 64 --run-dir "$folder/oom" \
    >"$folder/out" 2>"$folder/err"
code=$?
if [ $code -eq 1 ] && head -n 1 "$folder/err" | grep -q memory && grep -q "memory plan" "$folder/err"; then
    ok "out of memory shows the plan"
else
    bad "out of memory shows the plan" "exit code $code: $(head -c 2000 "$folder/err")"
fi

# ---- make ----
without_cuda() {
    ! env -u MAKEFLAGS make -C "$top" BUILD="$folder/no-cuda" CUDA=0 "$1" >"$folder/out" 2>"$folder/err" &&
        grep -q "^make $1 needs CUDA" "$folder/err" && [ ! -e "$folder/no-cuda" ]
}
for job in test-gpu bench-attention; do
    check "make $job without CUDA" without_cuda $job
done

finish
