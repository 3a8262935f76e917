#!/bin/sh
# Registers and spills of every attention kernel, as the assembler reports them. Fails if a kernel of fa2 for one of the
# tuned head dimensions spills more than a few registers: up to LIMIT bytes are values that wait outside the loops.
#
#     scripts/attention_registers.sh [ARCH ...]        architectures as nvcc names them; default 80 90a
set -eu
cd "$(dirname "$0")/.."
LIMIT=16
NVCC=${NVCC:-nvcc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- 80 90a
status=0
for arch in "$@"; do
    for name in standard fa1_forward fa1_backward fa2_forward fa2_backward; do
        $NVCC -I. -D_GNU_SOURCE -DWITH_CUDA -std=c++17 -O3 -gencode "arch=compute_$arch,code=sm_$arch" -Xptxas -v \
            -c attention/$name.cu -o "$work/$name.o" 2> "$work/report"
        # a kernel's report is three lines: its name, its stack and spills, its registers; empty kernels use few
        awk -v arch="$arch" -v file=$name -v limit=$LIMIT '
            /Compiling entry function/ { split($0, quoted, "\047"); kernel = quoted[2] }
            /bytes spill stores/ { spills = $5 }
            /Used [0-9]+ registers/ {
                for (i = 1; i <= NF; i++) if ($i == "Used") registers = $(i + 1)
                if (registers > 12) {
                    over = file ~ /^fa2/ && spills > limit
                    printf "sm_%-4s %-13s %3d registers %4d bytes spilled%s  %s\n", arch, file, registers, spills,
                        over ? " TOO MANY" : "", kernel
                    failed = failed || over
                }
            }
            END { exit failed }' "$work/report" > "$work/table" || status=1
        c++filt < "$work/table"
    done
done
exit $status
