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
refused() { # refused MESSAGE COMMAND...: exit code 1, the message in the only line
    message=$1
    shift
    code=0
    "$@" >"$folder/out" 2>"$folder/err" || code=$?
    cat "$folder/err"
    [ $code -eq 1 ] && [ "$(wc -l <"$folder/err")" -eq 1 ] && grep -qF -- "$message" "$folder/err" && [ ! -s "$folder/out" ]
}
amid_ranks() { # amid_ranks COMMAND...: as if launchers had started it as one of many
    (
        export RANK=1 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8
        export OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=8 SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=1
        "$@"
    )
}
for script in run_machine.sh run_machines.sh run_slurm.sh; do
    check "$script alone is answered with the usage" refused "usage: scripts/$script MODEL LENGTH " scripts/$script
    check "$script refuses a model that it has no settings for" \
        refused "MODEL is gpt3-1.3b or gpt3-2.7b, not 'gpt3-13b'" scripts/$script gpt3-13b 2048 --dry-run
    check "$script refuses a length that it has no settings for" \
        refused "LENGTH is 2048 or 8192, not '4096'" scripts/$script gpt3-1.3b 4096 --dry-run
    check "$script refuses ranks that it sets itself" \
        refused "--ranks: this script sets it" scripts/$script gpt3-1.3b 2048 --dry-run --ranks 4
    check "$script refuses another GPU than its plans are for" \
        refused "--gpu: --dry-run plans for a100-80gb, h100-sxm and h200" scripts/$script gpt3-1.3b 2048 --gpu=l4
    check "$script plans the same where RANK is set" amid_ranks three_plans_fit $script gpt3-1.3b 2048
done
for number in x 0 -1 08 2.5 "1 2" 4097 99999999999999999999; do
    check "run_machine.sh refuses $number GPUs" \
        refused "GPUS is a whole number from 1 to 4096, not '$number'" env GPUS="$number" scripts/run_machine.sh gpt3-1.3b 2048
    check "run_machines.sh refuses $number GPUs" \
        refused "GPUS is a whole number from 1 to 4096, not '$number'" env GPUS="$number" MACHINE=0 MASTER_ADDR=127.0.0.1 \
        scripts/run_machines.sh gpt3-1.3b 2048
    check "run_machines.sh refuses $number machines" \
        refused "MACHINES is a whole number from 1 to 4096, not '$number'" env MACHINES="$number" MACHINE=0 \
        MASTER_ADDR=127.0.0.1 scripts/run_machines.sh gpt3-1.3b 2048
    check "run_slurm.sh refuses $number tasks" \
        refused "SLURM_NTASKS is a whole number from 1 to 4096, not '$number'" env SLURM_NTASKS="$number" \
        scripts/run_slurm.sh gpt3-1.3b 2048 --dry-run
done
machines() { # machines OPTION...: machine 0 of 2, unless variables are set
    env MACHINES=2 GPUS=2 ${machine-MACHINE=0} MASTER_ADDR="${address-127.0.0.1}" MASTER_PORT="${port-29500}" \
        scripts/run_machines.sh gpt3-1.3b 2048 "$@"
}
for number in x -1 2 00 1e0; do
    machine=MACHINE=$number
    check "machine $number of 2 is refused" refused "MACHINE is a whole number from 0 to 1, not '$number'" machines
done
machine=
check "a missing MACHINE is told" refused "MACHINE is a whole number from 0 to 1, not ''" machines
unset machine
address=
check "a missing MASTER_ADDR is told" refused "no MASTER_ADDR: set it to the address of machine 0" machines
unset address
port=65536
check "a MASTER_PORT that is none is told" refused "MASTER_PORT is a whole number from 1 to 65535, not '65536'" machines
unset port
check "more ranks than there may be are refused" refused "GPUS x MACHINES is a whole number from 1 to 4096, not '8192'" \
    env GPUS=4096 MACHINES=2 scripts/run_machines.sh gpt3-1.3b 2048 --dry-run
