/* LayerNorm, alone and fused with the residual sum that comes before it, and the residual sum alone.

   A row of C channels belongs to a group of warps (blockDim.x threads); a block holds blockDim.y groups. A thread holds
   VECTORS pieces of the row, eight bf16 each, in registers from the first read to the last write, so every byte moves
   once:

       thread t of a group:  channels 8t .. 8t+7,  8(t + threads) .. ,  ...   (VECTORS pieces)

   Blocks stay and walk over the rows. While a row is worked on, the thread's pieces of the next rows are already
   on their way into shared memory (cp.async); every thread reads back only what it fetched itself, so that needs no
   barrier, and memory never waits for the sums over a row.

   Forward moves in (and the addend), the sum and out: 4 bytes an element alone, 8 fused. The statistics are two-pass:
   the mean first, then the mean square of the differences. The fused op normalises the *rounded* sum, and both ops
   are one kernel, so normalising the stored sum again gives the same bits.

   Backward, with x^ = (x - mean) rstd and g = d_out * weight:
       d_in = rstd (g - mean(g) - x^ mean(g x^))     d_weight = sum over rows of d_out x^     d_bias = of d_out
   A thread sums its own channels of d_weight and d_bias in registers on its way over the rows. The groups of a block
   meet in shared memory, the blocks in scratch memory (partials_sum), both in a fixed order. Bytes moved an element: 6,
   or 8 when d_in accumulates. */
#include "cuda.cuh"

static const float EPSILON = 1e-5f;

enum { MAX_WARPS = 16, MAX_VECTORS = 3, MAX_CHANNELS = 8 * 32 * MAX_WARPS * MAX_VECTORS };

/* Rows ahead of the one in work: what fits 99 KB of shared memory with 512 threads and three tensors. */
__host__ __device__ constexpr int stages_for(int vectors) {
    return 4 - vectors;
}

/* ---- how rows are divided ---- */

struct division {
    int vectors; /* a thread */
    dim3 block;  /* threads of a group, groups */
    unsigned blocks;
    size_t shared_bytes;
};

/* As few idle lanes as possible, then as few vectors a thread; blocks of about 256 threads. */
static void divide_row(struct division *out, int channels) {
    int best_lanes = INT32_MAX;
    for (int vectors = 1; vectors <= MAX_VECTORS; vectors++) {
        int warps = (int)ceil_div(channels / 8, 32 * vectors);
        if (warps <= MAX_WARPS && warps * vectors < best_lanes) {
            best_lanes = warps * vectors;
            out->vectors = vectors;
            out->block = dim3(32 * (unsigned)warps, (unsigned)max_i64(1, 8 / warps));
        }
    }
}

/* As many blocks as the device holds at once, no more than there are rows for. */
static enum status divide_rows(
    struct division *d, const void *kernel, int64_t rows, int tensors, const struct backend_state *s) {
    unsigned threads = d->block.x * d->block.y;
    d->shared_bytes = (size_t)(stages_for(d->vectors) * tensors * d->vectors) * threads * sizeof(uint4);
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)d->shared_bytes));
    int resident = 0;
    CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, (int)threads, d->shared_bytes));
    d->blocks = (unsigned)min_i64((int64_t)resident * s->multiprocessors, ceil_div(rows, d->block.y));
    return STATUS_OK;
}

static enum status check_row(const char *op, int channels) {
    CHECK(check_channels(op, channels));
    return channels <= MAX_CHANNELS ? STATUS_OK
                                    : fail("%s on the GPU: %d channels are more than the %d it can do", op,
                                          channels, MAX_CHANNELS);
}

/* Waits for the group's warps only. */
__device__ inline void group_barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
}

