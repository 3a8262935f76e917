#!/bin/sh
# Trains a GPT-3 size on the GPUs of this machine: with batches of a million tokens, micro-batches for 80 GB and a warm-up
# of 358 steps, or 2% of --steps if they are fewer, unless the options say otherwise. (Where the data ends before so many
# steps, give --warmup-steps.) --dry-run prints what it would take of an A100, H100 or H200 instead.
#
#     scripts/run_machine.sh MODEL LENGTH [--dry-run] [OPTIONS OF train_gpt]      gpt3-1.3b or gpt3-2.7b, 2048 or 8192
#     scripts/run_machine.sh gpt3-2.7b 8192 --dry-run
#     scripts/run_machine.sh gpt3-1.3b 2048 --train-data 'data/tokens/train*.bin' --run-dir runs/1.3b --resume
#     GPUS=4 scripts/run_machine.sh gpt3-1.3b 2048 --train-data synthetic --steps 20
#
# GPUS: how many of them (default 8). FLASHGPT_TRAINER: another train_gpt than that here or beside the scripts.
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
