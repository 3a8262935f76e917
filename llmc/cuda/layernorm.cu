/* LayerNorm, alone and fused with the residual sum that comes before it, and the residual sum alone.

   A row of C channels belongs to a group of warps (blockDim.x threads); a block holds blockDim.y groups. A thread has
   VECTORS pieces of the row, eight bf16 each, in registers from the first read to the last write, so every byte moves
   once:

       thread t of a group:  channels 8t .. 8t+7,  8(t + threads) .. ,  ...   (VECTORS pieces)

   What a row costs beside its bytes (sums over lanes, barriers) is paid by each warp, so few warps with many pieces are
   fastest: in forward a row of up to 2048 channels has one warp, and needs no barrier. Where a group has several
   warps, they meet at a barrier of their own: no group waits for another.

   Forward moves in (and the addend), the sum and out: 4 bytes an element alone, 8 fused. The statistics are two-pass:
   the mean first, then the mean square of the differences. The fused op normalises the *rounded* sum, and both ops
   are one kernel, so normalising the stored sum again gives the same bits.

   Backward, with x^ = (x - mean) rstd and g = d_out * weight:
       d_in = rstd (g - mean(g) - x^ mean(g x^))     d_weight = sum over rows of d_out x^     d_bias = of d_out
   One block a multiprocessor, with as many groups as its registers allow, walks over the rows. A thread sums its
   channels of d_weight and d_bias in registers on the way, which leaves no room for the row itself: that waits in shared
   memory. The next row is already on its way there (cp.async; a thread reads back only what it fetched itself, so that
   needs no barrier). In the end the groups of a block meet in shared memory and the blocks in scratch memory
   (partials_sum), in a fixed order. Bytes moved an element: 6, or 8 when d_in accumulates. */
#include "cuda.cuh"

static const float EPSILON = 1e-5f;

enum {
    MAX_WARPS = 32, /* of a block */
    FORWARD_WARPS = 4,
    FORWARD_ROW_WARPS = 8,
    FORWARD_VECTORS = 8,
    GROUP_BARRIERS = 15, /* that a block has beside __syncthreads */
    BACKWARD_VECTORS = 4,
    MAX_CHANNELS = 8 * 32 * FORWARD_ROW_WARPS * FORWARD_VECTORS
};

/* The most threads of a backward block with so many pieces a thread, so that their registers are what a multiprocessor
   has. */
constexpr int backward_threads(int vectors) {
    return vectors == 1 ? 1024 : 512;
}
static_assert(8 * BACKWARD_VECTORS * backward_threads(BACKWARD_VECTORS) >= MAX_CHANNELS,
    "backward has no threads for the widest row");

static enum status check_row(const char *op, int channels) {
    CHECK(check_channels(op, channels));
    return channels <= MAX_CHANNELS ? STATUS_OK
                                    : fail("%s on the GPU: %d channels are more than the %d it can do", op,
                                          channels, MAX_CHANNELS);
}

struct division {
    int vectors; /* a thread */
    dim3 block;  /* threads of a group, groups */
};

/* The first channel of the thread's piece j. */
__device__ inline int piece_channel(int j) {
    return 8 * (threadIdx.x + j * blockDim.x);
}

/* Waits for the threads of the same group, at barrier 1 or above: barrier 0 is the whole block's. */
__device__ inline void group_barrier() {
    barrier(threadIdx.y + 1, blockDim.x);
}

/* Sums N values over each group. Its threads call it together; `shared` (MAX_WARPS, N) must not be written again
   before the group's next barrier. */
template <int N> __device__ inline void group_sum(float (&value)[N], float (*shared)[N]) {
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
            shared[own + threadIdx.x / 32][n] = value[n];
        }
    }
    group_barrier();
#pragma unroll
    for (int n = 0; n < N; n++) {
        value[n] = 0.0f;
    }
    for (int w = 0; w < warps; w++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            value[n] += shared[own + w][n];
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
__device__ inline void load_row(uint4 (&out)[VECTORS], const bf16 *row, int channels, bool present) {
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        int c = piece_channel(j);
        out[j] = present && c < channels ? load16(row + c) : make_uint4(0, 0, 0, 0);
    }
}

