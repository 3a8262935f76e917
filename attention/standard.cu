/* Standard attention: S and P live in memory, cuBLAS does the products, and one kernel each way does the softmax. The
   honest baseline of every comparison: 16-bit S and P, one read and one write of each per softmax, the masked half
   neither read nor computed.

   forward    S = scale Q K^T -> saved;  P = softmax(S) in place;  O = P V
   backward   dP = dO V^T -> workspace;  dS = scale P o (dP - rowsum(P o dP)) in place;
              dQ = dS K, dK = dS^T Q, dV = P^T dO

   Bytes an element of S, two each: forward S written, read, P written, read; backward P read 2, dP written, read, dS
   written, read 2. Q, K, V and the gradients stay in their strided (packed) places: a product is batched over the
   key/value heads by stride, one call for every sequence and every query head of a group. With grouped heads dK and dV
   are summed over the group in fp32 in the workspace.

   softmax kernels: one warp a row, 16-byte loads; the second pass over a row finds it in cache. */
#include "attention/device.cuh"

#include <cublas_v2.h>

enum {
    WARPS = 8,  /* in a block of the softmax kernels */
    VECTOR = 8, /* elements in 16 bytes */
    LANES = 32
};

/* ---- products ---- */

/* A row-major matrix for every key/value head; op says whether it is used transposed. */
struct matrix {
    void *data;
    int64_t row_stride, head_stride;
    cudaDataType_t type;
    cublasOperation_t op;
};

static cudaDataType_t cuda_type(enum dtype dtype) {
    return dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* C (rows, columns) = alpha op(A) (rows, depth) op(B) (depth, columns) + beta C for every key/value head. cuBLAS counts
   column-major: it is asked for C^T = op(B)^T op(A)^T. */
static enum status multiply(const struct attention *a, const struct attention_params *p,
    const struct matrix &A, const struct matrix &B, const struct matrix &C, int64_t rows, int64_t columns,
    int64_t depth, double scale, bool accumulate) {
    float alpha = (float)scale, beta = accumulate ? 1.0f : 0.0f;
    if (max_i64(A.row_stride, max_i64(B.row_stride, C.row_stride)) > INT32_MAX) {
        return fail("attention standard: a seq_stride is over 2^31 - 1, more than cuBLAS takes");
    }
    cublasStatus_t status = cublasGemmStridedBatchedEx((cublasHandle_t)a->cublas, B.op, A.op, (int)columns,
        (int)rows, (int)depth, &alpha, B.data, B.type, (int)B.row_stride, B.head_stride, A.data, A.type,
        (int)A.row_stride, A.head_stride, &beta, C.data, C.type, (int)C.row_stride, C.head_stride,
        (int)p->kv_heads, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return status == CUBLAS_STATUS_SUCCESS
               ? STATUS_OK
               : fail("attention standard: cuBLAS product of (%lld, %lld) by (%lld, %lld): %s",
                     (long long)rows, (long long)depth, (long long)depth, (long long)columns,
                     cublasGetStatusString(status));
}

/* The query heads first, first + group, ... of sequence b; or with group = 1, first = 0 the key/value heads. */
static struct matrix heads_of(const struct attention_params *p, const struct attention_tensor &t, int64_t b,
    int64_t first, int64_t group, cublasOperation_t op) {
    char *data =
        (char *)t.data + (b * t.batch_stride + first * t.head_stride) * (int64_t)dtype_bytes(p->dtype);
    /* a tensor of one row may have any stride; cuBLAS wants a plausible one */
    return {data, max_i64(t.seq_stride, p->head_dim), group * t.head_stride, cuda_type(p->dtype), op};
}

/* The same heads of S, P, dP or dS, whose first sequence is at `data`. */
static struct matrix scores_of(
    const struct attention_params *p, void *data, int64_t b, int64_t first, cublasOperation_t op) {
    int64_t row = standard_row_elements(p), head = p->seqlen_q * row;
    char *at = (char *)data + (b * p->heads + first) * head * (int64_t)dtype_bytes(p->dtype);
    return {at, row, p->heads / p->kv_heads * head, cuda_type(p->dtype), op};
}

/* ---- softmax ---- */

struct softmax_arguments {
    uint16_t *probabilities; /* forward: S in, P out; backward: P */
    uint16_t *gradients;     /* backward: dP in, dS out */
    float *lse;
    int64_t rows; /* of all heads */
    int64_t seqlen_q, seqlen_k, row_elements;
    float scale;
    bool causal;
};

__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(~0u, x, offset);
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    }
    return x;
}

