/* Sums over whole buffers, the step's decision, and AdamW, all without the host: the decision and its factors pass
   through the control block in device memory.

   Sums: SUM_BLOCKS blocks, whatever the device, each leave a partial sum in scratch memory; one block adds those in
   order, in double precision. Bytes moved: every element once.

   AdamW: a thread updates four elements in one 16-byte access of each fp32 stream. Bytes moved an element with fp32
   gradients: master, moments and gradient read, master, moments and bf16 parameter written: 30. */
#include "cuda.cuh"

#include "llmc/random.h"

/* ---- four elements of either dtype ---- */

template <typename T> struct alignas(4 * sizeof(T)) quad { T element[4]; };

__device__ inline float to_float(float x) {
    return x;
}
__device__ inline float to_float(bf16 x) {
    return __bfloat162float(x);
}

/* The first `width` of four elements, the last quad of a buffer being shorter. */
template <typename T> __device__ inline void load_up_to4(float (&out)[4], const T *p, int width) {
    if (width == 4) {
        quad<T> q = *reinterpret_cast<const quad<T> *>(p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = to_float(q.element[i]);
        }
    } else {
        for (int i = 0; i < 3; i++) {
            out[i] = i < width ? to_float(p[i]) : 0.0f;
        }
        out[3] = 0.0f;
    }
}
template <typename T> __device__ inline void store_up_to4(T *p, const T (&in)[4], int width) {
    if (width == 4) {
        *reinterpret_cast<quad<T> *>(p) = {{in[0], in[1], in[2], in[3]}};
    } else {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (i < width) {
                p[i] = in[i];
            }
        }
    }
}

/* ---- sums ---- */

enum { SUM_BLOCKS = 1024, SUM_THREADS = 512, SUM_AHEAD = 4 };

template <bool SQUARES> __device__ inline float term(float x) {
    return SQUARES ? x * x : x;
}

/* `in` is aligned for quads from element `head` on; the first block takes the elements before. */
template <typename T, bool SQUARES>
__global__ void __launch_bounds__(SUM_THREADS)
    sum_kernel(float *partials, const T *in, int head, int64_t count) {
    __shared__ float shared[SUM_THREADS / 32];
    int64_t step = (int64_t)gridDim.x * SUM_THREADS * 4;
    float sum[4] = {};
    for (int64_t i = head + 4 * ((int64_t)blockIdx.x * SUM_THREADS + threadIdx.x); i < count;
         i += SUM_AHEAD * step) {
        float x[SUM_AHEAD][4];
#pragma unroll
        for (int j = 0; j < SUM_AHEAD; j++) {
            load_up_to4(x[j], in + i + j * step, (int)max((int64_t)0, min((int64_t)4, count - i - j * step)));
        }
#pragma unroll
        for (int j = 0; j < SUM_AHEAD; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sum[k] += term<SQUARES>(x[j][k]);
            }
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < head) {
        sum[0] += term<SQUARES>(to_float(in[threadIdx.x]));
    }
    float total = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0.0f;
        for (int w = 0; w < SUM_THREADS / 32; w++) {
            total += shared[w];
        }
        partials[blockIdx.x] = total;
    }
}

__global__ void sum_finish_kernel(float *out, const float *partials, int parts) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < parts; i += 32) {
        sum += (double)partials[i];
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    }
    if (threadIdx.x == 0) {
        *out = (float)((double)*out + sum);
    }
}