check "ranks that all get a wrong option tell it once" refused "--bogus: no such option" machines --bogus
check "a missing --train-data" refused "--train-data is missing" machines --run-dir "$folder/new"
check "an empty one" refused "--train-data is missing" machines --run-dir "$folder/new" --train-data=
check "a missing --run-dir" refused "--run-dir is missing" machines --train-data=synthetic --steps 400
mkdir "$folder/slurm"
printf '#!/bin/sh\necho "started by srun, RANK ${RANK-unset}" >&2\nexit 1\n' >"$folder/slurm/srun"
chmod +x "$folder/slurm/srun"
slurm() { # slurm OPTION...
    env PATH="$folder/slurm:$PATH" SLURM_NTASKS=4 scripts/run_slurm.sh gpt3-1.3b 2048 "$@"
}
check "so do Slurm's tasks" refused "--bogus: no such option" slurm --bogus
check "of a missing option, too" refused "--run-dir is missing" slurm --train-data synthetic --steps 400
check "they go on with a run" refused "started by srun" slurm --steps 400 --run-dir "$folder/used"
check "and are who Slurm says, whatever RANK was" refused "started by srun, RANK unset" \
    amid_ranks slurm --train-data synthetic --steps 400 --run-dir "$folder/new"

same_plans() { # same_plans ARGUMENT...: as with --dry-run in the third place
    scripts/run_machine.sh gpt3-1.3b 2048 --dry-run --zero 0 >"$folder/left" && scripts/run_machine.sh "$@" >"$folder/right" &&
        diff "$folder/left" "$folder/right"
}
check "--dry-run is understood in the first place" same_plans --dry-run gpt3-1.3b 2048 --zero 0
check "and in the last" same_plans gpt3-1.3b 2048 --zero 0 --dry-run

printf '#!/bin/sh\necho "$*"\n' >"$folder/tells"
chmod +x "$folder/tells"
warms_up() { # warms_up OPTION...: for 358 steps
    FLASHGPT_TRAINER=$folder/tells scripts/run_machine.sh gpt3-1.3b 2048 "$@" | tee "$folder/out" | grep -e '--warmup-steps 358'
}
does_not() {
    ! "$@" && [ -s "$folder/out" ]
}
for steps in "" "--steps 358" --steps=1000 "--steps 60k" "--steps 60 --steps 0"; do
    check "the warm-up takes 358 steps: '$steps'" warms_up $steps
done
for steps in "--steps 60" --steps=357 "--steps 1000 --steps 9"; do
    check "fewer steps have a warm-up of their own: $steps" does_not warms_up $steps
done
check "they are planned" scripts/run_machine.sh gpt3-1.3b 2048 --steps 60 --dry-run

