#!/bin/sh
# Compiles test_attention_kernels.cpp, which runs the attention kernels for GPUs on the CPU, and runs it. The one test
# that needs a C++ compiler: everything else of a build without CUDA is C.
set -e
CXX=${CXX:-c++}
if ! command -v "$CXX" >/dev/null; then
    echo "  skipped test_attention_kernels: needs a C++ compiler, and there is no $CXX"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for source in attention/params.c attention/reference.c llmc/common.c; do
    ${CC:-cc} -std=c11 -O2 -D_GNU_SOURCE -DWITH_CUDA -I. -Wno-unknown-pragmas -c "$source" \
        -o "$work/$(basename "$source" .c).o"
done
$CXX -std=c++17 -O1 -D_GNU_SOURCE -DWITH_CUDA -I. -Wno-unknown-pragmas test/test_attention_kernels.cpp \
    "$work"/*.o -o "$work/test_attention_kernels"
"$work/test_attention_kernels"