/* The row of this warp, or rows and more past the end. */
__device__ __forceinline__ int64_t row_of_warp() {
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
}

__device__ __forceinline__ int64_t visible_keys(const softmax_arguments &a, int64_t row) {
    return a.causal ? max(row % a.seqlen_q + 1 + a.seqlen_k - a.seqlen_q, (int64_t)0) : a.seqlen_k;
}

/* Eight elements from `first` on of a row as floats; those past the visible ones become `beyond`, and are not loaded: no
   product writes what a row has more than seqlen_k. */
template <enum dtype TYPE>
__device__ __forceinline__ void load_visible(
    float *values, const uint16_t *row, int64_t first, int64_t visible, float beyond) {
    if (first + VECTOR <= visible) {
        uint4 bits = *(const uint4 *)(row + first);
        const uint32_t *pairs = (const uint32_t *)&bits;
#pragma unroll
        for (int i = 0; i < VECTOR / 2; i++) {
            float2 pair = unpack<TYPE>(pairs[i]);
            values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            values[i] = first + i < visible ? unpack<TYPE>(row[first + i]).x : beyond;
        }
    }
}

template <enum dtype TYPE>
__device__ __forceinline__ void store_vector(uint16_t *row, int64_t first, const float *values) {
    uint4 bits;
    uint32_t *pairs = (uint32_t *)&bits;
#pragma unroll
    for (int i = 0; i < VECTOR / 2; i++) {
        pairs[i] = pack<TYPE>(values[2 * i], values[2 * i + 1]);
    }
    *(uint4 *)(row + first) = bits;
}

/* The product that follows reads the whole row. */
__device__ __forceinline__ void clear_from(uint16_t *row, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i += LANES * VECTOR) {
        *(uint4 *)(row + i) = make_uint4(0, 0, 0, 0);
    }
}

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

template <enum dtype TYPE>
__global__ void __launch_bounds__(WARPS *LANES) softmax_forward(softmax_arguments a) {
    int64_t row_index = row_of_warp();
    if (row_index >= a.rows) {
        return;
    }
    uint16_t *row = a.probabilities + row_index * a.row_elements;
    int64_t visible = visible_keys(a, row_index), begin = threadIdx.x % LANES * VECTOR, i;
    float max = -INFINITY, sum = 0, values[VECTOR]; /* of this lane, in units of log 2 */
    for (i = begin; i < visible; i += LANES * VECTOR) {
        load_visible<TYPE>(values, row, i, visible, -INFINITY);
        float block_max = max;
        for (int k = 0; k < VECTOR; k++) {
            block_max = fmaxf(block_max, values[k] * LOG2_E);
        }
        sum *= exp2_fast(max - block_max);
        max = block_max;
        for (int k = 0; k < VECTOR; k++) {
            sum += exp2_fast(values[k] * LOG2_E - max);
        }
    }
    float row_max = warp_max(max);
    float row_sum = warp_sum(max == -INFINITY ? 0 : sum * exp2_fast(max - row_max));
    float lse = row_max + log2f(row_sum);
    for (i = begin; i < visible; i += LANES * VECTOR) {
        load_visible<TYPE>(values, row, i, visible, -INFINITY);
        for (int k = 0; k < VECTOR; k++) {
            values[k] = exp2_fast(values[k] * LOG2_E - lse);
        }
        store_vector<TYPE>(row, i, values);
    }
    clear_from(row, i, a.row_elements);
    if (begin == 0) {
        a.lse[row_index] = visible > 0 ? lse * LN_2 : -INFINITY;
    }
}

