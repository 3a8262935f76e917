#!/bin/sh
#SBATCH --job-name=flashgpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Trains a GPT-3 size under Slurm, a task a GPU, with the settings of run_machine.sh. Two minutes before the time limit the
# run saves its state and stops; the same job submitted again goes on.
#
#     scripts/run_slurm.sh MODEL LENGTH [--dry-run] [OPTIONS OF train_gpt]      gpt3-1.3b or gpt3-2.7b, 2048 or 8192
#     sbatch --nodes 4 scripts/run_slurm.sh gpt3-2.7b 8192 --train-data 'data/tokens/train*.bin' --run-dir runs/2.7b
#     scripts/run_slurm.sh gpt3-2.7b 8192 --dry-run
#
# The ranks are Slurm's tasks: 2 nodes of 8, unless sbatch is told otherwise. FLASHGPT_TRAINER: another train_gpt than that
# here or beside the scripts.
set -eu
# a batch script runs as a copy elsewhere, in the folder that it was submitted from
here=scripts
[ -e "$here/run_settings.sh" ] || here=$(dirname "$0")
. "$here/run_settings.sh"
tasks=${SLURM_NTASKS:-16}
whole SLURM_NTASKS "$tasks" 1 $most_ranks
if [ -n "$dry_run" ]; then
    print_plans "$tasks" "$@"
    exit
fi
program srun "submit this script with sbatch, on a machine that has Slurm"
unset_ranks
check_options --ranks "$tasks" --resume "$@"
exec srun --kill-on-bad-exit=1 "$trainer" $settings --resume "$@"
