/* Linear layers and GELU: products by cuBLASLt (matmul.cu), which counts columns first, so a row-major (N,C) here is a
   (C,N) there and no matrix is ever transposed in memory.

   gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016); as (1 + tanh u)/2 is the
   sigmoid of 2u, gelu(x) = x / (1 + exp(-2u)).

   What cuBLASLt's epilogues do and what own kernels do, as measured on an H200 at the shapes of GPT-3 1.3B and 2.7B:
   - bias: epilogue, it costs next to nothing.
   - GELU: own kernel. The epilogue is a little faster, but works on the unrounded sums with a formula of its own, so
     recomputing from the stored, rounded ones would give other bits.
   - gelu' in backward: epilogue, faster than a pass of its own over the widest activation, and as accurate.
   - bias gradient: own kernel (column_sums), which runs at copy speed; the epilogue slows the product down by as much
     or more, and could not add to the gradient of the micro-steps before. */
#include "cuda.cuh"

enum { THREADS = 256 };

/* ---- GELU ---- */

/* sigmoid(2u) */
__device__ inline float gelu_sigmoid(float x) {
    const float linear = -2.0f * 0.7978845608028654f * 1.4426950408889634f; /* -2 sqrt(2/pi) log2(e) */
    float exponent = x * fmaf(linear * 0.044715f, x * x, linear);
    return __fdividef(1.0f, 1.0f + exp2_fast(exponent));
}

/* One thread, eight elements. Bytes moved: 4 an element. */
__global__ void __launch_bounds__(THREADS) gelu_kernel(bf16 *out, const bf16 *in, int64_t count) {
    int64_t at = 8 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (at >= count) {
        return;
    }
    float x[8];
    unpack8(x, load16(in + at));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] *= gelu_sigmoid(x[i]);
    }
    store16(out + at, pack8(x));
}

static enum status gelu_forward(struct backend *b, void *out, const void *in, int64_t count) {
    if (count % 8 != 0) {
        return fail("gelu on the GPU: %lld elements are not a multiple of 8", (long long)count);
    }
    return launch(b, {"gelu", (unsigned)ceil_div(count, 8 * THREADS), THREADS}, gelu_kernel, (bf16 *)out,
        (const bf16 *)in, count);
}

/* ---- the layer ---- */

static enum status check_features(int in_features, int out_features) {
    CHECK(check_channels("linear", in_features));
    return check_channels("linear", out_features);
}

static enum status linear_forward(struct backend *b, void *out, void *pre_gelu, const void *in,
    const void *weight, const void *bias, int64_t rows, int in_features, int out_features,
    enum linear_epilogue epilogue) {
    CHECK(check_features(in_features, out_features));
    bool gelu = epilogue == LINEAR_BIAS_GELU;
    struct matmul p = {};
    p.m = out_features;
    p.n = rows;
    p.k = in_features;
    p.transpose_a = true;
    p.a = weight;
    p.b = in;
    p.d.data = gelu ? pre_gelu : out;
    p.d.dtype = DTYPE_BF16;
    p.epilogue = bias != NULL ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    p.bias = bias;
    CHECK(matmul(b, &p));
    return gelu ? gelu_forward(b, out, pre_gelu, rows * out_features) : STATUS_OK;
}

static enum status linear_backward_input(struct backend *b, void *d_in, const void *d_out, const void *weight,
    const void *pre_gelu, int64_t rows, int in_features, int out_features) {
    CHECK(check_features(in_features, out_features));
    struct matmul p = {};
    p.m = in_features;
    p.n = rows;
    p.k = out_features;
    p.a = weight;
    p.b = d_out;
    p.d.data = d_in;
    p.d.dtype = DTYPE_BF16;
    p.epilogue = pre_gelu != NULL ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DEFAULT;
    p.auxiliary = pre_gelu;
    return matmul(b, &p);
}

/* ---- bias gradient: sums over rows ---- */

enum { WARPS = THREADS / 32, BLOCK_COLUMNS = 32 * 8, ROWS_AHEAD = 8 };

/* partials (gridDim.y, columns). A warp reads 256 columns of one row at once, eight a lane; the warps of a block take
   turns with the rows and meet in shared memory. Bytes moved: 2 an element. */
__global__ void __launch_bounds__(THREADS)
    column_sums_kernel(float *partials, const bf16 *in, int64_t rows, int64_t rows_per_block, int columns) {
    __shared__ float sums[WARPS][BLOCK_COLUMNS];
    launch_next();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first_column = blockIdx.x * BLOCK_COLUMNS, column = first_column + 8 * lane;
    int64_t first = blockIdx.y * rows_per_block, last = min(first + rows_per_block, rows);
    float sum[8] = {};
    if (column < columns) {
        for (int64_t row = first + warp; row < last; row += ROWS_AHEAD * WARPS) {
            uint4 loaded[ROWS_AHEAD];
#pragma unroll
            for (int j = 0; j < ROWS_AHEAD; j++) {
                int64_t r = row + j * WARPS;
                loaded[j] = r < last ? load16(in + r * columns + column) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < ROWS_AHEAD; j++) {
                float x[8];
                unpack8(x, loaded[j]);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum[i] += x[i];
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sums[warp][8 * lane + i] = sum[i];
    }
    __syncthreads();
    column = first_column + threadIdx.x;
    if (column < columns) {
        float total = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            total += sums[w][threadIdx.x];
        }
        partials[(int64_t)blockIdx.y * columns + column] = total;
    }
}

static enum status column_sums(
    struct backend *b, struct tensor out, const void *in, int64_t rows, int columns, bool accumulate) {
    enum { BLOCKS_PER_MULTIPROCESSOR = 8, LEAST_ROWS = ROWS_AHEAD * WARPS };
    int64_t slabs = ceil_div(columns, BLOCK_COLUMNS);
    int64_t wanted = ceil_div((int64_t)BLOCKS_PER_MULTIPROCESSOR * b->state->multiprocessors, slabs);
    int64_t rows_per_block = round_up(ceil_div(rows, wanted), LEAST_ROWS),
            parts = ceil_div(rows, rows_per_block);
    void *partials;
    CHECK(scratch_reserve(b, &partials, (size_t)parts * (size_t)columns * sizeof(float)));
    CHECK(launch(b, {"column sums", dim3((unsigned)slabs, (unsigned)parts), THREADS}, column_sums_kernel,
        (float *)partials, (const bf16 *)in, rows, rows_per_block, columns));
    struct tensor none = {NULL, out.dtype};
    return partials_sum(b, out, none, (const float *)partials, (int)parts, columns, accumulate);
}

static enum status linear_backward_parameters(struct backend *b, struct tensor d_weight, struct tensor d_bias,
    const void *d_out, const void *in, int64_t rows, int in_features, int out_features, bool accumulate) {
    CHECK(check_features(in_features, out_features));
    if (d_weight.data != NULL) {
        struct matmul p = {};
        p.m = in_features;
        p.n = out_features;
        p.k = rows;
        p.transpose_b = true;
        p.a = in;
        p.b = d_out;
        p.d = d_weight;
        p.accumulate = accumulate;
        p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
        CHECK(matmul(b, &p));
    }
    return d_bias.data != NULL ? column_sums(b, d_bias, d_out, rows, out_features, accumulate) : STATUS_OK;
}

void cuda_linear_install(struct backend *b) {
    b->linear_forward = linear_forward;
    b->linear_backward_input = linear_backward_input;
    b->linear_backward_parameters = linear_backward_parameters;
    b->gelu_forward = gelu_forward;
}