template <enum dtype TYPE>
__global__ void __launch_bounds__(WARPS *LANES) softmax_backward(softmax_arguments a) {
    int64_t row_index = row_of_warp();
    if (row_index >= a.rows) {
        return;
    }
    const uint16_t *p_row = a.probabilities + row_index * a.row_elements;
    uint16_t *row = a.gradients + row_index * a.row_elements;
    int64_t visible = visible_keys(a, row_index), begin = threadIdx.x % LANES * VECTOR, i;
    float sum = 0, p[VECTOR], dp[VECTOR];
    for (i = begin; i < visible; i += LANES * VECTOR) {
        load_visible<TYPE>(p, p_row, i, visible, 0);
        load_visible<TYPE>(dp, row, i, visible, 0);
        for (int k = 0; k < VECTOR; k++) {
            sum += p[k] * dp[k];
        }
    }
    sum = warp_sum(sum);
    for (i = begin; i < visible; i += LANES * VECTOR) {
        load_visible<TYPE>(p, p_row, i, visible, 0);
        load_visible<TYPE>(dp, row, i, visible, 0);
        for (int k = 0; k < VECTOR; k++) {
            dp[k] = a.scale * p[k] * (dp[k] - sum);
        }
        store_vector<TYPE>(row, i, dp);
    }
    clear_from(row, i, a.row_elements);
}

/* ---- the sums of grouped heads ---- */

struct convert_arguments {
    const float *sums; /* [seqlen_k, kv_heads, head_dim] */
    device_tensor out; /* one sequence */
    int64_t count, kv_heads, head_dim;
};

template <enum dtype TYPE> __global__ void convert_sums(convert_arguments a) {
    int64_t pair = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (2 * pair < a.count) {
        int64_t row = 2 * pair / a.head_dim, d = 2 * pair % a.head_dim;
        *(uint32_t *)(a.out.row(0, row / a.kv_heads, row % a.kv_heads) + d) =
            pack<TYPE>(a.sums[2 * pair], a.sums[2 * pair + 1]);
    }
}

/* ---- the two passes ---- */