/* x = the rounded sum of both, stored as well */
template <int VECTORS>
__device__ inline void add_rows(
    bf16 *sum, uint4 (&x)[VECTORS], const uint4 (&addend)[VECTORS], int channels, bool present) {
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        float u[8], v[8];
        unpack8(u, x[j]);
        unpack8(v, addend[j]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u[i] += v[i];
        }
        x[j] = pack8(u);
        if (present && piece_channel(j) < channels) {
            store16(sum + piece_channel(j), x[j]);
        }
    }
}

template <int VECTORS>
__global__ void __launch_bounds__(32 * FORWARD_ROW_WARPS) layernorm_forward_kernel(forward_arguments a) {
    __shared__ float shared[2][MAX_WARPS][1];
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, at = row * a.channels;
    bool present = row < a.rows;
    uint4 x[VECTORS];
    load_row(x, a.in + at, a.channels, present);
    if (a.addend != NULL) {
        uint4 addend[VECTORS];
        load_row(addend, a.addend + at, a.channels, present);
        add_rows(a.sum + at, x, addend, a.channels, present);
    }

    float total[1] = {0.0f}, squares[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        float u[8];
        unpack8(u, x[j]);
        total[0] += ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
    }
    group_sum(total, shared[0]);
    float mean = total[0] * a.inverse_channels;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        if (piece_channel(j) < a.channels) {
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
        int c = piece_channel(j);
        if (present && c < a.channels) {
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
    if (present && threadIdx.x == 0) {
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

typedef void (*forward_kernel)(forward_arguments);

/* As few warps a row as there can be. */
static struct division divide_forward(int channels) {
    int64_t pieces = channels / 8, warps = ceil_div(pieces, 32 * FORWARD_VECTORS);
    struct division d = {(int)ceil_div(pieces, 32 * warps),
        dim3((unsigned)(32 * warps), (unsigned)max_i64(1, FORWARD_WARPS / warps))};
    return d;
}

static enum status launch_forward(struct backend *b, const char *op, const struct forward_arguments *a) {
    static const forward_kernel kernels[FORWARD_VECTORS] = {layernorm_forward_kernel<1>,
        layernorm_forward_kernel<2>, layernorm_forward_kernel<3>, layernorm_forward_kernel<4>,
        layernorm_forward_kernel<5>, layernorm_forward_kernel<6>, layernorm_forward_kernel<7>,
        layernorm_forward_kernel<8>};
    CHECK(check_row(op, a->channels));
    struct division d = divide_forward(a->channels);
    unsigned blocks = (unsigned)ceil_div(a->rows, d.block.y);
    return launch(b, {op, blocks, d.block}, kernels[d.vectors - 1], *a);
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
    return launch(b, {"residual", (unsigned)ceil_div(count, 8 * 256), 256}, residual_forward_kernel,
        (bf16 *)out, (const bf16 *)a, (const bf16 *)addend, count);
}

/* ---- backward ---- */

struct backward_arguments {
    bf16 *d_in;
    float *partials; /* (blocks, 2, C): of d_weight and d_bias */
    const bf16 *d_out, *in, *weight;
    const float *mean, *rstd;
    int64_t rows;
    int channels, stages; /* rows in shared memory for each group: 1 or 2 */
    float inverse_channels;
    bool accumulate;
};

enum backward_tensor { IN, D_OUT, D_IN, BACKWARD_TENSORS };

/* The thread's pieces of this row and the next: (stages, BACKWARD_TENSORS, VECTORS, threads of the block). */
template <int VECTORS> struct row_stages {
    uint4 *now, *next; /* the thread's first piece of the current stage, and of the other if there is one */
    int threads;

    __device__ row_stages(const backward_arguments &a, uint4 *shared) {
        threads = blockDim.x * blockDim.y;
        now = shared + threadIdx.y * blockDim.x + threadIdx.x;
        next = a.stages == 2 ? now + BACKWARD_TENSORS * VECTORS * threads : now;
    }
    __device__ uint4 *piece(int tensor, int j) const {
        return now + (tensor * VECTORS + j) * threads;
    }
    /* Starts the copies of a row, which begins `at` this element, into the current stage and goes on to the next stage.
       Where there is no such row or channel, zeros. */
    __device__ void fetch(const backward_arguments &a, int64_t row, int64_t at) {
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = piece_channel(j);
            if (row < a.rows && c < a.channels) {
                copy_async16(piece(IN, j), a.in + at + c);
                copy_async16(piece(D_OUT, j), a.d_out + at + c);
                if (a.accumulate) {
                    copy_async16(piece(D_IN, j), a.d_in + at + c);
                }
            } else {
                *piece(IN, j) = *piece(D_OUT, j) = make_uint4(0, 0, 0, 0);
            }
        }
        copy_commit();
        uint4 *other = next;
        next = now;
        now = other;
    }
    /* Waits for the copies into the current stage. */
    __device__ void wait(const backward_arguments &a) const {
        if (a.stages == 2) {
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
    }
};

/* Zeros where there is no such row. */
struct row_statistics {
    float mean, rstd;

    __device__ row_statistics(const backward_arguments &a, int64_t row) {
        mean = row < a.rows ? a.mean[row] : 0.0f;
        rstd = row < a.rows ? a.rstd[row] : 0.0f;
    }
};

template <int VECTORS>
__global__ void __launch_bounds__(backward_threads(VECTORS), 1)
    layernorm_backward_kernel(backward_arguments a) {
    __shared__ float shared[2][MAX_WARPS][2];
    row_stages<VECTORS> rows(a, dynamic_shared);
    launch_next();
    int64_t step = (int64_t)gridDim.x * blockDim.y, step_elements = step * a.channels;
    int64_t first = (int64_t)blockIdx.x * blockDim.y, at = (first + threadIdx.y) * a.channels;
    for (int i = 0; i < a.stages; i++) {
        rows.fetch(a, first + i * step + threadIdx.y, at + i * step_elements);
    }
    uint4 weight[VECTORS];
    load_row(weight, a.weight, a.channels, true);
    float d_weight[VECTORS][8] = {}, d_bias[VECTORS][8] = {};
    int parity = 0; /* two sets of shared sums take turns, so one barrier a row is enough */
    row_statistics next(a, first + threadIdx.y);
    for (; first < a.rows; first += step, at += step_elements, parity ^= 1) {
        int64_t row = first + threadIdx.y;
        bool present = row < a.rows;
        float rstd = next.rstd, offset = -next.mean * rstd; /* x^ = x rstd + offset */
        next = row_statistics(a, row + step);
        float sums[2] = {0.0f, 0.0f}; /* of g and of g x^ */
        rows.wait(a);
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            float x[8], d_out[8], w[8];
            unpack8(x, *rows.piece(IN, j));
            unpack8(d_out, *rows.piece(D_OUT, j));
            unpack8(w, weight[j]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float normed = fmaf(x[i], rstd, offset), g = d_out[i] * w[i];
                d_weight[j][i] = fmaf(d_out[i], normed, d_weight[j][i]);
                d_bias[j][i] += d_out[i];
                sums[0] += g;
                sums[1] = fmaf(g, normed, sums[1]);
            }
        }
        group_sum(sums, shared[parity]);
        float mean_g = sums[0] * a.inverse_channels, mean_normed = sums[1] * a.inverse_channels;
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            int c = piece_channel(j);
            if (present && c < a.channels) {
                float x[8], d_out[8], w[8], d[8];
                unpack8(x, *rows.piece(IN, j));
                unpack8(d_out, *rows.piece(D_OUT, j));
                unpack8(w, weight[j]);
                unpack8(d, a.accumulate ? *rows.piece(D_IN, j) : make_uint4(0, 0, 0, 0));
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float normed = fmaf(x[i], rstd, offset);
                    d[i] = fmaf(rstd, fmaf(-mean_normed, normed, fmaf(d_out[i], w[i], -mean_g)), d[i]);
                }
                store16(a.d_in + at + c, pack8(d));
            }
        }
        rows.fetch(a, row + a.stages * step, at + a.stages * step_elements);
    }

    /* the groups' sums side by side where the rows were, then the block's row of partials */
    float *partials = a.partials + (int64_t)blockIdx.x * 2 * a.channels;
    float *groups = reinterpret_cast<float *>(dynamic_shared);
    struct tensor own = {blockDim.y == 1 ? partials : groups + threadIdx.y * 2 * a.channels, DTYPE_F32};
    __syncthreads();
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        int c = piece_channel(j);
        if (c < a.channels) {
            gradient_store8(own, c, d_weight[j], false);
            gradient_store8(own, a.channels + c, d_bias[j], false);
        }
    }
    if (blockDim.y > 1) {
        __syncthreads();
        int threads = blockDim.x * blockDim.y;
        for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < 2 * a.channels; i += threads) {
            float sum = 0.0f;
            for (int group = 0; group < blockDim.y; group++) {
                sum += groups[group * 2 * a.channels + i];
            }
            partials[i] = sum;
        }
    }
}

