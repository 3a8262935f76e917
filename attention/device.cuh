/* What the kernels' host code shares: CUDA's errors as one line, launches, and element types as template arguments.

   Kernels are templates over `enum dtype` and hold 16-bit elements as bits (uint16_t, or two in a uint32_t):
   conversions are here, matrix instructions in mma_sm80.cuh. */
#ifndef ATTENTION_DEVICE_CUH
#define ATTENTION_DEVICE_CUH

#include "attention/instructions.cuh"
#include "attention/kernel.h"

#include <cuda_runtime.h>

static inline enum status cuda_check(cudaError_t error, const char *what) {
    return error == cudaSuccess
               ? STATUS_OK
               : fail("attention: %s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

/* Launches kernel(arguments) on a one-dimensional grid; `what` names it in errors. More than 48 KB of shared memory a
   block has to be asked for. overlap (sm_90): blocks may start as soon as those of the kernel before it in the stream have
   all called launch_next, and call wait_for_previous before they need what that has done. */
template <typename Arguments>
enum status launch(const char *what, void (*kernel)(Arguments), int64_t blocks, int threads, int shared_bytes,
    void *stream, const Arguments &arguments, bool overlap = false) {
    if (blocks > INT32_MAX) {
        return fail("attention: %s needs %lld thread blocks, more than a grid has: use smaller batches", what,
            (long long)blocks);
    }
    if (shared_bytes > 48 * 1024) {
        CHECK(cuda_check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), what));
    }
    cudaLaunchAttribute overlapping = {};
    overlapping.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlapping.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)shared_bytes;
    config.stream = (cudaStream_t)stream;
    config.attrs = &overlapping;
    config.numAttrs = overlap ? 1 : 0;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments);
    (void)cudaGetLastError(); /* the caller hears of it from here, and not again */
    return cuda_check(error, what);
}

/* Two floats rounded to 16 bits, the first in the low half. */
template <enum dtype TYPE> __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t bits;
    if constexpr (TYPE == DTYPE_BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    }
    return bits;
}

template <enum dtype TYPE> __device__ __forceinline__ float2 unpack(uint32_t bits) {
    float2 values;
    if constexpr (TYPE == DTYPE_BF16) {
        values.x = __uint_as_float(bits << 16);
        values.y = __uint_as_float(bits & 0xFFFF0000u);
    } else {
        asm("cvt.f32.f16 %0, %1;" : "=f"(values.x) : "h"((uint16_t)bits));
        asm("cvt.f32.f16 %0, %1;" : "=f"(values.y) : "h"((uint16_t)(bits >> 16)));
    }
    return values;
}

/* A tensor's address and strides as a kernel takes them. */
struct device_tensor {
    uint16_t *data;
    int64_t batch_stride, seq_stride, head_stride;

    __device__ __forceinline__ uint16_t *row(int64_t batch, int64_t position, int64_t head) const {
        return data + batch * batch_stride + position * seq_stride + head * head_stride;
    }
};

static inline struct device_tensor on_device(const struct attention_tensor &t) {
    return {(uint16_t *)t.data, t.batch_stride, t.seq_stride, t.head_stride};
}

#endif
