#!/bin/sh
# Compiles test_op_kernels.cpp, which runs the ops' kernels for GPUs on the CPU, and runs it. Needs a C++ compiler.
cd "$(dirname "$0")/.." || exit 1
. test/frame.sh
set -e
cuda_as_cxx llmc/cuda/*.cu
for source in llmc/cpu/*.c llmc/common.c; do
    ${CC:-cc} -std=c11 -O1 -D_GNU_SOURCE -DCPU_F64 -I. -Wno-unknown-pragmas -c "$source" \
        -o "$folder/$(echo "$source" | tr / _).o"
done
# accesses by type are CUDA's to define, not C++'s; jumps between stacks are no errors here
$CXX -std=c++17 -O1 -U_FORTIFY_SOURCE -fno-strict-aliasing -D_GNU_SOURCE "-I$folder" -I. -Illmc/cuda -Wno-unknown-pragmas \
    test/test_op_kernels.cpp "$folder"/*.o -o "$folder/test_op_kernels"
"$folder/test_op_kernels"
