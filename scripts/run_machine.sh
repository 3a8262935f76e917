#!/bin/sh
# Trains a GPT-3 size on the GPUs of this machine (GPUS, default 8).
#   scripts/run_machine.sh gpt3-2.7b 8192 --dry-run
#   scripts/run_machine.sh gpt3-1.3b 2048 --train-data 'data/tokens/train*.bin' --run-dir runs/1.3b --resume
set -eu
here=$(dirname "$0")
. "$here/run_settings.sh"
gpus=${GPUS:-8}
whole GPUS "$gpus" 1 $most_ranks
if [ -n "$dry_run" ]; then
    print_plans "$gpus" "$@"
    exit
fi
exec "$trainer" $settings --ranks "$gpus" --max-restarts 3 "$@"
