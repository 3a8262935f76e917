#!/bin/sh
# Ranks on several GPUs: the same losses as one GPU, in every ZeRO stage and however the ranks were started; the memory
# that the plan says; and an end within seconds, with the cause told, when a rank dies or hangs. Needs two GPUs.
. test/frame.sh
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 2 ]; then
    skip "needs two GPUs"
fi
values() { # the numbers "$2" of run $1's steps
    steps "$folder/$1" "$2"
}
near_losses() { # near_losses RUN RUN STEPS TOLERANCE
    values "$1" loss >"$folder/left"
    values "$2" loss >"$folder/right"
    paste "$folder/left" "$folder/right" | awk -v steps="$3" -v tolerance="$4" '
        { d = $2 > $4 ? $2 - $4 : $4 - $2; if (d > worst) worst = d; bad += $1 != NR || $3 != NR }
        END { printf "differ by %g at most\n", worst; exit NR != steps || bad > 0 || worst > tolerance }'
}
same_weights() { # after step 50
    cmp "$folder/$1/checkpoints/step-00000050/model.safetensors" "$folder/$2/checkpoints/step-00000050/model.safetensors"
}
run() { # run NAME OPTIONS...
    name=$1
    shift
    timeout 120 "$train_gpt" --run-dir "$folder/$name" --quiet --device cuda "$@" 2>"$folder/err" ||
        echo "run $name ended with code $?: $(cat "$folder/err")"
}

# ---- losses ----

# words of random letters, the first ones frequent: enough to learn in 50 steps
python3 - "$folder" <<'PYTHON' 2>/dev/null || cp "$0" "$folder/text"
import random, sys
random.seed(7)
words = ["".join(random.choice("abcdefgh") for _ in range(random.randint(2, 8))) for _ in range(500)]
with open(sys.argv[1] + "/text", "w") as out:
    for _ in range(400000):
        out.write(words[min(int(random.expovariate(0.02)), 499)] + " ")
PYTHON
"$prepare" --out-dir "$folder/tokens" --val-fraction 0 "$folder/text" >/dev/null || echo "prepare failed"
cd "$folder" || exit 1 # options that are split into words name no folder, which may have a space in its name
model="--model gpt2-124m --vocab-size 257 --tokenizer bytes --train-data tokens/train_*.bin
    --micro-batch 16 --global-batch 32768 --steps 50 --learning-rate 1e-4 --eval-every 0"
set -f # the pattern of the data is the trainer's
run one $model --ranks 1 --checkpoint-every 0
run zero1 $model --ranks 2 --checkpoint-every 0
check "two GPUs have the losses of one" near_losses one zero1 50 2e-3
run zero0 $model --ranks 2 --zero 0 --checkpoint-every 0
check "ZeRO 0 has the losses of ZeRO 1" near_losses zero0 zero1 50 1e-5
run zero2 $model --ranks 2 --zero 2 --checkpoint-every 0
check "ZeRO 2 has the losses of ZeRO 1" near_losses zero2 zero1 50 1e-5
run half $model --ranks 2 --zero 2 --micro-batch 8 --checkpoint-every 0
# other shapes are other kernels, which round to bf16 elsewhere
check "ZeRO 2 over two micro-steps has the losses of one GPU" near_losses half one 50 1e-2
run bf16 $model --ranks 2 --reduce-dtype bf16 --checkpoint-every 0
check "bf16 between ranks costs little" near_losses bf16 one 50 2e-2
run first $model --ranks 2 --deterministic --checkpoint-every 25 --keep 0
run again $model --ranks 2 --deterministic --checkpoint-every 50
check "the same run twice has the same losses" near_losses first again 50 0
check "the same run twice ends with the same weights" same_weights first again
mkdir -p "$folder/resumed/checkpoints" && cp "$folder/first/log.jsonl" "$folder/resumed" &&
    cp -r "$folder/first/checkpoints/step-00000025" "$folder/resumed/checkpoints"
cp -r "$folder/resumed" "$folder/fewer"
run resumed $model --ranks 2 --deterministic --checkpoint-every 50 --resume
check "a resumed run ends with the same weights" same_weights first resumed
run fewer $model --ranks 1 --checkpoint-every 0 --resume
check "two GPUs' checkpoint goes on on one" near_losses first fewer 50 2e-3

