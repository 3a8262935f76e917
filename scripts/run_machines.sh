#!/bin/sh
# Trains a GPT-3 size on several machines, with the settings of run_machine.sh. Run it on every one, with the same options;
# --run-dir is a folder that all share.
#
#     scripts/run_machines.sh MODEL LENGTH [--dry-run] [OPTIONS OF train_gpt]      gpt3-1.3b or gpt3-2.7b, 2048 or 8192
#     MACHINES=2 MACHINE=0 MASTER_ADDR=10.0.0.1 scripts/run_machines.sh gpt3-2.7b 8192 --train-data ... --run-dir ...
#
# MACHINES: how many (default 2). MACHINE: which this is, from 0. MASTER_ADDR: the address of machine 0. MASTER_PORT: a free
# port of it (29500). GPUS: how many each machine has (8). FLASHGPT_TOKEN: anything that the machines agree on, to keep
# others out. FLASHGPT_TRAINER: another train_gpt than that here or beside the scripts.
#
# The ranks' own messages name what this makes of them: WORLD_SIZE is GPUS x MACHINES, and RANK counts from GPUS x MACHINE.
# Ranks that were started with another WORLD_SIZE have other GPUS or MACHINES; two with the same RANK the same MACHINE.
#
# SIGINT, SIGTERM and SIGHUP for this script are for its ranks, which save and stop. It ends as the first of them that
# failed, by number; one that another failure took along (exit code 3) counts only where all did so.
#
# Under torchrun, which sets RANK and the like itself, each of its processes becomes one rank:
#
#     torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1 --no-python \
#         scripts/run_machines.sh gpt3-2.7b 8192 --train-data ... --run-dir ...
set -eu
here=$(dirname "$0")
. "$here/run_settings.sh"
gpus=${GPUS:-8}
machines=${MACHINES:-2}
whole GPUS "$gpus" 1 $most_ranks
whole MACHINES "$machines" 1 $most_ranks
whole "GPUS x MACHINES" $((gpus * machines)) 1 $most_ranks
if [ -n "$dry_run" ]; then
    print_plans $((gpus * machines)) "$@"
    exit
fi
if [ -n "${RANK:-}" ]; then
    exec "$trainer" $settings "$@"
fi
whole MACHINE "${MACHINE:-}" 0 $((machines - 1))
[ -n "${MASTER_ADDR:-}" ] || fail "no MASTER_ADDR: set it to the address of machine 0"
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
whole MASTER_PORT "$MASTER_PORT" 1 65535
export WORLD_SIZE=$((gpus * machines)) LOCAL_WORLD_SIZE="$gpus"
(export RANK=0 LOCAL_RANK=0 && check_options "$@")
first=$((MACHINE * gpus))

# A rank that has just been forked is a shell that loses a signal, and until train_gpt listens SIGINT is ignored, as it is in
# all that a shell starts in the background. SIGTERM a second later is for these; the others stop already, and do not mind.
ranks=
signal=
forward() { # forward SIGNAL
    signal=$1
    kill -s "$signal" $ranks 2>/dev/null || true
}
insist() {
    signal=
    sleep 1 || true
    kill -s TERM $ranks 2>/dev/null || true
}
for name in INT TERM HUP; do
    trap "forward $name" $name
done
local_rank=0
while [ $local_rank -lt "$gpus" ]; do
    RANK=$((first + local_rank)) LOCAL_RANK=$local_rank "$trainer" $settings --max-restarts 3 "$@" &
    ranks="$ranks $!"
    local_rank=$((local_rank + 1))
done

peer_lost=3
code=0
for rank in $ranks; do
    ended=0
    while
        [ -z "$signal" ] || insist
        now=0
        wait "$rank" || now=$?
        [ $now -eq 127 ] || ended=$now # 127: it had ended when the signal came that seemed to cut the wait short
        [ -n "$signal" ]
    do :; done
    ranks=${ranks#" $rank"}
    if [ "$ended" -ne 0 ] && { [ $code -eq 0 ] || [ $code -eq $peer_lost ]; }; then
        code=$ended
    fi
done
exit $code
