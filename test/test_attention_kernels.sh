#!/bin/sh
# Compiles test_attention_kernels.cpp, which runs the attention kernels for GPUs on the CPU, and runs it. This test
# and test_op_kernels need a C++ compiler: everything else of a build without CUDA is C.
cd "$(dirname "$0")/.." || exit 1
. test/frame.sh
set -e
cuda_as_cxx attention/*.cu attention/*.cuh
for source in attention/params.c attention/reference.c llmc/common.c; do
    ${CC:-cc} -std=c11 -O2 -D_GNU_SOURCE -DWITH_CUDA -I. -Wno-unknown-pragmas -c "$source" \
        -o "$folder/$(basename "$source" .c).o"
done
# the fibers jump between stacks, which a checked longjmp takes for an error: no _FORTIFY_SOURCE
$CXX -std=c++17 -O1 -U_FORTIFY_SOURCE -D_GNU_SOURCE -DWITH_CUDA "-I$folder" -I. -Wno-unknown-pragmas \
    test/test_attention_kernels.cpp "$folder"/*.o -o "$folder/test_attention_kernels"
"$folder/test_attention_kernels"