template <bool SQUARES>
static enum status add_sum(struct backend *b, void *out, struct tensor in, int64_t count) {
    void *partials;
    CHECK(scratch_reserve(b, &partials, SUM_BLOCKS * sizeof(float)));
    size_t element = dtype_bytes(in.dtype), quad_bytes = 4 * element;
    int64_t before = (int64_t)((quad_bytes - (uintptr_t)in.data % quad_bytes) % quad_bytes / element);
    int head = (int)min_i64(before, count);
    unsigned blocks = (unsigned)max_i64(1, min_i64(SUM_BLOCKS, ceil_div(count, 4 * SUM_THREADS)));
    struct launch_shape shape = {"sum", blocks, SUM_THREADS};
    if (in.dtype == DTYPE_F32) {
        CHECK(launch(
            b, shape, sum_kernel<float, SQUARES>, (float *)partials, (const float *)in.data, head, count));
    } else {
        CHECK(launch(
            b, shape, sum_kernel<bf16, SQUARES>, (float *)partials, (const bf16 *)in.data, head, count));
    }
    return launch(b, {"sum", 1, 32}, sum_finish_kernel, (float *)out, (const float *)partials, (int)blocks);
}

static enum status check_gradient(const char *op, struct tensor t) {
    return t.dtype == DTYPE_F32 || t.dtype == DTYPE_BF16
               ? STATUS_OK
               : fail("%s on the GPU: gradients are F32 or BF16, not %s", op, dtype_name(t.dtype));
}

static enum status sum(struct backend *b, void *out, const void *in, int64_t count) {
    struct tensor t = {(void *)in, DTYPE_F32};
    return add_sum<false>(b, out, t, count);
}

static enum status sum_squares(struct backend *b, void *out, struct tensor in, int64_t count) {
    CHECK(check_gradient("sum_squares", in));
    return add_sum<true>(b, out, in, count);
}

/* ---- the step's decision ---- */

/* Whatever is not a number fails every comparison, so a NaN is never applied. */
__global__ void step_control_kernel(float *control, struct step_limits limits) {
    /* judged as they are reported: rounded */
    double loss = (double)(float)((double)control[CONTROL_LOSS_SUM] / limits.tokens);
    double norm = (double)(float)sqrt((double)control[CONTROL_NORM_SQUARED]);
    bool apply = isfinite(loss) && isfinite(norm) && loss <= limits.loss_limit && norm <= limits.norm_limit;
    if (apply) {
        control[CONTROL_OPTIMIZER_STEP] += 1.0f;
    }
    double step = (double)control[CONTROL_OPTIMIZER_STEP];
    control[CONTROL_LOSS] = (float)loss;
    control[CONTROL_NORM] = (float)norm;
    control[CONTROL_SCALE] = limits.clip > 0.0 && norm > limits.clip ? (float)(limits.clip / norm) : 1.0f;
    control[CONTROL_APPLY] = apply ? 1.0f : 0.0f;
    control[CONTROL_CORRECTION1] = (float)(1.0 - pow(limits.beta1, step));
    control[CONTROL_CORRECTION2] = (float)(1.0 - pow(limits.beta2, step));
}

static enum status step_control(struct backend *b, void *control, const struct step_limits *limits) {
    return launch(b, {"step control", 1, 1}, step_control_kernel, (float *)control, *limits);
}

/* ---- AdamW ---- */

enum { ADAMW_THREADS = 256 };

struct adamw_arguments {
    bf16 *parameters;
    float *master; /* NULL: the parameters are their own */
    float *first_moment, *second_moment;
    const float *control;
    int64_t count, decay_count;
    double learning_rate;
    float beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, decayed;
    uint64_t stochastic_seed;
};

/* m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
   p = keep p - step m / (sqrt(v) / sqrt(correction2) + epsilon) */
__device__ inline float adamw_update(const adamw_arguments &a, float scale, float step, float root,
    float keep, float parameter, float gradient, float &m, float &v) {
    gradient *= scale;
    m = a.beta1 * m + a.one_minus_beta1 * gradient;
    v = a.beta2 * v + a.one_minus_beta2 * gradient * gradient;
    return keep * parameter - __fdividef(step * m, sqrtf(v) * root + a.epsilon);
}

/* Up or down with the probabilities that make the expected value exact: 16 random bits are added below the last bit
   that stays. */
