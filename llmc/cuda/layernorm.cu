/* LayerNorm, alone and fused with the residual sum that comes before it, and the residual sum alone.

   A row of C channels belongs to a group of `warps` warps (blockDim.x threads); a block holds blockDim.y groups. A
   thread keeps its part of the row in registers, as VECTORS loads of eight bf16, from the first read to the last
   write: every byte moves once.

       thread t of a group:  channels 8t .. 8t+7,  8(t + threads) .. ,  ...   (VECTORS pieces)

   Forward moves in (and the addend), the sum and out: 4 bytes an element alone, 8 fused. The statistics are two-pass:
   the mean first, then the mean square of the differences. The fused op normalises the *rounded* sum, and both ops
   are one kernel, so normalising the stored sum again gives the same bits.

   Backward, with x^ = (x - mean) rstd and g = d_out * weight:
       d_in = rstd (g - mean(g) - x^ mean(g x^))     d_weight = sum over rows of d_out x^     d_bias = of d_out
   Blocks stay and walk over the rows; a thread sums its own channels of d_weight and d_bias in registers on the way.
   The groups of a block meet in shared memory, the blocks in scratch memory (partials_sum), both in a fixed order.
   Bytes moved an element: 6, or 8 when d_in accumulates. */
#include "cuda.cuh"

static const float EPSILON = 1e-5f;

enum { MAX_WARPS = 16, MAX_CHANNELS = 8 * 32 * MAX_WARPS * 3 };

/* ---- how a row is divided ---- */

struct row_division {
    int vectors, warps;
};

/* The division with fewest idle lanes; among equals the one with most vectors a thread, at most max_vectors. */
static struct row_division divide_row(int channels, int max_vectors) {
    struct row_division best = {0, 0};
    for (int vectors = 1; vectors <= max_vectors; vectors++) {
        int warps = (int)ceil_div(channels / 8, 32 * vectors);
        if (warps <= MAX_WARPS && (best.vectors == 0 || warps * vectors <= best.warps * best.vectors)) {
            best.vectors = vectors;
            best.warps = warps;
        }
    }
    return best;
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
};

template <int VECTORS>
__global__ void __launch_bounds__(32 * MAX_WARPS) layernorm_forward_kernel(forward_arguments a) {
    __shared__ float shared[2][1][MAX_WARPS];
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= a.rows) {
        return; /* the whole group */
    }
    int64_t at = row * a.channels;
    uint4 x[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        int c = 8 * (threadIdx.x + j * blockDim.x);
        x[j] = c < a.channels ? load16(a.in + at + c) : make_uint4(0, 0, 0, 0);
    }
    if (a.addend != NULL) {
        uint4 y[VECTORS];
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = 8 * (threadIdx.x + j * blockDim.x);
            y[j] = c < a.channels ? load16(a.addend + at + c) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = 8 * (threadIdx.x + j * blockDim.x);
            float u[8], v[8];
            unpack8(u, x[j]);
            unpack8(v, y[j]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                u[i] += v[i];
            }
            x[j] = pack8(u);
            if (c < a.channels) {
                store16(a.sum + at + c, x[j]);
            }
        }
    }

    float total[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        float u[8];
        unpack8(u, x[j]);
        total[0] += ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
    }
    group_sum(total, shared[0]);
    float mean = total[0] / (float)a.channels, squares[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        int c = 8 * (threadIdx.x + j * blockDim.x);
        float u[8];
        unpack8(u, x[j]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float difference = c < a.channels ? u[i] - mean : 0.0f;
            squares[0] = fmaf(difference, difference, squares[0]);
        }
    }
    group_sum(squares, shared[1]);
    float rstd = rsqrtf(squares[0] / (float)a.channels + EPSILON);
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        int c = 8 * (threadIdx.x + j * blockDim.x);
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
}

typedef void (*forward_kernel)(forward_arguments);

static enum status launch_forward(struct backend *b, const char *op, const struct forward_arguments *a) {
    CHECK(check_row(op, a->channels));
    static const forward_kernel kernels[] = {layernorm_forward_kernel<1>, layernorm_forward_kernel<2>,
        layernorm_forward_kernel<3>, layernorm_forward_kernel<4>};
    struct row_division division = divide_row(a->channels, 4);
    unsigned groups = (unsigned)max_i64(1, 4 / division.warps);
    dim3 block(32 * (unsigned)division.warps, groups);
    unsigned blocks = (unsigned)ceil_div(a->rows, groups);
    kernels[division.vectors - 1]<<<blocks, block, 0, b->state->stream>>>(*a);
    return launched(op);
}

static enum status layernorm_forward(struct backend *b, void *out, void *mean, void *rstd, const void *in,
    const void *weight, const void *bias, int64_t rows, int channels) {
    struct forward_arguments a = {NULL, (bf16 *)out, (float *)mean, (float *)rstd, (const bf16 *)in, NULL,
        (const bf16 *)weight, (const bf16 *)bias, rows, channels};
    return launch_forward(b, "layernorm", &a);
}

static enum status residual_layernorm_forward(struct backend *b, void *sum, void *out, void *mean, void *rstd,
    const void *a, const void *addend, const void *weight, const void *bias, int64_t rows, int channels) {
    struct forward_arguments arguments = {(bf16 *)sum, (bf16 *)out, (float *)mean, (float *)rstd,
        (const bf16 *)a, (const bf16 *)addend, (const bf16 *)weight, (const bf16 *)bias, rows, channels};
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
    bool accumulate;
};

