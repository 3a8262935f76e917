#!/bin/sh
# scripts/run_*.sh: their plans fit on the GPUs that they are meant for, and what they start trains.
trainer=${FLASHGPT_TRAINER:-./train_gpt}
export FLASHGPT_TRAINER="$trainer"
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
three_plans_fit() { # three_plans_fit SCRIPT MODEL LENGTH: without recomputation
    scripts/$1 "$2" "$3" --dry-run >"$work/plan" && [ "$(grep -c 'the plan fits' "$work/plan")" -eq 3 ] &&
        [ "$(grep -c 'recompute none$' "$work/plan")" -eq 3 ] && ! grep -q "too little" "$work/plan"
}
says_what_is_missing() { # says_what_is_missing SCRIPT
    FLASHGPT_TRAINER="$work/nothing" scripts/$1 gpt3-1.3b 2048 --dry-run 2>"$work/error" && return 1
    grep -q "no $work/nothing: build it with make" "$work/error"
}
for script in run_machine.sh run_machines.sh run_slurm.sh; do
    check "$script says what to do where nothing is built" says_what_is_missing $script
    for model in gpt3-1.3b gpt3-2.7b; do
        for length in 2048 8192; do
            check "$script plans $model at $length for A100, H100 and H200" three_plans_fit $script $model $length
        done
    done
done
check "eight GPUs are planned for one machine" grep -q "one of 16 ranks" "$work/plan"
refused() {
    ! scripts/run_machine.sh "$@" >"$work/out" 2>&1 && grep -q "^usage: " "$work/out"
}
check "an unknown model is refused with the usage" refused gpt3-13b 2048 --dry-run
check "an unknown length is refused with the usage" refused gpt3-1.3b 4096 --dry-run

from_another_folder() { # the trainer is the one beside the script
    mkdir -p "$work/there/scripts"
    cp scripts/run_machine.sh scripts/run_settings.sh "$work/there/scripts"
    printf '#!/bin/sh\necho "trains $2"\n' >"$work/there/train_gpt"
    chmod +x "$work/there/train_gpt"
    [ "$(cd "$work" && env -u FLASHGPT_TRAINER there/scripts/run_machine.sh gpt3-1.3b 2048)" = "trains gpt3-1.3b" ]
}
check "a script starts the trainer beside it" from_another_folder

# small ones in their place, on the CPU
tiny="--model tiny --layers 1 --channels 32 --heads 2 --seq-len 32 --vocab-size 300 --micro-batch 2 --global-batch 256
    --steps 6 --warmup-steps 2 --train-data synthetic --device cpu --threads 1 --quiet --checkpoint-every 0"
losses() {
    sed -n 's/.*"type":"step","step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/p' "$work/$1/log.jsonl"
}
same_losses() {
    losses "$1" >"$work/left"
    losses "$2" >"$work/right"
    [ "$(wc -l <"$work/left")" -eq 6 ] && diff "$work/left" "$work/right"
}
port=$((20000 + $$ % 10000))
check "one machine trains" env GPUS=4 scripts/run_machine.sh gpt3-1.3b 2048 $tiny --run-dir "$work/one"
MACHINES=2 MACHINE=1 GPUS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
    scripts/run_machines.sh gpt3-1.3b 2048 $tiny --run-dir "$work/two" 2>"$work/err" &
check "two machines train" env MACHINES=2 MACHINE=0 GPUS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
    scripts/run_machines.sh gpt3-1.3b 2048 $tiny --run-dir "$work/two"
check "the other one ends well, too" wait $!
check "with the losses of one" same_losses one two
one_fails() { # the folder holds a run
    ! MACHINES=1 MACHINE=0 GPUS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        scripts/run_machines.sh gpt3-1.3b 2048 $tiny --run-dir "$work/two" --comm-timeout 5
}
check "a failure of the ranks is the script's" one_fails

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
