/* What the kernels of the ops take from CUDA beside the language: its headers, its memory and the instructions that C++ has
   no words for. test/ops_on_cpu.h stands in for this file where the kernels run on a CPU. */
#ifndef LLMC_CUDA_DEVICE_CUH
#define LLMC_CUDA_DEVICE_CUH

#include "attention/instructions.cuh"

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

/* The block's shared memory, as many bytes as the launch asked for. */
extern __shared__ uint4 dynamic_shared[];

/* Waits for `threads` threads, whole warps, at barrier `which` of 16: 0 is that of __syncthreads. */
__device__ inline void barrier(int which, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

/* A copy of 16 bytes into shared memory that runs while the thread goes on; copy_commit ends a group of them. */
__device__ inline void copy_async16(uint4 *shared, const bf16 *global) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

#endif
