#!/bin/sh
# The whole training step with every attention kernel side by side, as in the end-to-end table of the FlashAttention-2
# paper: GPT-3 1.3B and 2.7B at 2k and 8k, 65,536 tokens a step, on one GPU. Prints a Markdown table. Standard attention
# keeps P of every layer: its micro-batch is halved until it fits in the GPU's memory, or its row says that it does not.
#
#     scripts/table.sh [MORE OPTIONS OF measure_step.py]       such as --steps 10, or --torch cudnn for PyTorch beside it
set -eu
here=$(dirname "$0")
. "$here/checks.sh"
print_help "$@"
cd "$here/.."
program nvidia-smi "the table is measured on a GPU"
program ./train_gpt "build it with make"
kernels=standard,fa1,fa2
if nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -q '^9\.0' && ./train_gpt --help | grep fa3 >/dev/null; then
    kernels=$kernels,fa3
fi
exec python3 scripts/measure_step.py --set 1.3b --set 2.7b --attention "$kernels" --fit --warmup 1 --steps 3 "$@"
