/* The kernels of llmc/cuda/ on a CPU (cuda_on_cpu.h says how), and the host code that launches them: this stands in for
   llmc/cuda/device.cuh, and the .cu files are then included as C++.

   A launch is refused for what a GPU refuses: grids and blocks of a wrong size, more shared memory than was asked for.
   What is not looked at: shared memory with a size of its own counts for nothing and holds at first what the block before
   left. */
#ifndef TEST_OPS_ON_CPU_H
#define TEST_OPS_ON_CPU_H

#define LLMC_CUDA_DEVICE_CUH
#define __shared__ static

#include "test/cuda_on_cpu.h"

#include <map>
#include <math.h>
#include <utility>

/* ---- element types ---- */

struct __nv_bfloat16 {
    uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
struct __half {
    uint16_t bits;
};
typedef __nv_bfloat16 bf16;

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float __bfloat162float(bf16 value) {
    return bf16_to_float(value.bits);
}
inline bf16 __float2bfloat16_rn(float value) {
    return {float_to_bf16(value)};
}
inline bf16 __ushort_as_bfloat16(unsigned short bits) {
    return {bits};
}
inline float __half2float(__half value) {
    return f16_to_float(value.bits);
}
inline __half __float2half_rn(float value) {
    return {float_to_f16(value)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __float2bfloat162_rn(float value) {
    return __floats2bfloat162_rn(value, value);
}
inline float __low2float(__nv_bfloat162 pair) {
    return __bfloat162float(pair.x);
}
inline float __high2float(__nv_bfloat162 pair) {
    return __bfloat162float(pair.y);
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(
        fmaxf(__low2float(a), __low2float(b)), fmaxf(__high2float(a), __high2float(b)));
}

/* ---- instructions ---- */

inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
inline float __fdividef(float x, float y) {
    return x / y;
}
inline int __popc(unsigned bits) {
    return __builtin_popcount(bits);
}
inline unsigned __match_any_sync(unsigned, int value) {
    uint32_t bits = (uint32_t)value;
    return cpu_with_warp(&bits, 1, [&] {
        unsigned same = 0;
        for (unsigned lane = 0; lane < CPU_LANES; lane++) {
            same |= (unsigned)(cpu_lane(lane)[0] == bits) << lane;
        }
        return same;
    });
}

static uint4 *const dynamic_shared = reinterpret_cast<uint4 *>(shared);

inline void copy_async16(uint4 *to, const bf16 *from) {
    copy_async(shared_address(to), from, true);
}

/* ---- the runtime ---- */

typedef void *cudaStream_t;
typedef void *cudaEvent_t;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DGELU };

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned in_x = 1, unsigned in_y = 1, unsigned in_z = 1) : x(in_x), y(in_y), z(in_z) {
    }
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

/* What a GPU with this much shared memory for a block gives each kernel. */
static int cpu_most_shared_bytes = CPU_SHARED_BYTES;
static std::map<void *, int> cpu_shared_bytes_of;

template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute, int value) {
    if (value < 0 || value > cpu_most_shared_bytes) {
        return cudaErrorInvalidValue;
    }
    cpu_shared_bytes_of[(void *)kernel] = value;
    return cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t *config, void (*kernel)(Parameters...), Arguments... arguments) {
    enum { UNASKED_SHARED_BYTES = 48 * 1024, MOST_GRID_Y = 65535 };
    dim3 grid = config->gridDim, block = config->blockDim;
    if (grid.x == 0 || grid.x > INT32_MAX || grid.y == 0 || grid.y > MOST_GRID_Y || block.x == 0 ||
        block.y == 0 || (uint64_t)block.x * block.y > CPU_MOST_THREADS || grid.z != 1 || block.z != 1) {
        return cudaErrorInvalidConfiguration;
    }
    auto asked = cpu_shared_bytes_of.find((void *)kernel);
    int most_bytes = asked == cpu_shared_bytes_of.end() ? UNASKED_SHARED_BYTES : asked->second;
    if (config->dynamicSmemBytes > (size_t)most_bytes) {
        return cudaErrorInvalidValue;
    }
    cpu_launch(
        {grid.x, grid.y}, {block.x, block.y}, (int)config->dynamicSmemBytes, [=] { kernel(arguments...); });
    cpu_run();
    return cudaSuccess;
}

#endif