__device__ inline bf16 round_stochastically(float value, uint32_t random) {
    uint32_t bits = __float_as_uint(value);
    if (isfinite(value)) {
        bits += random & 0xFFFFu;
    }
    return __ushort_as_bfloat16((unsigned short)(bits >> 16));
}

template <typename Gradient>
__global__ void __launch_bounds__(ADAMW_THREADS) adamw_kernel(adamw_arguments a, const Gradient *gradients) {
    if (a.control[CONTROL_APPLY] == 0.0f) {
        return;
    }
    int64_t at = 4 * ((int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x);
    if (at >= a.count) {
        return;
    }
    int width = (int)min(a.count - at, (int64_t)4);
    float p[4] = {}, g[4] = {}, m[4] = {}, v[4] = {};
    load_up_to4(g, gradients + at, width);
    load_up_to4(m, a.first_moment + at, width);
    load_up_to4(v, a.second_moment + at, width);
    if (a.master != NULL) {
        load_up_to4(p, a.master + at, width);
    } else {
        load_up_to4(p, a.parameters + at, width);
    }
    float scale = a.control[CONTROL_SCALE], root = rsqrtf(a.control[CONTROL_CORRECTION2]);
    float step = (float)a.learning_rate / a.control[CONTROL_CORRECTION1];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float keep = at + i < a.decay_count ? a.decayed : 1.0f;
        p[i] = adamw_update(a, scale, step, root, keep, p[i], g[i], m[i], v[i]);
    }
    store_up_to4(a.first_moment + at, m, width);
    store_up_to4(a.second_moment + at, v, width);
    if (a.master != NULL) {
        store_up_to4(a.master + at, p, width);
    }
    bf16 rounded[4];
    if (a.stochastic_seed != 0) {
        uint64_t stream = RANDOM_STREAM_ROUNDING + ((uint64_t)a.control[CONTROL_OPTIMIZER_STEP] << 32);
        struct random_block random = random_block(a.stochastic_seed, stream, (uint64_t)at / 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rounded[i] = round_stochastically(p[i], random.word[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rounded[i] = __float2bfloat16_rn(p[i]);
        }
    }
    store_up_to4(a.parameters + at, rounded, width);
}

static bool is_aligned(const void *pointer, size_t bytes) {
    return (uintptr_t)pointer % bytes == 0;
}

static enum status adamw(struct backend *b, void *parameters, void *master, void *first_moment,
    void *second_moment, struct tensor gradients, int64_t count, int64_t decay_count,
    const struct adamw_options *options, const void *control, uint64_t stochastic_seed) {
    CHECK(check_gradient("adamw", gradients));
    if (!is_aligned(parameters, 8) || !is_aligned(master, 16) || !is_aligned(first_moment, 16) ||
        !is_aligned(second_moment, 16) || !is_aligned(gradients.data, 4 * dtype_bytes(gradients.dtype))) {
        return fail("adamw on the GPU: every buffer must begin at a multiple of 4 elements");
    }
    if (count == 0) {
        return STATUS_OK;
    }
    struct adamw_arguments a = {(bf16 *)parameters, (float *)master, (float *)first_moment,
        (float *)second_moment, (const float *)control, count, decay_count, options->learning_rate,
        (float)options->beta1, (float)(1.0 - options->beta1), (float)options->beta2,
        (float)(1.0 - options->beta2), (float)options->epsilon,
        (float)(1.0 - options->learning_rate * options->weight_decay), stochastic_seed};
    struct launch_shape shape = {"adamw", (unsigned)ceil_div(count, 4 * ADAMW_THREADS), ADAMW_THREADS};
    return gradients.dtype == DTYPE_F32
               ? launch(b, shape, adamw_kernel<float>, a, (const float *)gradients.data)
               : launch(b, shape, adamw_kernel<bf16>, a, (const bf16 *)gradients.data);
}

void cuda_optimizer_install(struct backend *b) {
    b->sum = sum;
    b->sum_squares = sum_squares;
    b->step_control = step_control;
    b->adamw = adamw;
}
