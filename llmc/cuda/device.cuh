/* What the kernels of the ops take from CUDA beside the language: its headers, its memory and the instructions that C++ has
   no words for. test/ops_on_cpu.h stands in for this file where the kernels run on a CPU. */
#ifndef LLMC_CUDA_DEVICE_CUH
#define LLMC_CUDA_DEVICE_CUH

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

/* For a kernel that is launched to overlap with the one before it: that one has called launch_next in all its blocks, and
   this one waits for its end. */
__device__ inline void launch_next() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

/* The block's shared memory, as many bytes as the launch asked for. */
extern __shared__ uint4 dynamic_shared[];

/* Waits for `threads` threads, whole warps, at barrier `which` of 16: 0 is that of __syncthreads. */
__device__ inline void barrier(int which, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

/* Copies of 16 bytes into shared memory that run while the thread goes on, in groups: wait<N> returns when all but the
   thread's last N groups are there. */
__device__ inline void copy_async16(uint4 *shared, const bf16 *global) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ inline void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> __device__ inline void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* 2^x in one instruction, 2 units in the last place; results below 2^-126 become 0. */
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
