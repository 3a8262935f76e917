#!/bin/sh
# Times candidates for the tiles of the fa2 kernels on the GPU that is there, and prints the best lines for
# attention/fa2_tiles.cuh.
#
#     scripts/tune_attention.sh HEAD_DIM          head dimension 64, 80, 96, 128, 192 or 256
#
# Every candidate is compiled for that head dimension alone, checked against the reference and timed by
# attention/bench.cu over sequence lengths and both masks; the best has the largest sum of rates. Candidates that do not
# fit in shared memory are skipped by their static_assert; those that spill show it in their speed.
set -eu
cd "$(dirname "$0")/.."
dim=${1:?usage: scripts/tune_attention.sh HEAD_DIM}
NVCC=${NVCC:-nvcc}
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
arch=$(echo "$capability" | sed 's/^90$/90a/')
case $capability in
80 | 87) shared_kb=163 ;;
90 | 10?) shared_kb=227 ;;
*) shared_kb=99 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-I. -D_GNU_SOURCE -DWITH_CUDA -std=c++17 -O3 -gencode arch=compute_$arch,code=sm_$arch"

# rows, columns, warps, blocks on a multiprocessor
forward="128,128,4,2 128,96,4,2 128,80,4,2 128,64,4,2 128,32,4,2 64,64,4,2 64,64,4,3 64,64,4,1 128,64,8,1"
# rows, columns, key warps, query warps, row warps of dQ, stages, blocks on a multiprocessor
backward="32,128,4,1,2,2,2 64,64,4,1,4,2,2 64,64,4,1,2,2,2 64,64,4,1,2,2,1 64,128,8,1,4,2,1 64,128,8,1,2,2,1
    64,128,4,2,2,2,1 128,128,8,1,8,2,1 128,128,4,2,4,2,1 64,64,4,2,2,2,1 32,64,4,2,2,2,1 32,64,4,1,2,2,1
    32,32,2,2,2,2,1 32,32,2,2,2,1,1"

compile() { # object, source, options
    object=$1 source=$2
    shift 2
    # shellcheck disable=SC2086
    $NVCC $flags "$@" -c "$source" -o "$work/$object"
}

for name in bench attention standard fa1_forward fa1_backward; do
    compile $name.o attention/$name.cu
done
for name in attention/params attention/reference llmc/common; do
    ${CC:-cc} -std=c11 -O3 -D_GNU_SOURCE -DWITH_CUDA -I. -Wno-unknown-pragmas -c $name.c -o "$work/$(basename $name)_c.o"
done
compile fa2_forward.o attention/fa2_forward.cu
compile fa2_backward.o attention/fa2_backward.cu

# The candidates of one direction; $1: forward or backward, $2: the macro, $3: the column of its rate in bench's table.
tune() {
    direction=$1 macro=$2 column=$3
    other=$([ "$direction" = forward ] && echo backward || echo forward)
    for tile in $4; do
        printf '#define FA2_TUNE_HEAD_DIM %s\n#define FA2_TUNE_SHARED_KB %s\n#define %s %s\n' \
            "$dim" "$shared_kb" "$macro" "$tile" > "$work/tile.h"
        if ! compile "candidate.o" "attention/fa2_$direction.cu" -include "$work/tile.h" 2> "$work/errors"; then
            continue
        fi
        # shellcheck disable=SC2086
        $NVCC $flags "$work"/bench.o "$work"/attention.o "$work"/standard.o "$work"/fa1_*.o "$work"/*_c.o \
            "$work/candidate.o" "$work/fa2_$other.o" -o "$work/bench" -lcublas -lcublasLt -lm
        if "$work/bench" --kernel fa2 --head-dim "$dim" --repeats 9 > "$work/table"; then
            rate=$(awk -v c="$column" '$1 + 0 > 0 { sum += $c; n++ } END { printf "%.1f", sum / n }' "$work/table")
            echo "$direction $tile: $rate TFLOP/s on average"
            echo "$rate $tile" >> "$work/$direction.results"
        else
            echo "$direction $tile: wrong"
        fi
    done
    echo "best $direction tile for head dimension $dim and $shared_kb KB: {$(sort -rn "$work/$direction.results" | head -1 |
        cut -d' ' -f2 | sed 's/,/, /g')}"
}

tune forward FA2_FORWARD_TILE 9 "$forward"
tune backward FA2_BACKWARD_TILE 10 "$backward"
