#!/bin/sh
# scripts/run_*.sh: their plans fit on the GPUs that they are meant for, and what they start trains.
. test/frame.sh
export FLASHGPT_TRAINER="$train_gpt"
three_plans_fit() { # three_plans_fit SCRIPT MODEL LENGTH: without recomputation
    scripts/$1 "$2" "$3" --dry-run >"$folder/plan" && [ "$(grep -c 'the plan fits' "$folder/plan")" -eq 3 ] &&
        [ "$(grep -c 'recompute none$' "$folder/plan")" -eq 3 ] && ! grep -q "too little" "$folder/plan"
}
says_what_is_missing() { # says_what_is_missing SCRIPT
    FLASHGPT_TRAINER="$folder/nothing" scripts/$1 gpt3-1.3b 2048 --dry-run 2>"$folder/error" && return 1
    grep -q "no $folder/nothing: build it with make" "$folder/error"
}
for script in run_machine.sh run_machines.sh run_slurm.sh; do
    check "$script says what to do where nothing is built" says_what_is_missing $script
    for model in gpt3-1.3b gpt3-2.7b; do
        for length in 2048 8192; do
            check "$script plans $model at $length for A100, H100 and H200" three_plans_fit $script $model $length
        done
    done
done
check "eight GPUs are planned for one machine" grep -q "one of 16 ranks" "$folder/plan"
refused() {
    ! scripts/run_machine.sh "$@" >"$folder/out" 2>&1 && grep -q "^usage: " "$folder/out"
}
check "an unknown model is refused with the usage" refused gpt3-13b 2048 --dry-run
check "an unknown length is refused with the usage" refused gpt3-1.3b 4096 --dry-run

from_another_folder() { # the trainer is the one beside the script
    mkdir -p "$folder/there/scripts"
    cp scripts/run_machine.sh scripts/run_settings.sh "$folder/there/scripts"
    printf '#!/bin/sh\necho "trains $2"\n' >"$folder/there/train_gpt"
    chmod +x "$folder/there/train_gpt"
    [ "$(cd "$folder" && env -u FLASHGPT_TRAINER there/scripts/run_machine.sh gpt3-1.3b 2048)" = "trains gpt3-1.3b" ]
}
check "a script starts the trainer beside it" from_another_folder

# small ones in their place, on the CPU
tiny="--model tiny --layers 1 --channels 32 --heads 2 --seq-len 32 --vocab-size 300 --micro-batch 2 --global-batch 256
    --steps 6 --warmup-steps 2 --train-data synthetic --device cpu --threads 1 --quiet --checkpoint-every 0"
same_losses() {
    steps "$folder/$1" loss >"$folder/left"
    steps "$folder/$2" loss >"$folder/right"
    [ "$(wc -l <"$folder/left")" -eq 6 ] && diff "$folder/left" "$folder/right"
}
port=$((20000 + $$ % 10000))
check "one machine trains" env GPUS=4 scripts/run_machine.sh gpt3-1.3b 2048 $tiny --run-dir "$folder/one"
MACHINES=2 MACHINE=1 GPUS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
    scripts/run_machines.sh gpt3-1.3b 2048 $tiny --run-dir "$folder/two" 2>"$folder/err" &
check "two machines train" env MACHINES=2 MACHINE=0 GPUS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
    scripts/run_machines.sh gpt3-1.3b 2048 $tiny --run-dir "$folder/two"
check "the other one ends well, too" wait $!
check "with the losses of one" same_losses one two
one_fails() { # the folder holds a run
    ! MACHINES=1 MACHINE=0 GPUS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        scripts/run_machines.sh gpt3-1.3b 2048 $tiny --run-dir "$folder/two" --comm-timeout 5
}
check "a failure of the ranks is the script's" one_fails

# measure_scaling.sh: two ranks alone and together
scaling() { # scaling MEASURE_SCALING_ARGUMENT...
    STEPS=4 TURNS=2 scripts/measure_scaling.sh "$@" --model tiny --layers 1 --channels 32 --heads 2 --seq-len 32 \
        --vocab-size 300 --micro-batch 2 --warmup-steps 2 --device cpu --threads 1 >"$folder/out" 2>"$folder/err"
}
scaling_table() { # the shares are those of the times, the slowest GPU's alone being 100%
    CUDA_VISIBLE_DEVICES=3,5 scaling 2 256 && cat "$folder/out" && [ "$(wc -l <"$folder/out")" -eq 5 ] &&
        awk -F ' *[|] *' 'NR > 2 { who = who $2 ","; ms[NR] = $3; share[NR] = $5 + 0 }
            END {
                slowest = ms[3] > ms[4] ? ms[3] : ms[4]
                for (row in ms) {
                    wrong += !(ms[row] > 0) || sqrt((share[row] / 100 - slowest / ms[row]) ^ 2) > 0.01 * slowest / ms[row]
                }
                exit !(who == "3 alone,5 alone,2 together," && !wrong)
            }' "$folder/out"
}
scaling_refused() { # scaling_refused MESSAGE MEASURE_SCALING_ARGUMENT...
    message=$1
    shift
    ! scaling "$@" && cat "$folder/err" && grep -qF "$message" "$folder/err" && [ ! -s "$folder/out" ]
}
check "GPUs are timed alone and together" scaling_table
check "no ranks at all are refused" scaling_refused "RANKS is a whole number from 1, not '0'" 0 256
check "tokens in words are refused" scaling_refused "TOKENS is a whole number from 1, not '64k'" 2 64k
check "a run that fails says so and leaves no table" scaling_refused "a run of one GPU failed" 2 100

finish