template <int VECTORS>
__global__ void __launch_bounds__(32 * MAX_WARPS) layernorm_backward_kernel(backward_arguments a) {
    __shared__ float shared[2][2][MAX_WARPS];
    extern __shared__ float block_sums[]; /* (2, C) when there are several groups */
    float d_weight[VECTORS][8] = {}, d_bias[VECTORS][8] = {};
    int64_t first = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, step = (int64_t)gridDim.x * blockDim.y;
    int parity = 0; /* two sets of shared sums take turns, so one barrier a row is enough */
    for (int64_t row = first; row < a.rows; row += step, parity ^= 1) {
        int64_t at = row * a.channels;
        uint4 x[VECTORS], d_out[VECTORS], d_in[VECTORS];
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = 8 * (threadIdx.x + j * blockDim.x);
            bool inside = c < a.channels;
            x[j] = inside ? load16(a.in + at + c) : make_uint4(0, 0, 0, 0);
            d_out[j] = inside ? load16(a.d_out + at + c) : make_uint4(0, 0, 0, 0);
            d_in[j] = inside && a.accumulate ? load16(a.d_in + at + c) : make_uint4(0, 0, 0, 0);
        }
        float mean = a.mean[row], rstd = a.rstd[row];
        float sums[2] = {0.0f, 0.0f}; /* of g and of g x^ */
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = 8 * (threadIdx.x + j * blockDim.x);
            float u[8], g[8], w[8];
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
        float mean_g = sums[0] / (float)a.channels, mean_normed = sums[1] / (float)a.channels;
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = 8 * (threadIdx.x + j * blockDim.x);
            if (c < a.channels) {
                float u[8], g[8], w[8], d[8];
                unpack8(u, x[j]);
                unpack8(g, d_out[j]);
                unpack8(w, load16(a.weight + c));
                unpack8(d, d_in[j]);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float normed = (u[i] - mean) * rstd;
                    d[i] = fmaf(rstd, fmaf(g[i], w[i], -mean_g) - normed * mean_normed, d[i]);
                }
                store16(a.d_in + at + c, pack8(d));
            }
        }
    }

    /* the groups add up in turn, then the block writes its row of partials */
    float *sums = blockDim.y == 1 ? a.partials + (int64_t)blockIdx.x * 2 * a.channels : block_sums;
    for (int group = 0; group < blockDim.y; group++) {
        if (threadIdx.y == group) {
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                int c = 8 * (threadIdx.x + j * blockDim.x);
                if (c < a.channels) {
                    gradient_store8({sums, DTYPE_F32}, c, d_weight[j], group > 0);
                    gradient_store8({sums, DTYPE_F32}, a.channels + c, d_bias[j], group > 0);
                }
            }
        }
        __syncthreads();
    }
    if (blockDim.y > 1) {
        for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < 2 * a.channels;
             i += blockDim.x * blockDim.y) {
            a.partials[(int64_t)blockIdx.x * 2 * a.channels + i] = block_sums[i];
        }
    }
}

typedef void (*backward_kernel)(backward_arguments);

static enum status layernorm_backward(struct backend *b, void *d_in, struct tensor d_weight,
    struct tensor d_bias, const void *d_out, const void *in, const void *weight, const void *mean,
    const void *rstd, int64_t rows, int channels, bool accumulate_input, bool accumulate_parameters) {
    CHECK(check_row("layernorm backward", channels));
    static const backward_kernel kernels[] = {
        layernorm_backward_kernel<1>, layernorm_backward_kernel<2>, layernorm_backward_kernel<3>};
    struct row_division division = divide_row(channels, 3);
    backward_kernel kernel = kernels[division.vectors - 1];
    unsigned groups = (unsigned)max_i64(1, 8 / division.warps);
    dim3 block(32 * (unsigned)division.warps, groups);
    size_t shared_bytes = groups > 1 ? 2 * (size_t)channels * sizeof(float) : 0;
    int resident = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &resident, kernel, (int)(block.x * block.y), shared_bytes));
    unsigned blocks =
        (unsigned)min_i64((int64_t)resident * b->state->multiprocessors, ceil_div(rows, groups));
    void *partials;
    CHECK(scratch_reserve(b, &partials, (size_t)blocks * 2 * (size_t)channels * sizeof(float)));
    struct backward_arguments a = {(bf16 *)d_in, (float *)partials, (const bf16 *)d_out, (const bf16 *)in,
        (const bf16 *)weight, (const float *)mean, (const float *)rstd, rows, channels, accumulate_input};
    kernel<<<blocks, block, shared_bytes, b->state->stream>>>(a);
    CHECK(launched("layernorm_backward"));
    CHECK(partials_sum(b, d_weight, a.partials, (int)blocks, 2 * channels, channels, accumulate_parameters));
    return partials_sum(
        b, d_bias, a.partials + channels, (int)blocks, 2 * channels, channels, accumulate_parameters);
}

void cuda_layernorm_install(struct backend *b) {
    b->layernorm_forward = layernorm_forward;
    b->residual_layernorm_forward = residual_layernorm_forward;
    b->residual_forward = residual_forward;
    b->layernorm_backward = layernorm_backward;
}
