#!/bin/sh
# Compiles test_comm.c with llmc/comm_nccl.cu, its GPUs and NCCL those of nccl_on_cpu.cpp, and runs it. Needs a C++ compiler.
cd "$(dirname "$0")/.." || exit 1
. test/frame.sh
set -e
cuda_as_cxx # what it needs to be there
touch "$folder/nccl.h"
for source in test/test_comm.c llmc/comm.c llmc/comm_shared.c llmc/comm_tcp.c llmc/rendezvous.c llmc/checksum.c \
    llmc/common.c; do
    ${CC:-cc} -std=c11 -O1 -g -D_GNU_SOURCE -DWITH_NCCL -DNCCL_ON_CPU -I. -Wno-unknown-pragmas -c "$source" \
        -o "$folder/$(echo "$source" | tr / _).o"
done
$CXX -std=c++17 -O1 -g -D_GNU_SOURCE "-I$folder" -I. -c test/nccl_on_cpu.cpp -o "$folder/nccl_on_cpu.o"
$CXX "$folder"/*.o -o "$folder/test_comm_nccl" -pthread -lm
"$folder/test_comm_nccl"