typedef void (*backward_kernel)(backward_arguments);

/* The bytes that a group needs of shared memory for one row, and for its sums in the end. */
static int64_t stage_bytes(int vectors, int64_t warps) {
    return BACKWARD_TENSORS * vectors * 32 * warps * (int64_t)sizeof(uint4);
}
static int64_t sums_bytes(int channels) {
    return 2 * (int64_t)channels * (int64_t)sizeof(float);
}

/* The warps and pieces that leave the fewest lanes without work; of those two pieces rather than more, whose registers
   leave room for fewer warps, and one only where it is the whole row: what a row costs beside its bytes is paid by each
   thread. Then as many groups as registers and shared memory allow. */
static struct division divide_backward(int channels, int64_t shared_bytes) {
    struct division best = {0, dim3(0)};
    int64_t pieces = channels / 8, fewest = INT64_MAX;
    for (int vectors = pieces <= 32 ? 1 : 2; vectors <= BACKWARD_VECTORS; vectors++) {
        int64_t warps = ceil_div(pieces, 32 * vectors);
        if (32 * warps <= backward_threads(vectors) && warps * vectors < fewest) {
            int64_t groups = backward_threads(vectors) / (32 * warps);
            int64_t bytes = max_i64(2 * stage_bytes(vectors, warps), sums_bytes(channels));
            groups = max_i64(1, min_i64(groups, shared_bytes / bytes));
            groups = warps > 1 ? min_i64(groups, GROUP_BARRIERS) : groups;
            fewest = warps * vectors;
            best.vectors = vectors;
            best.block = dim3((unsigned)(32 * warps), (unsigned)groups);
        }
    }
    return best;
}

