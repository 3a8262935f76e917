#!/bin/sh
# Times candidates for the tiles of the fa2 kernels on the GPU that is there and prints the best lines of the tables in
# attention/fa2_tiles.cuh; with WRITE, any word but "", it puts them there.
#
#     make tune-attention [HEAD_DIMS="64 128"] [WRITE=1]     scripts/tune_attention.sh BUILD_DIR WRITE HEAD_DIM...
#
# Every candidate is compiled for one head dimension and bf16, checked against the reference and timed by attention/bench
# over lengths and both masks, backward deterministic as well; the best has the highest mean rate. Candidates that do not
# fit in shared memory are skipped by their static_assert, those that spill by what ptxas says. NVCC names CUDA's compiler.
set -eu
export LC_ALL=C # rates with decimal points
here=$(dirname "$0")
. "$here/checks.sh"
print_help "$@"
cd "$here/.."
[ $# -ge 3 ] || usage 'BUILD_DIR WRITE HEAD_DIM..., such as: make tune-attention HEAD_DIMS="64 128"'
build=$1
write=$2
shift 2
for dim in "$@"; do
    whole HEAD_DIM "$dim" 8 256
    [ $((dim % 8)) -eq 0 ] || fail "HEAD_DIM is a multiple of 8, not $dim"
done
[ -e "$build/attention/bench" ] || fail "no $build/attention/bench: build it with make bench-attention"
NVCC=${NVCC:-nvcc}
program "${NVCC%% *}" "name CUDA's compiler in NVCC"
program nvidia-smi "tiles are tuned on the GPU that is there"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
arch=$(echo "$capability" | sed 's/^90$/90a/')
case $capability in
80 | 87) shared_kb=163 ;;
90 | 10?) shared_kb=227 ;;
*) shared_kb=99 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# rows, columns, warps, blocks on a multiprocessor
forward="128,128,4,2 128,96,4,2 128,80,4,2 128,64,4,2 128,48,4,2 128,32,4,2 64,64,4,1 64,64,4,2 64,64,4,3 128,64,8,1"
# rows, columns, parts of the rows, key warps, query warps, row warps of dQ, stages, blocks on a multiprocessor
backward="32,128,1,4,1,2,2,2 32,128,1,4,1,1,2,2 64,128,2,4,1,2,2,2 64,128,2,4,1,2,1,2 64,64,1,4,1,4,2,2 64,64,1,4,1,2,2,2
    128,64,2,4,1,4,2,1 64,128,1,8,1,4,2,1 64,128,1,8,1,2,2,1 64,128,1,4,2,2,2,1 128,128,1,8,1,8,2,1 128,128,2,8,1,8,2,1
    64,64,1,4,2,2,2,1 64,64,1,4,2,1,2,1 32,64,1,4,2,2,2,1 32,64,1,4,1,2,2,1 32,32,1,2,2,2,2,1 32,32,1,2,2,2,1,1"

compile() { # DIRECTION HEAD_DIM [TILE]: $work/DIRECTION.o for this head dimension alone
    {
        printf '#define FA2_TUNE_HEAD_DIM %s\n#define FA2_TUNE_SHARED_KB %s\n' "$2" "$shared_kb"
        [ $# -eq 2 ] || printf '#define FA2_%s_TILE %s\n' "$(echo "$1" | tr a-z A-Z)" "$3"
    } >"$work/tile.h"
    $NVCC -I. -D_GNU_SOURCE -DWITH_CUDA -std=c++17 -O3 -gencode "arch=compute_$arch,code=sm_$arch" -Xptxas -v \
        -include "$work/tile.h" -c "attention/fa2_$1.cu" -o "$work/$1.o" 2>"$work/report" &&
        ! grep -q ' [1-9][0-9]* bytes spill' "$work/report"
}

link() { # bench with the two objects, and everything else as it is built
    objects=$(find "$build/attention" "$build/llmc/common.o" -name '*.o' ! -name 'fa2_*')
    # shellcheck disable=SC2086
    $NVCC -gencode "arch=compute_$arch,code=sm_$arch" $objects "$work/forward.o" "$work/backward.o" -o "$work/bench" \
        -lcublas -lgomp -lm
}

mean_rate() { # HEAD_DIM DIRECTION [OPTION]: over the cases of bench; fails if one is wrong
    "$work/bench" --kernel fa2 --seqlen 512,2048,8192 --repeats 7 --head-dim "$1" --json "$work/json" $3 >/dev/null &&
        sed "s/.*\"$2_tflops\": \([0-9.]*\).*/\1/" "$work/json" | awk '{ sum += $1 } END { printf "%.1f", sum / NR }'
}

tune() { # HEAD_DIM DIRECTION CANDIDATES
    : >"$work/results"
    for tile in $3; do
        if compile "$2" "$1" "$tile"; then
            link
            rate=$(mean_rate "$1" "$2" "") || { echo "$2 $1 {$tile}: wrong" >&2 && continue; }
            also=$rate
            [ "$2" = forward ] || also=$(mean_rate "$1" "$2" --deterministic)
            echo "$2 $1 {$tile}: $rate TFLOP/s$([ "$2" = forward ] || echo ", deterministic $also")" >&2
            echo "$rate $also $tile" | awk '{ print $1 + $2, $3 }' >>"$work/results"
        fi
    done
    best=$(sort -rn "$work/results" | sed -n '1s/.* //p' | sed 's/,/, /g')
    [ -n "$best" ] || { echo "$2 $1: no candidate fits" && return; }
    echo "$2: {$1, $shared_kb, {$best}},"
    if [ -n "$write" ]; then # the table of this direction ends at its first "};"
        sed -i "/^constexpr $2_choice/,/^};/s/{$1, $shared_kb, {[^}]*}}/{$1, $shared_kb, {$best}}/" attention/fa2_tiles.cuh
    fi
    compile "$2" "$1" "$(echo "$best" | tr -d ' ')"
}

for dim in "$@"; do
    compile backward "$dim"
    tune "$dim" forward "$forward"
    tune "$dim" backward "$backward"
done