/* The thread's pieces of the rows ahead: (STAGES, TENSORS, VECTORS, threads of the block) in shared memory. */
template <int VECTORS, int TENSORS> struct pipeline {
    static constexpr int STAGES = stages_for(VECTORS);
    uint4 *mine; /* stage 0, tensor 0, vector 0 */
    int threads, stage, channels;

    __device__ pipeline(uint4 *shared, int row_channels) {
        threads = blockDim.x * blockDim.y;
        mine = shared + threadIdx.y * blockDim.x + threadIdx.x;
        stage = 0;
        channels = row_channels;
    }
    __device__ int channel(int vector) const {
        return 8 * (threadIdx.x + vector * blockDim.x);
    }
    __device__ uint4 *place(int tensor, int vector) const {
        return mine + ((stage * TENSORS + tensor) * VECTORS + vector) * threads;
    }
    /* Starts the copy of a row into the current stage; a tensor that is NULL is passed over. */
    __device__ void fetch(const bf16 *const (&tensor)[TENSORS], int64_t row, int64_t rows) const {
#pragma unroll
        for (int t = 0; t < TENSORS; t++) {
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                if (tensor[t] != NULL && row < rows && channel(j) < channels) {
                    copy_async16(place(t, j), tensor[t] + row * channels + channel(j));
                }
            }
        }
        copy_async_commit();
    }
    /* A piece of the current stage, once wait has returned. */
    __device__ uint4 piece(int tensor, int vector) const {
        return channel(vector) < channels ? *place(tensor, vector) : make_uint4(0, 0, 0, 0);
    }
    __device__ void wait() const {
        copy_async_wait<STAGES - 1>();
    }
    __device__ void next_stage() {
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
};

/* Sums N values over the group. `shared` (N, MAX_WARPS) must not be written again before the group's next barrier. */
template <int N> __device__ inline void group_sum(float (&value)[N], float (*shared)[MAX_WARPS]) {
    int warps = blockDim.x / 32, own = threadIdx.y * warps;
#pragma unroll
    for (int n = 0; n < N; n++) {
        value[n] = warp_sum(value[n]);
    }
    if (warps == 1) {
        return;
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            shared[n][own + threadIdx.x / 32] = value[n];
        }
    }
    group_barrier();
#pragma unroll
    for (int n = 0; n < N; n++) {
        value[n] = 0.0f;
        for (int w = 0; w < warps; w++) {
            value[n] += shared[n][own + w];
        }
    }
}

/* ---- forward ---- */

struct forward_arguments {
    bf16 *sum, *out; /* sum and addend NULL: no residual */
    float *mean, *rstd;
    const bf16 *in, *addend, *weight, *bias;
    int64_t rows;
    int channels;
    float inverse_channels;
};

template <int VECTORS>
__global__ void __launch_bounds__(32 * MAX_WARPS) layernorm_forward_kernel(forward_arguments a) {
    extern __shared__ uint4 stages[];
    __shared__ float shared[2][1][MAX_WARPS];
    const bf16 *const tensors[2] = {a.in, a.addend};
    pipeline<VECTORS, 2> ahead(stages, a.channels);
    int64_t first = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, step = (int64_t)gridDim.x * blockDim.y;
    for (int i = 0; i < ahead.STAGES; i++) {
        ahead.fetch(tensors, first + i * step, a.rows);
        ahead.next_stage();
    }
    for (int64_t row = first; row < a.rows; row += step) {
        int64_t at = row * a.channels;
        uint4 x[VECTORS];
        float total[1] = {0.0f};
        ahead.wait();
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            float u[8];
            x[j] = ahead.piece(0, j);
            unpack8(u, x[j]);
            if (a.addend != NULL) {
                float v[8];
                unpack8(v, ahead.piece(1, j));
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    u[i] += v[i];
                }
                x[j] = pack8(u);
                unpack8(u, x[j]);
                if (ahead.channel(j) < a.channels) {
                    store16(a.sum + at + ahead.channel(j), x[j]);
                }
            }
            total[0] += ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
        }
        group_sum(total, shared[0]);
        float mean = total[0] * a.inverse_channels, squares[1] = {0.0f};
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            if (ahead.channel(j) < a.channels) {
                float u[8];
                unpack8(u, x[j]);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    squares[0] = fmaf(u[i] - mean, u[i] - mean, squares[0]);
                }
            }
        }
        group_sum(squares, shared[1]);
        float rstd = rsqrtf(fmaf(squares[0], a.inverse_channels, EPSILON));
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = ahead.channel(j);
            if (c < a.channels) {
                float u[8], w[8], bias[8];
                unpack8(u, x[j]);
                unpack8(w, load16(a.weight + c));
                unpack8(bias, load16(a.bias + c));
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    u[i] = fmaf((u[i] - mean) * rstd, w[i], bias[i]);
                }
                store16(a.out + at + c, pack8(u));
            }
        }
        if (threadIdx.x == 0) {
            a.mean[row] = mean;
            a.rstd[row] = rstd;
        }
        ahead.fetch(tensors, row + ahead.STAGES * step, a.rows);
        ahead.next_stage();
    }
}

