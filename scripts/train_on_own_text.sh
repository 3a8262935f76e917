#!/bin/sh
# What `make train` runs: packs the text of this repository itself, sources and docs, into token shards (whole files
# for training or for validation), then trains the preset "tiny" on them. Needs nothing but the two programs that
# `make` built. Options go to train_gpt, after the ones below: scripts/train_on_own_text.sh --steps 50
set -eu
cd "$(dirname "$0")/.."
tokens=data/tokens/this-repository

# The files under version control; without git, or outside of a checkout, what find sees.
own_text() {
    tracked=$(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.md' '*.sh' '*.py' Makefile LICENSE 2>/dev/null) || tracked=
    if [ -n "$tracked" ]; then
        echo "$tracked"
    else
        find . \( -name '.?*' -o -name 'build*' -o -name runs -o -path ./data/tokens \) -prune -o -type f \
            \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.md' -o -name '*.sh' -o -name '*.py' \
            -o -name Makefile -o -name LICENSE \) -print
    fi | LC_ALL=C sort | while read -r file; do
        [ ! -f "$file" ] || echo "$file" # tracked, but removed from the working tree
    done
}

own_text | "${FLASHGPT_BUILD:-build}/prepare" --out-dir "$tokens" --overwrite --val-fraction 0.1 --files-from -
exec ./train_gpt --model tiny --tokenizer bytes \
    --train-data "$tokens/train_*.bin" --val-data "$tokens/val_*.bin" \
    --steps 1200 --learning-rate 3e-3 --eval-every 200 --sample-every 1200 --checkpoint-every 400 "$@"
