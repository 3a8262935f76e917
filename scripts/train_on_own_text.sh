#!/bin/sh
# What `make train` runs: learns a vocabulary of 1024 tokens from the text of this repository itself, sources and docs,
# packs it into token shards (whole files for training or for validation), then trains the preset "tiny" on them, or
# "gpt2-124m" where there is a GPU. Needs nothing but the two programs that `make` built. Options go to train_gpt, and win
# over the script's own.
#
#     make train ARGS="--steps 50"                     scripts/train_on_own_text.sh [OPTIONS OF train_gpt]
#
# FLASHGPT_BUILD is the folder of the program `prepare` (default build).
set -eu
here=$(dirname "$0")
. "$here/checks.sh"
print_help "$@"
cd "$here/.."
prepare=${FLASHGPT_BUILD:-build}/prepare
program "$prepare" "build it with make, or name its folder in FLASHGPT_BUILD"
program ./train_gpt "build it with make"
tokens=data/tokens/this-repository
vocab_size=1024 # after as many steps, a byte of text costs a quarter less than with bytes as tokens

# The files under version control; without git, or outside of a checkout, what find sees.
own_text() {
    tracked=$(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.md' '*.sh' '*.py' Makefile LICENSE 2>/dev/null) || tracked=
    if [ -n "$tracked" ]; then
        echo "$tracked"
    else
        find . \( -name '.?*' -o -name 'build*' -o -name runs -o -path ./data/tokens -o -path ./data/downloads \) -prune -o -type f \
            \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.md' -o -name '*.sh' -o -name '*.py' \
            -o -name Makefile -o -name LICENSE \) -print
    fi | LC_ALL=C sort | while read -r file; do
        [ ! -f "$file" ] || echo "$file" # tracked, but removed from the working tree
    done
}

own_text | "$prepare" --out-dir "$tokens" --overwrite --val-fraction 0.1 \
    --train-bpe $vocab_size --files-from -

# On a GPU the same minutes train a hundred times larger model.
if ./train_gpt --device cuda --dry-run --quiet --train-data synthetic --steps 1 >/dev/null 2>&1; then
    set -- --model gpt2-124m --micro-batch 16 --steps 400 --eval-every 100 --checkpoint-every 400 "$@"
else
    set -- --model tiny --learning-rate 3e-3 --steps 1200 --eval-every 400 --checkpoint-every 400 "$@"
fi
exec ./train_gpt --tokenizer "$tokens" --vocab-size $vocab_size --train-data "$tokens/train_*.bin" --val-data "$tokens/val_*.bin" \
    --eval-batches 0 --sample-every 100000 --sample-tokens 160 --sample-prompt '/* ' "$@"
