#!/bin/sh
# Registers and spills of every attention kernel, from what ptxas said in the build. Fails if a kernel of fa2 or fa3 spills:
# their tiles are chosen so that none does; or if ptxas had to serialize the matrix products of one.
#
#     make attention-registers                         scripts/attention_registers.sh BUILD_DIR
set -eu
here=$(dirname "$0")
. "$here/checks.sh"
print_help "$@"
[ $# -eq 1 ] || usage "BUILD_DIR, such as: make attention-registers"
[ -e "$1/attention/standard.ptxas" ] || fail "no $1/attention/standard.ptxas: build the kernels there with make, where nvcc is"
# a kernel's report: its name and architecture, its stack and spills, its registers; kernels for other generations than
# the one compiled for are empty and use few
awk '
    /wgmma.*serialized/ { print FILENAME ": " $0; failed = 1 }
    /Compiling entry function/ { split($0, quoted, "\047"); kernel = quoted[2]; arch = quoted[4] }
    /bytes spill stores/ { spills = $5 + $9 }
    /Used [0-9]+ registers/ {
        for (i = 1; i <= NF; i++) if ($i == "Used") registers = $(i + 1)
        if (registers > 12) {
            bad = FILENAME ~ /fa[23]_[a-z]*\.ptxas$/ && spills > 0
            printf "%-7s %3d registers %4d bytes spilled%s  %s\n", arch, registers, spills, bad ? " TOO MANY" : "", kernel
            kernels++
            failed = failed || bad
        }
    }
    END { exit failed || kernels == 0 }' "$1"/attention/standard.ptxas "$1"/attention/fa*.ptxas >"$1/registers" ||
    status=1
c++filt <"$1/registers" | sed 's/(dtype)2/bf16/; s/(dtype)3/fp16/'
exit ${status:-0}