static enum status layernorm_backward(struct backend *b, void *d_in, struct tensor d_weight,
    struct tensor d_bias, const void *d_out, const void *in, const void *weight, const void *mean,
    const void *rstd, int64_t rows, int channels, bool accumulate_input, bool accumulate_parameters) {
    static const backward_kernel kernels[BACKWARD_VECTORS] = {layernorm_backward_kernel<1>,
        layernorm_backward_kernel<2>, layernorm_backward_kernel<3>, layernorm_backward_kernel<4>};
    CHECK(check_row("layernorm backward", channels));
    int64_t shared_limit = b->state->shared_bytes - 1024; /* the rest is for what is not dynamic */
    struct division d = divide_backward(channels, shared_limit);
    int64_t groups = d.block.y, stage = groups * stage_bytes(d.vectors, d.block.x / 32);
    int stages = 2 * stage <= shared_limit ? 2 : 1;
    int64_t shared_bytes = max_i64(stages * stage, groups > 1 ? groups * sums_bytes(channels) : 0);
    unsigned blocks = (unsigned)min_i64(b->state->multiprocessors, ceil_div(rows, groups));
    void *partials;
    CHECK(scratch_reserve(b, &partials, (size_t)(blocks * sums_bytes(channels))));
    struct backward_arguments a = {(bf16 *)d_in, (float *)partials, (const bf16 *)d_out, (const bf16 *)in,
        (const bf16 *)weight, (const float *)mean, (const float *)rstd, rows, channels, stages,
        1.0f / (float)channels, accumulate_input};
    CHECK(launch(b, {"layernorm backward", blocks, d.block, shared_bytes}, kernels[d.vectors - 1], a));
    return partials_sum(b, d_weight, d_bias, a.partials, (int)blocks, channels, accumulate_parameters);
}

void cuda_layernorm_install(struct backend *b) {
    b->layernorm_forward = layernorm_forward;
    b->residual_layernorm_forward = residual_layernorm_forward;
    b->residual_forward = residual_forward;
    b->layernorm_backward = layernorm_backward;
}
