/* What the files of the CUDA backend share: the state, checked calls, 16-byte loads and stores, sums over warps and
   rows, and the two helpers that cross files (matrix products, sums of partial results).

   Activations and parameters are bf16, statistics fp32; gradients are either, as their tensor says. Kernels move eight
   bf16 in one access, so every row of channels is a multiple of 8 elements (checked at each op's entry). All sums run
   in a fixed order: no kernel adds floats with atomics. */
#ifndef LLMC_CUDA_CUDA_CUH
#define LLMC_CUDA_CUDA_CUH

#include "llmc/backend.h"
#include "llmc/cuda/device.cuh"

/* ---- the state: backend.cu ---- */

enum { STAGING_SLOTS = 8, STAGING_SLOT_BYTES = 1 << 20 };

struct matmul_plans; /* matmul.cu */
struct attention;    /* attention/attention.h */

struct backend_state {
    int device;
    int multiprocessors;
    int shared_bytes; /* the most shared memory that one block can ask for */
    bool overlapping; /* can a kernel be brought up while the one before it ends (sm_90) */
    cudaStream_t stream;
    uint64_t peak_bytes;

    /* Pinned memory that copies to the device go through, so that the caller's buffer is free at once and nobody
       waits. A slot is reused when its event says that its last copy is done. */
    char *staging;
    cudaEvent_t staging_done[STAGING_SLOTS];
    cudaEvent_t marks[BACKEND_MARKS]; /* made when first used */
    int staging_next;

    void *scratch; /* for the ops' partial results, see scratch_reserve */
    size_t scratch_bytes;

    struct matmul_plans *plans;
    struct attention *attention;
};

/* ---- checked calls ---- */

/* STATUS_PEER_LOST if this GPU is lost to the run, so that another try may do; else STATUS_ERROR. */
enum status cuda_failed(cudaError_t error, const char *what);

#define CUDA_CHECK(call)                                                                                     \
    do {                                                                                                     \
        cudaError_t cuda_error_ = (call);                                                                    \
        if (cuda_error_ != cudaSuccess) {                                                                    \
            return cuda_failed(cuda_error_, #call);                                                          \
        }                                                                                                    \
    } while (0)

/* How a kernel is launched. */
struct launch_shape {
    const char *op; /* named in errors */
    dim3 grid, block;
    int64_t shared_bytes = 0; /* for dynamic_shared */
    bool overlap = false;     /* begin before the kernel in front has ended, see launch_next */
};

/* Launches kernel(arguments...) on the backend's stream. */
template <typename... Parameters, typename... Arguments>
enum status launch(struct backend *b, const struct launch_shape &shape, void (*kernel)(Parameters...),
    Arguments... arguments) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = (size_t)shape.shared_bytes;
    config.stream = b->state->stream;
    config.attrs = &overlap;
    config.numAttrs = shape.overlap && b->state->overlapping ? 1 : 0;
    cudaError_t error = cudaSuccess;
    if (shape.shared_bytes > 0) {
        error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shape.shared_bytes);
    }
    if (error == cudaSuccess) {
        error = cudaLaunchKernelEx(&config, kernel, arguments...);
    }
    (void)cudaGetLastError(); /* the caller hears of it from here, and not again */
    return error == cudaSuccess ? STATUS_OK : cuda_failed(error, shape.op);
}

/* At the entry of ops that move rows of `channels` elements as 16-byte vectors. */
static inline enum status check_channels(const char *op, int channels) {
    return channels > 0 && channels % 8 == 0
               ? STATUS_OK
               : fail("%s on the GPU: %d channels are not a multiple of 8", op, channels);
}

/* At least `bytes` of scratch memory, 256-byte aligned, valid until the next op that asks. Grows (and waits for the
   device) only when an op asks for more than any before it. */
enum status scratch_reserve(struct backend *b, void **out, size_t bytes);

/* partials.cu, after a kernel that left partial sums: first (columns) and second (columns, data may be NULL) = or += the
   sum over i of row i of partials, which holds `columns` sums for each of them; in the order of i. It is brought up while
   the kernel's last blocks are at work, from when all have called launch_next; it waits for their end. */
enum status partials_sum(struct backend *b, struct tensor first, struct tensor second, const float *partials,
    int parts, int columns, bool accumulate);

/* ---- matrix products: column-major, as cuBLAS counts ---- */

struct matmul {
    /* D (m,n) = op(A) (m,k) op(B) (k,n), + D when accumulate. Dense: A has m rows, or k when transposed. */
    int64_t m, n, k;
    bool transpose_a, transpose_b;
    const void *a, *b; /* bf16 */
    struct tensor d;
    bool accumulate;
    cublasLtEpilogue_t epilogue;
    const void *bias;      /* EPILOGUE_BIAS: (m) bf16 */
    const void *auxiliary; /* EPILOGUE_DGELU: (m,n) bf16, the pre-activation */
};
enum status matmul(struct backend *b, const struct matmul *product);
enum status matmul_plans_create(struct backend *b, bool autotune);
void matmul_plans_free(struct backend *b);

/* ---- the op families, a file each, set their functions in the table ---- */

void cuda_attention_install(struct backend *b);
void cuda_classifier_install(struct backend *b);
void cuda_decode_install(struct backend *b);
void cuda_embedding_install(struct backend *b);
void cuda_layernorm_install(struct backend *b);
void cuda_linear_install(struct backend *b);
void cuda_optimizer_install(struct backend *b);
void cuda_random_install(struct backend *b);

/* ---- device side ---- */

/* Eight bf16 in registers, as loaded. */
__device__ inline uint4 load16(const bf16 *p) {
    return *reinterpret_cast<const uint4 *>(p);
}
__device__ inline void store16(bf16 *p, uint4 bits) {
    *reinterpret_cast<uint4 *>(p) = bits;
}

__device__ inline void unpack8(float (&out)[8], uint4 bits) {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(word[i] << 16);
        out[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000u);
    }
}
__device__ inline uint32_t pack2(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}
__device__ inline uint4 pack8(const float (&in)[8]) {
    return make_uint4(pack2(in[0], in[1]), pack2(in[2], in[3]), pack2(in[4], in[5]), pack2(in[6], in[7]));
}

__device__ inline void load8(float (&out)[8], const float *p) {
    float4 low = reinterpret_cast<const float4 *>(p)[0], high = reinterpret_cast<const float4 *>(p)[1];
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

/* Adds to (or overwrites) eight elements of a gradient tensor of either dtype. */
__device__ inline void gradient_store8(
    struct tensor t, int64_t index, const float (&value)[8], bool accumulate) {
    float sum[8];
    if (t.dtype == DTYPE_F32) {
        float4 *p = reinterpret_cast<float4 *>(static_cast<float *>(t.data) + index);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 old = accumulate ? p[half] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            p[half] = make_float4(old.x + value[4 * half], old.y + value[4 * half + 1],
                old.z + value[4 * half + 2], old.w + value[4 * half + 3]);
        }
    } else {
        bf16 *p = static_cast<bf16 *>(t.data) + index;
        unpack8(sum, accumulate ? load16(p) : make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum[i] += value[i];
        }
        store16(p, pack8(sum));
    }
}

__device__ inline float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    }
    return value;
}

#endif
