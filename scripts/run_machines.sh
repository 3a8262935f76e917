#!/bin/sh
# Trains a GPT-3 size on several machines. Run it on every one, with MACHINES (how many), MACHINE (which this is, from
# 0), MASTER_ADDR (the first one's address) and the same options; --run-dir is a folder that all share. GPUS (8 a machine),
# MASTER_PORT (29500) and FLASHGPT_TOKEN (anything that the machines agree on) may be set.
#   MACHINES=2 MACHINE=0 MASTER_ADDR=10.0.0.1 scripts/run_machines.sh gpt3-2.7b 8192 --train-data ... --run-dir ...
# Under torchrun, which sets RANK and the like itself, each of its processes becomes one rank:
#   torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1 --no-python \
#       scripts/run_machines.sh gpt3-2.7b 8192 --train-data ... --run-dir ...
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

# A signal for this script is for its ranks; the first failure is the script's, and ends the others soon.
ranks=
trap 'kill -TERM $ranks 2>/dev/null || true' TERM INT HUP
local_rank=0
while [ $local_rank -lt "$gpus" ]; do
    RANK=$((first + local_rank)) LOCAL_RANK=$local_rank "$trainer" $settings --max-restarts 3 "$@" &
    ranks="$ranks $!"
    local_rank=$((local_rank + 1))
done
code=0
for rank in $ranks; do
    until wait "$rank" || { ended=$?; ! kill -0 "$rank" 2>/dev/null; }; do :; done # a signal cuts wait short
    [ "${ended:-0}" -eq 0 ] || [ $code -ne 0 ] || code=$ended
    ended=0
done
exit $code
