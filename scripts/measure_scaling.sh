#!/bin/sh
# How much of one GPU's speed is left when several train together? Each GPU first trains alone, all at the same time, so
# that they draw as much power as later; then all train as the ranks of one run; TURNS times in alternation. The step that
# they take together waits for the slowest: its time is held against that of the slowest alone. Prints a Markdown table.
#
#     scripts/measure_scaling.sh RANKS TOKENS [OPTIONS OF train_gpt]        TOKENS: of one GPU and optimizer step
#     scripts/measure_scaling.sh 2 65536 --model gpt3-1.3b --micro-batch 16
#     TURNS=3 STEPS=20 scripts/measure_scaling.sh 8 32768 --model gpt3-2.7b --micro-batch 4
#
# A turn is STEPS steps (default 10) after 3 that do not count; the table has medians over all turns (default 2). GPUs are
# those of CUDA_VISIBLE_DEVICES, or 0, 1, ...
set -eu
trainer=${FLASHGPT_TRAINER:-$(dirname "$0")/../train_gpt}
turns=${TURNS:-2}
steps=${STEPS:-10}
warmup=3

fail() {
    echo "$0: $1" >&2
    exit 1
}

count() { # count NAME VALUE: refuses what is not a whole number from 1
    case $2 in
    '' | *[!0-9]* | 0*) fail "$1 is a whole number from 1, not '$2'" ;;
    esac
}

if [ $# -lt 2 ]; then
    sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
count RANKS "$1"
count TOKENS "$2"
count TURNS "$turns"
count STEPS "$steps"
command -v "$trainer" >/dev/null || fail "no $trainer: build it with make, or name it in FLASHGPT_TRAINER"
ranks=$1
tokens=$2
shift 2
gpus=${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $((ranks - 1)))}
folder=$(mktemp -d)
started=
trap 'kill $started 2>/dev/null && wait; rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM HUP

gpu() { # gpu RANK: as CUDA_VISIBLE_DEVICES names it
    echo "$gpus" | cut -d , -f $(($1 + 1))
}

train() { # train NAME GPUS OPTION...: starts a turn in the background
    name=$1
    visible=$2
    shift 2
    rm -rf "$folder/run-$name"
    CUDA_VISIBLE_DEVICES=$visible "$trainer" --train-data synthetic --eval-every 0 --checkpoint-every 0 \
        --steps $((warmup + steps)) "$@" --quiet --run-dir "$folder/run-$name" &
    started="$started $!"
}

ended() { # ended WHAT: waits for the runs that have started
    for process in $started; do
        wait "$process" || fail "$1 failed"
    done
    started=
}

note() { # note NAME: the times of its turn's steps go to NAME.ms, their TFLOP/s a GPU to NAME.tflops
    for key in ms tflops; do
        sed -n "s/.*\"type\":\"step\".*\"$key\":\([^,]*\),.*/\1/p" "$folder/run-$1/log.jsonl" |
            tail -n "$steps" >>"$folder/$1.$key"
    done
}

median() {
    sort -g "$1" | awk '{ x[NR] = $1 } END { print (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2 }'
}

for turn in $(seq "$turns"); do
    for rank in $(seq 0 $((ranks - 1))); do
        train "$rank" "$(gpu "$rank")" --ranks 1 --global-batch "$tokens" "$@"
    done
    ended "a run of one GPU"
    train all "$gpus" --ranks "$ranks" --global-batch $((ranks * tokens)) "$@"
    ended "the run of $ranks ranks"
    for name in $(seq 0 $((ranks - 1))) all; do
        note "$name"
    done
done

row() { # row WHO NAME
    echo "$(median "$folder/$2.ms") $(median "$folder/$2.tflops") $slowest" | awk -v who="$1" \
        '{ printf "| %s | %.4g | %.4g | %.1f%% |\n", who, $1, $2, 100 * $3 / $1 }'
}
slowest=$(for rank in $(seq 0 $((ranks - 1))); do median "$folder/$rank.ms"; done | sort -g | tail -n 1)
echo "| GPUs | ms a step | TFLOP/s a GPU | of the slowest alone |"
echo "|---|--:|--:|--:|"
for rank in $(seq 0 $((ranks - 1))); do
    row "$(gpu "$rank") alone" "$rank"
done
row "$ranks together" all