typedef void (*forward_kernel)(forward_arguments);

static enum status launch_forward(struct backend *b, const char *op, const struct forward_arguments *a) {
    static const forward_kernel kernels[MAX_VECTORS] = {
        layernorm_forward_kernel<1>, layernorm_forward_kernel<2>, layernorm_forward_kernel<3>};
    CHECK(check_row(op, a->channels));
    struct division d = {};
    divide_row(&d, a->channels);
    forward_kernel kernel = kernels[d.vectors - 1];
    CHECK(divide_rows(&d, (const void *)kernel, a->rows, 2, b->state));
    kernel<<<d.blocks, d.block, d.shared_bytes, b->state->stream>>>(*a);
    return launched(op);
}

static enum status layernorm_forward(struct backend *b, void *out, void *mean, void *rstd, const void *in,
    const void *weight, const void *bias, int64_t rows, int channels) {
    struct forward_arguments a = {NULL, (bf16 *)out, (float *)mean, (float *)rstd, (const bf16 *)in, NULL,
        (const bf16 *)weight, (const bf16 *)bias, rows, channels, 1.0f / (float)channels};
    return launch_forward(b, "layernorm", &a);
}

static enum status residual_layernorm_forward(struct backend *b, void *sum, void *out, void *mean, void *rstd,
    const void *a, const void *addend, const void *weight, const void *bias, int64_t rows, int channels) {
    struct forward_arguments arguments = {(bf16 *)sum, (bf16 *)out, (float *)mean, (float *)rstd,
        (const bf16 *)a, (const bf16 *)addend, (const bf16 *)weight, (const bf16 *)bias, rows, channels,
        1.0f / (float)channels};
    return launch_forward(b, "residual + layernorm", &arguments);
}

/* ---- the residual sum alone ---- */

__global__ void residual_forward_kernel(bf16 *out, const bf16 *a, const bf16 *addend, int64_t count) {
    int64_t at = 8 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= count) {
        return;
    }
    float u[8], v[8];
    unpack8(u, load16(a + at));
    unpack8(v, load16(addend + at));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u[i] += v[i];
    }
    store16(out + at, pack8(u));
}

static enum status residual_forward(
    struct backend *b, void *out, const void *a, const void *addend, int64_t count) {
    if (count % 8 != 0) {
        return fail("residual on the GPU: %lld elements are not a multiple of 8", (long long)count);
    }
    residual_forward_kernel<<<(unsigned)ceil_div(count, 8 * 256), 256, 0, b->state->stream>>>(
        (bf16 *)out, (const bf16 *)a, (const bf16 *)addend, count);
    return launched("residual");
}

/* ---- backward ---- */

struct backward_arguments {
    bf16 *d_in;
    float *partials; /* (blocks, 2, C): of d_weight and d_bias */
    const bf16 *d_out, *in, *weight;
    const float *mean, *rstd;
    int64_t rows;
    int channels;
    float inverse_channels;
    bool accumulate;
};