from_another_folder() { # the trainer is the one beside the script
    mkdir -p "$folder/there/scripts"
    cp scripts/run_machine.sh scripts/run_settings.sh scripts/checks.sh "$folder/there/scripts"
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
printf '#!/bin/sh\ncase "$*" in *--plan*) exit ;; esac\nset -- $CODES\nshift "$RANK"\nexit "$1"\n' >"$folder/coded"
printf '#!/bin/sh\ncase "$*" in *--plan*) exit ;; esac\necho $RANK >>"$SLEEPERS"\nexec sleep 100\n' >"$folder/sleeps"
chmod +x "$folder/coded" "$folder/sleeps"
ends_with() { # ends_with CODE CODE_OF_A_RANK...
    expected=$1
    shift
    code=0
    env FLASHGPT_TRAINER="$folder/coded" CODES="$*" MACHINES=1 GPUS=$# MACHINE=0 MASTER_ADDR=127.0.0.1 \
        scripts/run_machines.sh gpt3-1.3b 2048 --train-data synthetic --run-dir "$folder/new" || code=$?
    [ $code -eq "$expected" ] || { echo "exit code $code" && return 1; }
}
check "ranks that all end well do so for the script" ends_with 0 0 0 0
check "a failure of a rank is the script's" ends_with 1 0 1 0
check "the first by number where there are several" ends_with 1 0 1 137
check "what took others along counts, not that they were" ends_with 137 3 137 3 0
check "unless all were" ends_with 3 0 3 3

# Signals. A shell's background commands ignore SIGINT, which a terminal's do not, and only env of GNU can change that.
two_ranks() { # two_ranks OPTION...: in a process group of their own, instead of the shell that calls it
    exec env --default-signal MACHINES=1 GPUS=2 MACHINE=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        setsid scripts/run_machines.sh gpt3-1.3b 2048 $tiny "$@"
}
until_there() { # until_there FILE TEXT
    tries=0
    until grep -qs "$2" "$1" || [ $tries -ge 300 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
}
ended_by() { # ended_by SIGNAL PROCESS: its exit code in $code, and no rank of its group is left
    kill -s "$1" -- "$2"
    code=0
    wait "${2#-}" || code=$?
    echo "exit code $code"
    ! kill -s KILL -- "-${2#-}" 2>/dev/null
}
saves_and_stops() { # saves_and_stops SIGNAL [-]: after SIGNAL for the script, or "-" for all its group, as from a terminal
    run=$folder/stopped-$1${2-}
    (two_ranks --steps 1000000 --run-dir "$run") &
    until_there "$run/log.jsonl" '"type":"step"'
    ended_by "$1" "${2-}$!" && [ $code -eq 0 ] && grep "SIG$1: saved step" "$run/log.jsonl"
}
ends_before_ranks_listen() { # ends_before_ranks_listen SIGNAL CODE
    rm -f "$folder/asleep"
    (FLASHGPT_TRAINER=$folder/sleeps SLEEPERS=$folder/asleep two_ranks --run-dir "$folder/new") &
    until_there "$folder/asleep" 1 && until_there "$folder/asleep" 0
    ended_by "$1" $! && [ $code -eq "$2" ]
}
if env --default-signal true 2>/dev/null; then
    for signal in TERM INT HUP; do
        check "SIG$signal for the script stops its ranks, and all end well" saves_and_stops $signal
        check "so does one for all of them: it is the same wish" saves_and_stops $signal -
    done
    check "ranks that do not listen yet end by SIGTERM" ends_before_ranks_listen TERM 143
    check "and for SIGINT, which they ignore" ends_before_ranks_listen INT 143
fi

# measure_scaling.sh: two ranks alone and together
unset CUDA_VISIBLE_DEVICES
scaling() { # scaling MEASURE_SCALING_ARGUMENT...
    env STEPS="${measured_steps-4}" TURNS="${turns-2}" scripts/measure_scaling.sh "$@"
}
small="--model tiny --layers 1 --channels 32 --heads 2 --seq-len 32 --vocab-size 300 --micro-batch 2 --warmup-steps 2
    --device cpu --threads 1"
scaling_table() { # the shares are those of the times, the slowest GPU's alone being 100%
    CUDA_VISIBLE_DEVICES=$1 scaling 2 256 $small >"$folder/out" && cat "$folder/out" && [ "$(wc -l <"$folder/out")" -eq 5 ] &&
        awk -F ' *[|] *' -v names="$2" 'NR > 2 { who = who $2 ","; ms[NR] = $3; share[NR] = $5 + 0 }
            END {
                slowest = ms[3] > ms[4] ? ms[3] : ms[4]
                for (row in ms) {
                    wrong += !(ms[row] > 0) || sqrt((share[row] / 100 - slowest / ms[row]) ^ 2) > 0.01 * slowest / ms[row]
                }
                exit !(who == names && !wrong)
            }' "$folder/out"
}
check "GPUs are timed alone and together" scaling_table 3,5 "3 alone,5 alone,2 together,"
check "the first of more GPUs are" scaling_table "3, 5,5,7" "3 alone,5 alone,2 together,"
check "they train for themselves where RANK is set" amid_ranks scaling_table 3,5 "3 alone,5 alone,2 together,"
check "measure_scaling.sh alone is answered with the usage" refused "usage: scripts/measure_scaling.sh RANKS TOKENS " scaling
for number in x 0 -2 02 2.0 "2 2" "" 99999999999999999999; do
    check "'$number' ranks are refused" refused "RANKS is a whole number from 1 to 4096, not '$number'" \
        scaling "$number" 256 $small
    check "'$number' tokens are refused" refused "TOKENS is a whole number from 1 to 999999999, not '$number'" \
        scaling 2 "$number" $small
done
turns=two
check "turns in words are refused" refused "TURNS is a whole number from 1 to 1000, not 'two'" scaling 2 256 $small
unset turns
measured_steps=1e3
check "steps with an exponent are refused" refused "STEPS is a whole number from 1 to 1000000, not '1e3'" scaling 2 256 $small
unset measured_steps
for gpus in "" 0 0,0 "0, 0" 0,,1; do
    check "of CUDA_VISIBLE_DEVICES='$gpus' no two can be taken" \
        refused "CUDA_VISIBLE_DEVICES=$gpus does not begin with 2 different GPUs: name one for each of RANKS" \
        env CUDA_VISIBLE_DEVICES="$gpus" scripts/measure_scaling.sh 2 256 $small
done
check "without a GPU it measures only what it is told to" refused "--device cuda: no GPU found by this build" \
    env CUDA_VISIBLE_DEVICES=97,98 scripts/measure_scaling.sh 2 1024
for option in --steps --epochs=2; do
    check "$option is the script's" refused "$option: this script sets the steps; write STEPS=N in front of it" \
        scaling 2 256 $small $option 5
done
for option in --ranks=2 --global-batch; do
    check "$option is the script's" refused "$option: this script sets it; its first two arguments are RANKS and TOKENS" \
        scaling 2 256 $small $option 512
done
check "so is the run's folder" refused "--run-dir: the runs that are measured leave nothing behind" \
    scaling 2 256 $small --run-dir "$folder/one"
for option in --plan --dry-run --evaluate; do
    check "$option, with which nothing trains, is refused" refused "$option: does not train" scaling 2 256 $small $option
done
echo "plan = true" >"$folder/plan.conf"
check "so it is in a config file" refused "a run took 0 steps instead of 7: leave out what ends it early" \
    scaling 2 256 $small --config "$folder/plan.conf"
check "an option that is wrong in each run is told once" refused "--bogus: no such option" scaling 2 256 $small --bogus
check "so are tokens that are no multiple of a micro-batch" \
    refused "--global-batch 100 is not a multiple of the 64 tokens of --ranks 1 x --micro-batch 2" scaling 2 100 $small
printf '#!/bin/sh\ncase "$*" in *--dry-run* | *--plan*) ;; *) exit 7 ;; esac\n' >"$folder/fails"
chmod +x "$folder/fails"
check "a run that fails says so and leaves no table" refused "a run of one GPU failed" \
    env FLASHGPT_TRAINER="$folder/fails" scripts/measure_scaling.sh 2 256

printf '#!/bin/sh\nexit 9\n' >"$folder/ends"
chmod +x "$folder/ends"
check "one that ends before it can is told of" refused "train_gpt ended with exit code 9 before the first step" \
    env FLASHGPT_TRAINER="$folder/ends" scripts/measure_scaling.sh 2 256
interrupted_scaling() { # what it has started ends with it, and its folder goes
    mkdir "$folder/temporary"
    TMPDIR=$folder/temporary STEPS=1000000 scripts/measure_scaling.sh 2 64 $small &
    tries=0
    until grep -qs '"type":"step"' "$folder"/temporary/*/run-1/log.jsonl || [ $tries -ge 300 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    runs=$(cat /proc/$!/task/$!/children)
    kill -TERM $!
    code=0
    wait $! || code=$?
    echo "exit code $code, runs $(echo $runs), left: $(ls "$folder/temporary")"
    for process in $runs; do
        ! kill -0 "$process" 2>/dev/null || code=$process
    done
    [ $code -eq 1 ] && [ -z "$(ls "$folder/temporary")" ] && [ "$(echo "$runs" | wc -w)" -eq 2 ]
}
check "a measurement that is stopped leaves nothing behind" interrupted_scaling

# --help
helps() { # helps SCRIPT WORD...: its comment, which has these words, and nothing else of it
    for argument in --help -h; do
        env -i PATH="$PATH" "scripts/$1" a b c $argument >"$folder/out" 2>"$folder/err" && [ ! -s "$folder/err" ] || return 1
        ! grep -n -e '^#' -e '^set ' -e 'here=' "$folder/out" || return 1
        for word in "scripts/$@"; do
            grep -qF -- "$word" "$folder/out" || { echo "$argument lacks $word" && return 1; }
        done
    done
}
for script in scripts/*.sh; do
    case $script in
    */checks.sh | */run_settings.sh) ;; # others source them
    *) check "$script has --help" helps "${script#scripts/}" ;;
    esac
done
check "run_machine.sh's names its variables" helps run_machine.sh "GPUS: " "FLASHGPT_TRAINER: " "MODEL LENGTH"
check "so does run_machines.sh's" helps run_machines.sh "GPUS: " "MACHINES: " "MACHINE: " "MASTER_ADDR: " "MASTER_PORT: " \
    "FLASHGPT_TOKEN: " "FLASHGPT_TRAINER: " "WORLD_SIZE is GPUS x MACHINES" "scripts/run_machines.sh gpt3-2.7b 8192 --train-data"
check "run_slurm.sh's begins after Slurm's options" helps run_slurm.sh "Trains a GPT-3 size under Slurm" "FLASHGPT_TRAINER: "
check "measure_scaling.sh's names its variables" helps measure_scaling.sh TURNS STEPS CUDA_VISIBLE_DEVICES FLASHGPT_TRAINER
check "sanitize_gpu.sh's names its tools" helps sanitize_gpu.sh "TOOLS are memcheck, racecheck, initcheck, synccheck"

# the others
check "attention_registers.sh alone is answered with the usage" \
    refused "usage: scripts/attention_registers.sh BUILD_DIR" scripts/attention_registers.sh
check "attention_registers.sh says what to build" \
    refused "no $folder/attention/standard.ptxas: build the kernels there" scripts/attention_registers.sh "$folder"
check "tune_attention.sh alone is answered with the usage" \
    refused "usage: scripts/tune_attention.sh BUILD_DIR WRITE HEAD_DIM..." scripts/tune_attention.sh
for dim in x 0 264 064; do
    check "tune_attention.sh refuses a head dimension of $dim" \
        refused "HEAD_DIM is a whole number from 8 to 256, not '$dim'" scripts/tune_attention.sh "$folder" "" $dim
done
check "tune_attention.sh refuses a head dimension of 65" \
    refused "HEAD_DIM is a multiple of 8, not 65" scripts/tune_attention.sh "$folder" "" 64 65
check "sanitize_gpu.sh alone is answered with the usage" refused "usage: scripts/sanitize_gpu.sh TEST..." scripts/sanitize_gpu.sh
check "sanitize_gpu.sh refuses a tool that there is not" refused "TOOLS are memcheck, racecheck, initcheck, synccheck, not 'all'" \
    env TOOLS=all scripts/sanitize_gpu.sh "$train_gpt"
check "train_on_own_text.sh says what to build" refused "no $folder/prepare: build it with make" \
    env FLASHGPT_BUILD="$folder" scripts/train_on_own_text.sh

# Python's scripts, without what is installed beside it
if command -v python3 >/dev/null; then
    a_row_without_pytorch() {
        python3 -S scripts/measure_step.py --trainer "$train_gpt" --configuration tiny:64:2:256 --device cpu --warmup 0 \
            --steps 2 >"$folder/out" 2>"$folder/err" || { cat "$folder/err" && return 1; }
        grep '^| tiny | 64 | 2 | train_gpt | auto | [0-9]' "$folder/out"
    }
    needs_told() { # needs_told MODULE SCRIPT [OPTION...]
        module=$1
        shift
        ! python3 -S "$@" >"$folder/out" 2>"$folder/err" && cat "$folder/err" && [ "$(wc -l <"$folder/err")" -eq 1 ] &&
            grep -q "needs .*$module.*: pip install " "$folder/err" && [ ! -s "$folder/out" ]
    }
    check "measure_step.py times train_gpt where PyTorch is missing" a_row_without_pytorch
    check "and tells that PyTorch is missing where it is asked for" needs_told torch scripts/measure_step.py \
        --trainer "$train_gpt" --set 124m --torch cudnn
    for script in attention_torch check_hugging_face compare_cpu_step compare_loss_curve compare_multiple_choice \
        compare_products golden_pytorch; do
        check "$script.py tells that PyTorch is missing" needs_told torch scripts/$script.py
    done
    for script in check_tokenizer golden_tokenizer; do
        check "$script.py tells that tiktoken is missing" needs_told tiktoken scripts/$script.py
    done
fi

finish