template <enum dtype TYPE> struct standard {
    const struct attention *a;
    const struct attention_params *p;

    struct softmax_arguments softmax(int64_t b) const {
        struct softmax_arguments s = {};
        s.probabilities = (uint16_t *)scores_of(p, p->saved, b, 0, CUBLAS_OP_N).data;
        s.gradients = (uint16_t *)p->workspace;
        s.lse = (float *)p->lse + b * p->heads * p->seqlen_q;
        s.rows = p->heads * p->seqlen_q;
        s.seqlen_q = p->seqlen_q;
        s.seqlen_k = p->seqlen_k;
        s.row_elements = standard_row_elements(p);
        s.scale = (float)p->scale;
        s.causal = p->causal;
        return s;
    }

    enum status forward_sequence(int64_t b) const {
        int64_t group = p->heads / p->kv_heads;
        for (int64_t j = 0; j < group; j++) {
            CHECK(multiply(a, p, heads_of(p, p->q, b, j, group, CUBLAS_OP_N),
                heads_of(p, p->k, b, 0, 1, CUBLAS_OP_T), scores_of(p, p->saved, b, j, CUBLAS_OP_N),
                p->seqlen_q, p->seqlen_k, p->head_dim, p->scale, false));
        }
        struct softmax_arguments s = softmax(b);
        CHECK(launch("softmax forward", softmax_forward<TYPE>, ceil_div(s.rows, WARPS), WARPS * LANES, 0,
            p->stream, s));
        for (int64_t j = 0; j < group; j++) {
            CHECK(multiply(a, p, scores_of(p, p->saved, b, j, CUBLAS_OP_N),
                heads_of(p, p->v, b, 0, 1, CUBLAS_OP_N), heads_of(p, p->o, b, j, group, CUBLAS_OP_N),
                p->seqlen_q, p->head_dim, p->seqlen_k, 1, false));
        }
        return STATUS_OK;
    }

    /* gradient (seqlen_k, head_dim) = sum over the group of weights^T (seqlen_k, seqlen_q) rows (seqlen_q, head_dim) */
    enum status sum_over_group(int64_t b, const struct attention_tensor &gradient, void *weights,
        int64_t weights_batch, const struct attention_tensor &rows, float *sums) const {
        int64_t group = p->heads / p->kv_heads, count = p->seqlen_k * p->kv_heads * p->head_dim;
        struct matrix out = heads_of(p, gradient, b, 0, 1, CUBLAS_OP_N);
        if (group > 1) {
            out = {sums, p->kv_heads * p->head_dim, p->head_dim, CUDA_R_32F, CUBLAS_OP_N};
        }
        for (int64_t j = 0; j < group; j++) {
            CHECK(multiply(a, p, scores_of(p, weights, weights_batch, j, CUBLAS_OP_T),
                heads_of(p, rows, b, j, group, CUBLAS_OP_N), out, p->seqlen_k, p->head_dim, p->seqlen_q, 1,
                j > 0));
        }
        if (group > 1) {
            struct convert_arguments c = {sums, on_device(gradient), count, p->kv_heads, p->head_dim};
            c.out.data = c.out.data + b * gradient.batch_stride;
            CHECK(launch("convert", convert_sums<TYPE>, ceil_div(count / 2, 256), 256, 0, p->stream, c));
        }
        return STATUS_OK;
    }

    enum status backward_sequence(int64_t b) const {
        int64_t group = p->heads / p->kv_heads;
        float *sums = (float *)((char *)p->workspace + standard_workspace(p).sums_offset);
        for (int64_t j = 0; j < group; j++) {
            CHECK(multiply(a, p, heads_of(p, p->d_o, b, j, group, CUBLAS_OP_N),
                heads_of(p, p->v, b, 0, 1, CUBLAS_OP_T), scores_of(p, p->workspace, 0, j, CUBLAS_OP_N),
                p->seqlen_q, p->seqlen_k, p->head_dim, 1, false));
        }
        struct softmax_arguments s = softmax(b);
        CHECK(launch("softmax backward", softmax_backward<TYPE>, ceil_div(s.rows, WARPS), WARPS * LANES, 0,
            p->stream, s));
        for (int64_t j = 0; j < group; j++) {
            CHECK(multiply(a, p, scores_of(p, p->workspace, 0, j, CUBLAS_OP_N),
                heads_of(p, p->k, b, 0, 1, CUBLAS_OP_N), heads_of(p, p->dq, b, j, group, CUBLAS_OP_N),
                p->seqlen_q, p->head_dim, p->seqlen_k, 1, false));
        }
        CHECK(sum_over_group(b, p->dk, p->workspace, 0, p->q, sums));
        return sum_over_group(b, p->dv, p->saved, b, p->d_o, sums + count_of_sums());
    }

    int64_t count_of_sums() const {
        return p->seqlen_k * p->kv_heads * p->head_dim;
    }
};

static enum status set_stream(const struct attention *a, const struct attention_params *p) {
    cublasStatus_t status = cublasSetStream((cublasHandle_t)a->cublas, (cudaStream_t)p->stream);
    return status == CUBLAS_STATUS_SUCCESS
               ? STATUS_OK
               : fail("attention standard: cuBLAS: %s", cublasGetStatusString(status));
}

extern "C" enum status standard_forward(const struct attention *a, const struct attention_params *p) {
    CHECK(set_stream(a, p));
    for (int64_t b = 0; b < p->batch; b++) {
        CHECK(p->dtype == DTYPE_BF16 ? (standard<DTYPE_BF16>{a, p}.forward_sequence(b))
                                     : (standard<DTYPE_F16>{a, p}.forward_sequence(b)));
    }
    return STATUS_OK;
}

extern "C" enum status standard_backward(const struct attention *a, const struct attention_params *p) {
    CHECK(set_stream(a, p));
    if (p->seqlen_q > 1 && p->d_o.seq_stride < p->head_dim) {
        return fail(
            "attention standard: seq_stride of d_o is %lld, cuBLAS wants rows that do not overlap: copy it",
            (long long)p->d_o.seq_stride);
    }
    for (int64_t b = 0; b < p->batch; b++) {
        CHECK(p->dtype == DTYPE_BF16 ? (standard<DTYPE_BF16>{a, p}.backward_sequence(b))
                                     : (standard<DTYPE_F16>{a, p}.backward_sequence(b)));
    }
    return STATUS_OK;
}