template <int VECTORS>
__global__ void __launch_bounds__(32 * MAX_WARPS) layernorm_backward_kernel(backward_arguments a) {
    extern __shared__ uint4 stages[];
    __shared__ float shared[2][2][MAX_WARPS];
    const bf16 *const tensors[3] = {a.in, a.d_out, a.accumulate ? a.d_in : NULL};
    pipeline<VECTORS, 3> ahead(stages, a.channels);
    int64_t first = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, step = (int64_t)gridDim.x * blockDim.y;
    for (int i = 0; i < ahead.STAGES; i++) {
        ahead.fetch(tensors, first + i * step, a.rows);
        ahead.next_stage();
    }
    float d_weight[VECTORS][8] = {}, d_bias[VECTORS][8] = {};
    int parity = 0; /* two sets of shared sums take turns, so one barrier a row is enough */
    for (int64_t row = first; row < a.rows; row += step, parity ^= 1) {
        float mean = a.mean[row], rstd = a.rstd[row];
        float sums[2] = {0.0f, 0.0f}; /* of g and of g x^ */
        uint4 x[VECTORS], d_out[VECTORS];
        ahead.wait();
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = ahead.channel(j);
            float u[8], g[8], w[8];
            x[j] = ahead.piece(0, j);
            d_out[j] = ahead.piece(1, j);
            unpack8(u, x[j]);
            unpack8(g, d_out[j]);
            unpack8(w, c < a.channels ? load16(a.weight + c) : make_uint4(0, 0, 0, 0));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float normed = (u[i] - mean) * rstd, weighted = g[i] * w[i];
                d_weight[j][i] = fmaf(g[i], normed, d_weight[j][i]);
                d_bias[j][i] += g[i];
                sums[0] += weighted;
                sums[1] = fmaf(weighted, normed, sums[1]);
            }
        }
        group_sum(sums, shared[parity]);
        float mean_g = sums[0] * a.inverse_channels, mean_normed = sums[1] * a.inverse_channels;
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = ahead.channel(j);
            if (c < a.channels) {
                float u[8], g[8], w[8], d[8];
                unpack8(u, x[j]);
                unpack8(g, d_out[j]);
                unpack8(w, load16(a.weight + c));
                unpack8(d, a.accumulate ? ahead.piece(2, j) : make_uint4(0, 0, 0, 0));
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float normed = (u[i] - mean) * rstd;
                    d[i] = fmaf(rstd, fmaf(g[i], w[i], -mean_g) - normed * mean_normed, d[i]);
                }
                store16(a.d_in + row * a.channels + c, pack8(d));
            }
        }
        ahead.fetch(tensors, row + ahead.STAGES * step, a.rows);
        ahead.next_stage();
    }

    /* the groups add up in turn, where the stages were, and the block writes its row of partials */
    struct tensor block_sums = {stages, DTYPE_F32};
    for (int group = 0; group < blockDim.y; group++) {
        __syncthreads();
        for (int j = 0; threadIdx.y == group && j < VECTORS; j++) {
            if (ahead.channel(j) < a.channels) {
                gradient_store8(block_sums, ahead.channel(j), d_weight[j], group > 0);
                gradient_store8(block_sums, a.channels + ahead.channel(j), d_bias[j], group > 0);
            }
        }
    }
    __syncthreads();
    int threads = blockDim.x * blockDim.y;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < 2 * a.channels; i += threads) {
        a.partials[(int64_t)blockIdx.x * 2 * a.channels + i] = static_cast<float *>(block_sums.data)[i];
    }
}

typedef void (*backward_kernel)(backward_arguments);

static enum status layernorm_backward(struct backend *b, void *d_in, struct tensor d_weight,
    struct tensor d_bias, const void *d_out, const void *in, const void *weight, const void *mean,
    const void *rstd, int64_t rows, int channels, bool accumulate_input, bool accumulate_parameters) {
    static const backward_kernel kernels[MAX_VECTORS] = {
        layernorm_backward_kernel<1>, layernorm_backward_kernel<2>, layernorm_backward_kernel<3>};
    CHECK(check_row("layernorm backward", channels));
    struct division d = {};
    divide_row(&d, channels);
    backward_kernel kernel = kernels[d.vectors - 1];
    CHECK(divide_rows(&d, (const void *)kernel, rows, 3, b->state));
    void *partials;
    CHECK(scratch_reserve(b, &partials, (size_t)d.blocks * 2 * (size_t)channels * sizeof(float)));
    struct backward_arguments a = {(bf16 *)d_in, (float *)partials, (const bf16 *)d_out, (const bf16 *)in,
        (const bf16 *)weight, (const float *)mean, (const float *)rstd, rows, channels,
        1.0f / (float)channels, accumulate_input};
    kernel<<<d.blocks, d.block, d.shared_bytes, b->state->stream>>>(a);
    CHECK(launched("layernorm backward"));
    return partials_sum(b, d_weight, d_bias, a.partials, (int)d.blocks, channels, accumulate_parameters);
}

void cuda_layernorm_install(struct backend *b) {
    b->layernorm_forward = layernorm_forward;
    b->residual_layernorm_forward = residual_layernorm_forward;
    b->residual_forward = residual_forward;
    b->layernorm_backward = layernorm_backward;
}
