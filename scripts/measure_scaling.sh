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
# those of CUDA_VISIBLE_DEVICES, or 0, 1, ... FLASHGPT_TRAINER names another train_gpt. Before the first turn a dry run on
# one GPU and the plan of all of them tell what is wrong with the options, once.
set -eu
export LC_ALL=C # times with decimal points
here=$(dirname "$0")
. "$here/checks.sh"
print_help "$@"
[ $# -ge 2 ] || usage "RANKS TOKENS [OPTIONS OF train_gpt], such as: $0 2 65536 --model gpt3-1.3b --micro-batch 16"
ranks=$1
tokens=$2
turns=${TURNS:-2}
steps=${STEPS:-10}
warmup=3
shift 2
whole RANKS "$ranks" 1 4096
whole TOKENS "$tokens" 1 999999999
whole TURNS "$turns" 1 1000
whole STEPS "$steps" 1 1000000
for option in "$@"; do
    case ${option%%=*} in
    --steps | --epochs) fail "$option: this script sets the steps; write STEPS=N in front of it" ;;
    --ranks | --global-batch) fail "$option: this script sets it; its first two arguments are RANKS and TOKENS" ;;
    --run-dir | --resume) fail "$option: the runs that are measured leave nothing behind; leave it out" ;;
    --plan | --gpu | --dry-run | --info | --generate | --evaluate | --export)
        fail "$option: does not train, and training is what is measured; leave it out"
        ;;
    esac
done
find_trainer
unset_ranks
gpus=${CUDA_VISIBLE_DEVICES-$(seq -s , 0 $((ranks - 1)))}
gpus=$(printf %s "$gpus" | tr -d '[:space:]' | cut -d , -f "-$ranks")
# as CUDA reads it, the list ends at an empty name
if [ "$(printf %s "$gpus" | tr , '\n' | sed '/^$/,$d' | sort -u | wc -l)" -ne "$ranks" ]; then
    fail "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES does not begin with $ranks different GPUs: name one for each of RANKS"
fi
folder=$(mktemp -d)
started=
trap 'kill -KILL $started 2>/dev/null && wait; rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM HUP

gpu() { # gpu RANK: as CUDA_VISIBLE_DEVICES names it
    echo "$gpus" | cut -d , -f $(($1 + 1))
}

train() { # train GPUS RANKS OPTION...: instead of the shell that calls it
    visible=$1
    together=$2
    shift 2
    CUDA_VISIBLE_DEVICES=$visible exec "$trainer" --device cuda --train-data synthetic --eval-every 0 \
        --checkpoint-every 0 --steps $((warmup + steps)) --ranks "$together" --global-batch $((together * tokens)) "$@" --quiet >/dev/null
}

check() { # check GPUS RANKS OPTION...: the trainer tells its errors itself
    code=0
    (train "$@") || code=$?
    [ $code -le 1 ] || fail "train_gpt ended with exit code $code before the first step"
    [ $code -eq 0 ] || exit 1
}

start() { # start NAME GPUS RANKS OPTION...: a turn in the background
    name=$1
    shift
    rm -rf "$folder/run-$name"
    train "$@" --run-dir "$folder/run-$name" &
    started="$started $!"
}

ended() { # ended WHAT: waits for the runs that have started
    for process in $started; do
        wait "$process" || fail "$1 failed"
    done
    started=
}

note() { # note NAME: the times of its turn's steps go to NAME.ms, their TFLOP/s a GPU to NAME.tflops
    sed -n '/"type":"step"/p' "$folder/run-$1/log.jsonl" >"$folder/steps" 2>/dev/null || true
    logged=$(wc -l <"$folder/steps")
    if [ "$logged" -ne $((warmup + steps)) ]; then
        fail "a run took $logged steps instead of $((warmup + steps)): leave out what ends it early, in --config as well"
    fi
    for key in ms tflops; do
        sed "s/.*\"$key\":\([^,]*\),.*/\1/" "$folder/steps" | tail -n "$steps" >>"$folder/$1.$key"
    done
}

median() {
    sort -g "$1" | awk '{ x[NR] = $1 } END { print (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2 }'
}

check "$(gpu 0)" 1 "$@" --dry-run
check "$gpus" "$ranks" "$@" --plan
for turn in $(seq "$turns"); do
    for rank in $(seq 0 $((ranks - 1))); do
        start "$rank" "$(gpu "$rank")" 1 "$@"
    done
    ended "a run of one GPU"
    start all "$gpus" "$ranks" "$@"
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
