/* The few instructions, beside those of products, that C++ has no words for, under the names that the kernels of attention/
   and of llmc/cuda/ know them by. Where kernels run on a CPU, test/cuda_on_cpu.h has them. */
#ifndef ATTENTION_INSTRUCTIONS_CUH
#define ATTENTION_INSTRUCTIONS_CUH

#include <cuda_runtime.h>

/* 2^x, 2 units in the last place; results below 2^-126 become 0, and so does 2^-infinity. */
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Asynchronous copies into shared memory come in groups: the end of this thread's group; */
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* and a wait until at most the newest PENDING groups of this thread are under way. */
template <int PENDING> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* The two sides of launches that overlap (sm_90; before, a kernel starts when the one before it has ended). This block has
   no objection to the next kernel's start; */
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* and from here on, this one sees all that the previous kernel has done. */
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