# two processes as torchrun or srun would start them
port=$((20000 + $$ % 10000))
rank() { # rank NUMBER RUN OPTIONS...
    RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port FLASHGPT_TOKEN=$$ \
        timeout 120 "$train_gpt" --run-dir "$folder/$2" --quiet --device cuda $model --checkpoint-every 0 2>"$folder/err$1"
}
rank 1 placed &
rank 0 placed || cat "$folder/err0"
wait $! || cat "$folder/err1"
check "ranks started one by one have the losses of those forked" near_losses placed zero1 50 0

# ---- memory ----

plan_mib() { # plan_mib OPTIONS...: the plan's total
    "$train_gpt" --plan "$@" | awk '$1 == "total" { print $3 == "GiB" ? $2 * 1024 : $2 }'
}
as_planned() { # as_planned RUN OPTIONS...
    run_name=$1
    shift
    planned=$(plan_mib --device cuda "$@")
    used=$(values "$run_name" memory_bytes | awk -v others="$others" '{ m = $2 } END { print m / 1048576 - others }')
    awk -v planned="$planned" -v used="$used" 'BEGIN {
        printf "planned %.0f MiB, used %.0f\n", planned, used
        exit !(used > 0 && used < 1.03 * planned && used > 0.97 * planned) }'
}
# what other programs have of the first GPU
others=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i 0)
large="--model gpt3-1.3b --micro-batch 2 --train-data synthetic --steps 3 --ranks 2"
for zero in 0 1 2; do
    run memory$zero $large --zero $zero --checkpoint-every 0
    check "memory with ZeRO $zero is as planned" as_planned memory$zero $large --zero $zero
done

# ---- faults ----

small="--train-data synthetic --layers 2 --channels 256 --heads 4 --seq-len 128 --vocab-size 1000 --micro-batch 4
    --device cuda --quiet"
children() { # of process $1, in the order in which they were born
    cat "/proc/$1/task/$1/children"
}
strike() { # strike RUN SIGNAL OPTIONS...: signals rank 1 in its 15th step or later; the run's end is in code and seconds
    strike_run=$1
    strike_signal=$2
    shift 2
    timeout 60 "$train_gpt" --run-dir "$folder/$strike_run" $small --ranks 2 --comm-timeout 4 "$@" 2>"$folder/err" &
    supervisor=$!
    tries=0
    until [ "$(values "$strike_run" loss 2>/dev/null | wc -l)" -ge 15 ] || [ $tries -ge 300 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    # timeout's child is the supervisor, whose second child is rank 1
    victim=$(children $(children $supervisor) | awk '{ print $2 }')
    struck=$(date +%s%N)
    kill -"$strike_signal" "$victim"
    wait $supervisor
    code=$?
    seconds=$((($(date +%s%N) - struck) / 1000000000))
}
strike killed KILL --steps 1000000 --checkpoint-every 0
check "a rank that is killed ends the run" [ $code -eq 137 ]
check "within seconds" [ $seconds -lt 8 ]
check "and is named with its step" grep -q 'rank 1 was killed by signal 9 (Killed) in step [0-9]' "$folder/err"
strike stopped STOP --steps 1000000 --checkpoint-every 0
check "a rank that hangs ends the run" [ $code -eq 3 ]
check "within the timeout" [ $seconds -lt 14 ]
check "and is named with its step" grep -q 'rank 1 did not arrive within 4 s in step [0-9]' "$folder/err"
strike restarted KILL --steps 400 --max-restarts 1 --checkpoint-every 10
check "a run whose rank was killed starts again and ends well" [ $code -eq 0 ]
check "from its newest checkpoint" sh -c "values=\$(grep -c '\"type\":\"step\"' '$folder/restarted/log.jsonl'); [ \$values -eq 400 ]"

# ranks started one by one have nobody beside them: the supervisor of each sees for itself that it hangs
hang_port=$((port + 1))
placed() { # placed RANK
    RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$hang_port \
        FLASHGPT_TOKEN=$$ exec timeout 90 "$train_gpt" --run-dir "$folder/hung" $small --steps 400 \
        --comm-timeout 10 --max-restarts 1 --checkpoint-every 10 2>"$folder/err$1"
}
placed 0 &
first=$!
placed 1 &
second=$!
tries=0
until [ "$(values hung loss 2>/dev/null | wc -l)" -ge 15 ] || [ $tries -ge 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
kill -STOP $(children $(children $first)) # timeout's child is the supervisor, whose child is rank 0
check "a rank started alone that hangs is restarted" wait $first
check "and the other with it" wait $second
check "it is named" grep -q 'rank 0 did not arrive within 10 s in step [0-9]' "$folder/err0"
check "and the run comes to its end" [ "$(values hung loss | wc -l)" -eq 400 ]

finish
