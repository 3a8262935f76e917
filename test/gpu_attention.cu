/* Every attention kernel on the GPU against the float64 reference on the CPU.

   A kernel is as good as its precision allows if its error is at most twice (gradients: three times) that of the plain
   formula in the same precision, computed here step by step with every step rounded to 16 bits: the largest error of an
   element, plus twice the rounding of the reference at 0.3, and the error in the Euclidean norm, plus twice the rounding
   of the reference and what fp32 leaves where it should be 0.

   Inputs are new in every run; outputs and working memory hold NaN before. Environment:
     FLASHGPT_SEED=N            repeats a run
     FLASHGPT_ATTENTION=NAME    keeps to one kernel
     FLASHGPT_SMALL=1           small shapes and few repeats only, for compute-sanitizer
     FLASHGPT_UNPOISONED=1      working memory is as it was allocated, for initcheck
     FLASHGPT_REPEATS=N         runs of the tests of bitwise equality (50)
     FLASHGPT_LONG=1            fa1 with 64k and 256k queries and keys as well: minutes */
#include "attention/check_rows.cuh"
#include "attention/kernel.h"
#include "test/test.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <time.h>

static uint64_t seed;

static bool is_set(const char *variable) {
    const char *value = getenv(variable);
    return value != NULL && strcmp(value, "") != 0 && strcmp(value, "0") != 0;
}

static bool small(void) {
    return is_set("FLASHGPT_SMALL");
}

static int64_t small_or(int64_t small_size, int64_t size) {
    return small() ? small_size : size;
}

/* ---- problems ---- */

enum layout {
    DENSE,
    PACKED,     /* q, k, v in one tensor where their lengths agree; dq, dk, dv alike */
    GAPS,       /* rows further apart than they are long */
    TRANSPOSED, /* [batch, heads, seq, head_dim] */
    LAYOUTS
};

struct shape {
    int64_t batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim;
    bool causal;
    enum dtype dtype;
    enum layout layout;
    float q_factor, k_factor; /* of the standard normal inputs */
    bool deterministic;
};

enum { GAP = 8 }; /* elements between rows */

/* One tensor: 16-bit on the device with the strides of the layout, float64 on the host, dense. */
struct tensor_pair {
    struct attention_tensor device, host;
    int64_t seq_len, heads;
};

struct problem {
    struct shape shape;
    struct tensor_pair tensors[TENSORS];
    double *host_lse;
    float *lse;
    uint16_t *memory; /* of all device tensors */
    uint16_t *image;  /* the same on the host */
    int64_t elements;
    uint16_t *plain_weights[2]; /* [seqlen_q, seqlen_k] on the device, of the plain formula */
    void *saved, *workspace;
};

static float to_float(enum dtype dtype, uint16_t bits) {
    return dtype == DTYPE_BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

static uint16_t to_bits(enum dtype dtype, float value) {
    return dtype == DTYPE_BF16 ? float_to_bf16(value) : float_to_f16(value);
}

/* Elements that hold every tensor in any layout. */
static int64_t largest_layout(const struct problem *p) {
    int64_t elements = 0;
    for (int t = 0; t < TENSORS; t++) {
        elements += p->shape.batch * p->tensors[t].seq_len * p->tensors[t].heads * (p->shape.head_dim + GAP);
    }
    return elements;
}

/* Gives every tensor its strides and its place in p->memory. */
static void lay_out(struct problem *p) {
    const struct shape *s = &p->shape;
    int64_t next = 0, packed_heads = s->heads + 2 * s->kv_heads;
    bool packed = s->layout == PACKED && s->seqlen_q == s->seqlen_k;
    const int packs[2][3] = {{Q, K, V}, {DQ, DK, DV}};
    for (int pack = 0; pack < 2 && packed; pack++) {
        const int64_t first_head[3] = {0, s->heads, s->heads + s->kv_heads};
        for (int i = 0; i < 3; i++) {
            p->tensors[packs[pack][i]].device = attention_packed(
                p->memory + next, sizeof(uint16_t), s->seqlen_q, packed_heads, s->head_dim, first_head[i]);
        }
        next += s->batch * s->seqlen_q * packed_heads * s->head_dim;
    }
    for (int t = 0; t < TENSORS; t++) {
        struct tensor_pair *x = &p->tensors[t];
        if (packed && t != O && t != D_O) {
            continue;
        }
        int64_t row = s->head_dim + (s->layout == GAPS ? GAP : 0);
        x->device = attention_dense(p->memory + next, x->seq_len, x->heads, row);
        if (s->layout == TRANSPOSED) {
            x->device.head_stride = x->seq_len * row;
            x->device.seq_stride = row;
        }
        next += s->batch * x->seq_len * x->heads * row;
    }
}

static uint16_t *element(
    const struct problem *p, const struct attention_tensor *t, int64_t b, int64_t i, int64_t h) {
    return p->image + ((uint16_t *)t->data - p->memory) + b * t->batch_stride + i * t->seq_stride +
           h * t->head_stride;
}

/* Calls copy(bits, value, count) for every row of a tensor. */
static void for_rows(struct problem *p, int t, void (*copy)(enum dtype, uint16_t *, double *, int64_t)) {
    struct tensor_pair *x = &p->tensors[t];
    for (int64_t b = 0; b < p->shape.batch; b++) {
        for (int64_t i = 0; i < x->seq_len; i++) {
            for (int64_t h = 0; h < x->heads; h++) {
                double *host =
                    (double *)x->host.data + ((b * x->seq_len + i) * x->heads + h) * p->shape.head_dim;
                copy(p->shape.dtype, element(p, &x->device, b, i, h), host, p->shape.head_dim);
            }
        }
    }
}

static void row_to_device(enum dtype dtype, uint16_t *bits, double *values, int64_t count) {
    for (int64_t d = 0; d < count; d++) {
        bits[d] = to_bits(dtype, (float)values[d]);
        values[d] = to_float(dtype, bits[d]); /* the reference has the very same inputs */
    }
}

static void problem_make_inputs(struct problem *p) {
    for (int64_t i = 0; i < p->elements; i++) {
        p->image[i] = 0xFFFF; /* NaN in both types: in gaps too */
    }
    for (int t = 0; t < TENSORS; t++) {
        struct tensor_pair *x = &p->tensors[t];
        int64_t count = p->shape.batch * x->seq_len * x->heads * p->shape.head_dim;
        float factor = t == Q ? p->shape.q_factor : t == K ? p->shape.k_factor : 1;
        for (int64_t i = 0; i < count && !is_output(t); i++) {
            ((double *)x->host.data)[i] = factor * random_normal(seed, (uint64_t)t, (uint64_t)i);
        }
        if (!is_output(t)) {
            for_rows(p, t, row_to_device);
        }
    }
    seed++;
}

static struct problem problem_new(const struct shape *s) {
    struct problem p = {};
    p.shape = *s;
    for (int t = 0; t < TENSORS; t++) {
        struct tensor_pair *x = &p.tensors[t];
        x->seq_len = t < K ? s->seqlen_q : s->seqlen_k;
        x->heads = t < K ? s->heads : s->kv_heads;
        double *host;
        MUST(ALLOCATE(host, s->batch * x->seq_len * x->heads * s->head_dim));
        x->host = attention_dense(host, x->seq_len, x->heads, s->head_dim);
    }
    p.elements = largest_layout(&p);
    p.memory = (uint16_t *)poisoned_memory((size_t)p.elements * sizeof(uint16_t));
    lay_out(&p);
    MUST(ALLOCATE(p.image, p.elements));
    MUST(ALLOCATE(p.host_lse, s->batch * s->heads * s->seqlen_q));
    p.lse = (float *)poisoned_memory((size_t)(s->batch * s->heads * s->seqlen_q) * sizeof(float));
    for (int i = 0; i < 2; i++) {
        p.plain_weights[i] =
            (uint16_t *)poisoned_memory((size_t)(s->seqlen_q * s->seqlen_k) * sizeof(uint16_t));
    }
    problem_make_inputs(&p);
    return p;
}

static struct attention_params params_of(struct problem *p, bool reference) {
    struct attention_params a = {};
    a.dtype = reference ? DTYPE_F64 : p->shape.dtype;
    a.batch = p->shape.batch, a.seqlen_q = p->shape.seqlen_q, a.seqlen_k = p->shape.seqlen_k;
    a.heads = p->shape.heads, a.kv_heads = p->shape.kv_heads, a.head_dim = p->shape.head_dim;
    a.scale = 1 / sqrt((double)a.head_dim);
    a.causal = p->shape.causal;
    struct attention_tensor *to[TENSORS] = {&a.q, &a.o, &a.d_o, &a.dq, &a.k, &a.v, &a.dk, &a.dv};
    for (int t = 0; t < TENSORS; t++) {
        *to[t] = reference ? p->tensors[t].host : p->tensors[t].device;
    }
    a.lse = reference ? (void *)p->host_lse : p->lse;
    a.saved = p->saved, a.workspace = p->workspace;
    return a;
}

static void problem_free(struct problem *p) {
    for (int t = 0; t < TENSORS; t++) {
        free(p->tensors[t].host.data);
    }
    free(p->image);
    free(p->host_lse);
    cudaFree(p->memory);
    cudaFree(p->lse);
    cudaFree(p->plain_weights[0]);
    cudaFree(p->plain_weights[1]);
    cudaFree(p->saved);
    cudaFree(p->workspace);
}

/* ---- kernels ---- */

enum { MAX_KERNELS = 8 };
static struct attention *kernels[MAX_KERNELS];
static int kernel_count, standard_index;

static int compute_capability(void) {
    cudaDeviceProp device;
    CUDA_MUST(cudaGetDeviceProperties(&device, 0));
    return 10 * device.major + device.minor;
}

/* Kernels that are not tested stay NULL: other than FLASHGPT_ATTENTION, or for other GPUs. */
static void create_kernels(void) {
    const char *only = getenv("FLASHGPT_ATTENTION");
    for (const char *name; (name = attention_kernel_name(kernel_count)) != NULL; kernel_count++) {
        if (strcmp(name, "standard") == 0) {
            standard_index = kernel_count;
        }
        if (!attention_kernel_suits(name, compute_capability(), 64)) {
            printf("  %s is not tested: it is for other GPUs\n", name);
            EXPECT(attention_create(&kernels[kernel_count], name) == STATUS_ERROR);
            EXPECT_CONTAINS(error_message(), "is needed");
        } else if (only == NULL || strcmp(only, name) == 0) {
            MUST(attention_create(&kernels[kernel_count], name));
        }
    }
}

/* Inputs to the device, outputs and lse poisoned there. */
static void send_inputs(struct problem *p) {
    for (int t = 0; t < TENSORS; t++) {
        if (is_output(t)) {
            for_rows(p, t, [](enum dtype, uint16_t *bits, double *, int64_t count) {
                memset(bits, 0xFF, (size_t)count * sizeof *bits);
            });
        }
    }
    CUDA_MUST(
        cudaMemcpy(p->memory, p->image, (size_t)p->elements * sizeof(uint16_t), cudaMemcpyHostToDevice));
    int64_t rows = p->shape.batch * p->shape.heads * p->shape.seqlen_q;
    CUDA_MUST(cudaMemset(p->lse, 0xFF, (size_t)rows * sizeof(float)));
}

static void fetch_results(struct problem *p) {
    CUDA_MUST(cudaDeviceSynchronize());
    CUDA_MUST(
        cudaMemcpy(p->image, p->memory, (size_t)p->elements * sizeof(uint16_t), cudaMemcpyDeviceToHost));
}

/* Poison is NaN in every type: what is read before it was written shows in the results. initcheck takes filled memory for
   written, so it gets as little as can be, but it does not see what bulk copies write: all that cuBLAS uses, and fa3's
   sums of dQ. */
static void poison(
    const char *kernel, const struct attention_params *sizes, void *memory, size_t bytes, bool is_saved) {
    size_t from = 0, to = bytes;
    if (is_set("FLASHGPT_UNPOISONED") && strcmp(kernel, "standard") != 0) {
        bool bulk =
            strcmp(kernel, "fa3") == 0 && !is_saved && sizes->head_dim <= FA3_LARGEST_BACKWARD_HEAD_DIM;
        from = bulk ? fa2_workspace(sizes).dq_offset : 0;
        to = bulk ? fa3_workspace(sizes).counters_offset : 0;
    }
    CUDA_MUST(cudaMemset((char *)memory + from, 0xFF, to - from));
}

/* Working memory for these sizes. */
static void make_working_memory(struct problem *p, const char *name, const struct attention_params *sizes) {
    size_t bytes[] = {attention_saved_bytes(name, sizes), attention_workspace_bytes(name, sizes)};
    void **memory[] = {&p->saved, &p->workspace};
    for (int i = 0; i < 2; i++) {
        CUDA_MUST(cudaFree(*memory[i]));
        *memory[i] = NULL;
        if (bytes[i] > 0) {
            CUDA_MUST(cudaMalloc(memory[i], bytes[i]));
            poison(name, sizes, *memory[i], bytes[i], i == 0);
        }
    }
}

/* Runs a kernel both ways; the device's tensors come back to p->image. */
static void run_kernel(struct problem *p, int kernel, bool deterministic) {
    struct attention_params sizes = params_of(p, false);
    sizes.deterministic = deterministic;
    make_working_memory(p, attention_kernel_name(kernel), &sizes);
    send_inputs(p);
    struct attention_params a = params_of(p, false);
    a.deterministic = deterministic;
    MUST(attention_forward(kernels[kernel], &a));
    MUST(attention_backward(kernels[kernel], &a));
    fetch_results(p);
}

/* ---- the plain formula ---- */

/* A matrix on the device, of 16-bit elements. */
struct plain_matrix {
    uint16_t *data;
    int64_t row_stride, column_stride;

    __host__ __device__ struct plain_matrix transposed() const {
        return {data, column_stride, row_stride};
    }
};

static __device__ float plain_load(
    enum dtype dtype, const struct plain_matrix &m, int64_t row, int64_t column) {
    uint16_t bits = m.data[row * m.row_stride + column * m.column_stride];
    return dtype == DTYPE_BF16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                               : __half2float(__ushort_as_half(bits));
}

static __device__ void plain_store(
    enum dtype dtype, const struct plain_matrix &m, int64_t row, int64_t column, float value) {
    m.data[row * m.row_stride + column * m.column_stride] =
        dtype == DTYPE_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                            : __half_as_ushort(__float2half_rn(value));
}

/* out (rows, columns) = factor left right, or with `add` that more; a thread an element */
static __global__ void plain_multiply(enum dtype dtype, struct plain_matrix out, struct plain_matrix left,
    struct plain_matrix right, int64_t rows, int64_t columns, int64_t depth, float factor, bool add) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / columns, column = i % columns;
    float sum = 0;
    for (int64_t k = 0; k < depth && row < rows; k++) {
        sum += plain_load(dtype, left, row, k) * plain_load(dtype, right, k, column);
    }
    if (row < rows) {
        plain_store(dtype, out, row, column, factor * sum + (add ? plain_load(dtype, out, row, column) : 0));
    }
}

static __device__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(~0u, x, offset);
    }
    return x;
}

static __device__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    }
    return x;
}

/* P = softmax(S) in place, and lse; a warp a row, of which it sees the first `visible` keys, or with `causal` one more for
   every row */
static __global__ void plain_softmax(
    enum dtype dtype, struct plain_matrix s, float *lse, int64_t keys, int64_t visible, bool causal) {
    int64_t row = blockIdx.x, seen = visible + (causal ? row : 0);
    float max = -INFINITY, sum = 0;
    for (int64_t j = threadIdx.x; j < seen; j += 32) {
        max = fmaxf(max, plain_load(dtype, s, row, j));
    }
    max = warp_max(max);
    for (int64_t j = threadIdx.x; j < seen; j += 32) {
        sum += expf(plain_load(dtype, s, row, j) - max);
    }
    sum = warp_sum(sum);
    for (int64_t j = threadIdx.x; j < keys; j += 32) {
        plain_store(dtype, s, row, j, j < seen ? expf(plain_load(dtype, s, row, j) - max) / sum : 0);
    }
    if (threadIdx.x == 0) {
        lse[row] = seen > 0 ? max + logf(sum) : -INFINITY;
    }
}

/* dS = P o (dP - rowsum(P o dP)) in place of dP; a warp a row */
static __global__ void plain_softmax_backward(
    enum dtype dtype, struct plain_matrix dp, struct plain_matrix p, int64_t keys) {
    int64_t row = blockIdx.x;
    float sum = 0;
    for (int64_t j = threadIdx.x; j < keys; j += 32) {
        sum += plain_load(dtype, p, row, j) * plain_load(dtype, dp, row, j);
    }
    sum = warp_sum(sum);
    for (int64_t j = threadIdx.x; j < keys; j += 32) {
        plain_store(dtype, dp, row, j, plain_load(dtype, p, row, j) * (plain_load(dtype, dp, row, j) - sum));
    }
}

/* Both ways for one query head of one sequence. */
static void run_plain_head(struct problem *p, const struct attention_params *a, int64_t batch, int64_t head) {
    int64_t group = a->heads / a->kv_heads, queries = a->seqlen_q, keys = a->seqlen_k, dim = a->head_dim;
    struct plain_matrix m[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        const struct attention_tensor *x = tensor_of((struct attention_params *)a, t);
        int64_t own = t < K ? head : head / group;
        m[t] = {(uint16_t *)x->data + batch * x->batch_stride + own * x->head_stride, x->seq_stride, 1};
    }
    struct plain_matrix weights = {p->plain_weights[0], keys, 1}, gradients = {p->plain_weights[1], keys, 1};
    auto multiply = [&](const struct plain_matrix &out, const struct plain_matrix &left,
                        const struct plain_matrix &right, int64_t rows, int64_t columns, int64_t depth,
                        double factor, bool add) {
        plain_multiply<<<(unsigned)ceil_div(rows * columns, 256), 256>>>(
            a->dtype, out, left, right, rows, columns, depth, (float)factor, add);
    };
    bool others = head % group > 0; /* dK and dV have those of another query head of the group */
    multiply(weights, m[Q], m[K].transposed(), queries, keys, dim, a->scale, false);
    plain_softmax<<<(unsigned)queries, 32>>>(a->dtype, weights, p->lse + (batch * a->heads + head) * queries,
        keys, a->causal ? keys - queries + 1 : keys, a->causal);
    multiply(m[O], weights, m[V], queries, dim, keys, 1, false);
    multiply(m[DV], weights.transposed(), m[D_O], keys, dim, queries, 1, others);
    multiply(gradients, m[D_O], m[V].transposed(), queries, keys, dim, 1, false);
    plain_softmax_backward<<<(unsigned)queries, 32>>>(a->dtype, gradients, weights, keys);
    multiply(m[DQ], gradients, m[K], queries, dim, keys, a->scale, false);
    multiply(m[DK], gradients.transposed(), m[Q], keys, dim, queries, a->scale, others);
    CUDA_MUST(cudaGetLastError());
}

/* As run_kernel. */
static void run_plain(struct problem *p) {
    send_inputs(p);
    struct attention_params a = params_of(p, false);
    for (int64_t i = 0; i < a.batch * a.heads; i++) {
        run_plain_head(p, &a, i / a.heads, i % a.heads);
    }
    fetch_results(p);
}

/* ---- comparison ---- */

struct error {
    double largest;        /* of an element */
    double norm;           /* ||result - reference||, a sum of squares at first */
    double rounding;       /* the largest rounding error of reference + 0.3 */
    double rounding_norm;  /* ||rounded reference - reference|| */
    double reference_norm; /* ||reference|| */
    int64_t elements;
};

static struct error error_sums;

static double rounding_error(enum dtype dtype, double x) {
    return to_float(dtype, to_bits(dtype, (float)x)) - x;
}

static void add_row_error(enum dtype dtype, uint16_t *bits, double *reference, int64_t count) {
    for (int64_t d = 0; d < count; d++) {
        double difference = fabs(to_float(dtype, bits[d]) - reference[d]);
        double rounding = rounding_error(dtype, reference[d]);
        error_sums.largest =
            difference <= error_sums.largest ? error_sums.largest : difference; /* NaN stays */
        error_sums.norm += difference * difference;
        error_sums.rounding =
            fmax(error_sums.rounding, fabs(rounding_error(dtype, (float)(reference[d] + 0.3))));
        error_sums.rounding_norm += rounding * rounding;
        error_sums.reference_norm += reference[d] * reference[d];
    }
}

static struct error error_of(struct problem *p, int t) {
    memset(&error_sums, 0, sizeof error_sums);
    for_rows(p, t, add_row_error);
    error_sums.elements = p->shape.batch * p->tensors[t].seq_len * p->tensors[t].heads * p->shape.head_dim;
    struct error e = error_sums;
    e.norm = sqrt(e.norm);
    e.rounding_norm = sqrt(e.rounding_norm);
    e.reference_norm = sqrt(e.reference_norm);
    return e;
}

static int64_t row_count(const struct problem *p) {
    return p->shape.batch * p->shape.heads * p->shape.seqlen_q;
}

static double lse_error(struct problem *p) {
    int64_t count = row_count(p);
    float *lse;
    MUST(ALLOCATE(lse, count));
    CUDA_MUST(cudaMemcpy(lse, p->lse, (size_t)count * sizeof *lse, cudaMemcpyDeviceToHost));
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        bool same = lse[i] == p->host_lse[i]; /* infinities */
        double difference = same ? 0 : fabs(lse[i] - p->host_lse[i]);
        largest = difference <= largest ? largest : difference;
    }
    free(lse);
    return largest;
}

/* What fp32 does to lse: some roundings of the largest scores. */
static double lse_rounding(const struct problem *p) {
    double largest = 1;
    for (int64_t i = 0; i < row_count(p); i++) {
        largest = isinf(p->host_lse[i]) ? largest : fmax(largest, fabs(p->host_lse[i]));
    }
    return 32 * FLT_EPSILON * largest;
}

static const char *const tensor_names[TENSORS] = {"q", "o", "d_o", "dq", "k", "v", "dk", "dv"};

static void describe(const struct shape *s, const char *kernel) {
    printf("    that was %s: batch %d, %d x %d, heads %d/%d, head_dim %d, %s, %s, layout %d%s\n", kernel,
        (int)s->batch, (int)s->seqlen_q, (int)s->seqlen_k, (int)s->heads, (int)s->kv_heads, (int)s->head_dim,
        s->causal ? "causal" : "full", dtype_name(s->dtype), s->layout,
        s->deterministic ? ", deterministic" : "");
}

/* Gaps between rows must be as they were. */
static bool gaps_are_untouched(struct problem *p) {
    for (int t = 0; t < TENSORS && p->shape.layout == GAPS; t++) {
        struct tensor_pair *x = &p->tensors[t];
        for (int64_t row = 0; row < p->shape.batch * x->seq_len * x->heads; row++) {
            const uint16_t *end = p->image + ((uint16_t *)x->device.data - p->memory) +
                                  (row + 1) * (p->shape.head_dim + GAP) - GAP;
            for (int i = 0; i < GAP; i++) {
                if (end[i] != 0xFFFF) {
                    return false;
                }
            }
        }
    }
    return true;
}

/* p->image has the results of a kernel. With a single visible key, dS = P o (dP - D) is 0, the difference of two sums of
   head_dim products, and the plain formula may have exactly that: a kernel may have a rounding of such sums. */
static void expect_as_close_as_plain(struct problem *p, const struct error *plain) {
    for (int t = 0; t < TENSORS; t++) {
        if (!is_output(t)) {
            continue;
        }
        struct error e = error_of(p, t);
        double factor = t == O ? 2 : 3;
        double limit = factor * plain[t].largest + 2 * e.rounding;
        double cancelled = FLT_EPSILON * (double)p->shape.head_dim * sqrt((double)e.elements);
        double norm_limit = factor * plain[t].norm + 2 * e.rounding_norm + cancelled;
        if (!(e.largest <= limit && e.norm <= norm_limit)) {
            test_failures_in_this_++;
            printf(
                "        %s: largest error %.3g, limit %.3g; norm of the errors %.3g, limit %.3g, of %.3g\n",
                tensor_names[t], e.largest, limit, e.norm, norm_limit, e.reference_norm);
        }
    }
}

static void expect_kernels_match_reference(const struct shape *s) {
    struct problem p = problem_new(s);
    struct attention_params reference = params_of(&p, true);
    MUST(attention_reference_forward(&reference));
    MUST(attention_reference_backward(&reference));
    run_plain(&p);
    struct error plain[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        plain[t] = error_of(&p, t);
    }
    double plain_lse = lse_error(&p);
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (kernels[kernel] == NULL) {
            continue;
        }
        int before = test_failures_in_this_;
        run_kernel(&p, kernel, s->deterministic);
        expect_as_close_as_plain(&p, plain);
        /* scores are rounded to 16 bits by the standard kernel alone */
        EXPECT_NEAR(lse_error(&p), 0, lse_rounding(&p) + (kernel == standard_index ? 2 * plain_lse : 0));
        EXPECT(gaps_are_untouched(&p));
        if (test_failures_in_this_ > before) {
            describe(s, attention_kernel_name(kernel));
        }
    }
    problem_free(&p);
}

/* ---- shapes ---- */

static const int64_t lengths[][2] = {{113, 203}, {128, 217}, {113, 211}, {108, 256}, {256, 512}, {512, 256},
    {1023, 1024}, {1024, 1023}, {2048, 2048}, {1, 239}, {239, 1}, {3, 799}, {127, 513}, {1, 147}, {1, 1},
    {2, 2}, {513, 513}};
static const int64_t head_dims[] = {8, 32, 40, 64, 72, 80, 96, 104, 128, 160, 192, 224, 256};
static const int64_t head_counts[][2] = {{6, 6}, {6, 2}, {6, 1}};
enum {
    LENGTHS = sizeof lengths / sizeof lengths[0],
    HEAD_DIMS = sizeof head_dims / sizeof head_dims[0],
    HEAD_COUNTS = sizeof head_counts / sizeof head_counts[0]
};

/* Every pair of lengths with every head dimension, causal and not; types, head counts, layouts and how dQ is summed take
   turns. The long ones would keep the reference busy: they have one head. */
static void check_head_dim(int64_t head_dim) {
    static int turn;
    for (int i = 0; i < small_or(1, LENGTHS); i++) {
        int64_t pairs = lengths[i][0] * lengths[i][1];
        for (int causal = 0; causal < 2; causal++, turn++) {
            struct shape s = {pairs > 100000 ? 1 : small_or(1, 2), lengths[i][0], lengths[i][1], 6, 6,
                head_dim, causal == 1, turn / 2 % 2 == 0 ? DTYPE_BF16 : DTYPE_F16,
                (enum layout)(turn / 3 % LAYOUTS), 1, 1, turn / 5 % 2 == 0};
            if (pairs > 1000000) {
                s.heads = s.kv_heads = 1;
            } else if (small()) {
                s.heads = 2, s.kv_heads = 1 + turn / 3 % 2;
            } else {
                s.heads = head_counts[turn % HEAD_COUNTS][0];
                s.kv_heads = head_counts[turn % HEAD_COUNTS][1];
            }
            expect_kernels_match_reference(&s);
        }
    }
}

static void test_kernels_match_reference_at_small_head_dims(void) {
    for (int i = 0; i < 4; i++) {
        check_head_dim(head_dims[i]);
    }
}

static void test_kernels_match_reference_at_middle_head_dims(void) {
    for (int i = 4; i < 9; i++) {
        check_head_dim(head_dims[i]);
    }
}

static void test_kernels_match_reference_at_large_head_dims(void) {
    for (int i = 9; i < HEAD_DIMS; i++) {
        check_head_dim(head_dims[i]);
    }
}

static void test_all_types_heads_and_layouts_match_reference(void) {
    const int64_t seqlen = small_or(140, 190);
    for (int i = 0; i < HEAD_COUNTS * LAYOUTS * 4; i += (int)small_or(5, 1)) {
        struct shape s = {small_or(1, 2), seqlen, seqlen, head_counts[i % HEAD_COUNTS][0],
            head_counts[i % HEAD_COUNTS][1], i % 5 < 3 ? 128 : 80, i / (HEAD_COUNTS * LAYOUTS) % 2 == 0,
            i / (HEAD_COUNTS * LAYOUTS * 2) == 0 ? DTYPE_BF16 : DTYPE_F16,
            (enum layout)(i / HEAD_COUNTS % LAYOUTS), 1, 1};
        expect_kernels_match_reference(&s);
    }
}

/* Maxima grow by much from one block of keys to the next, and there are more than two blocks. */
static void test_large_scores_match_reference(void) {
    for (int i = 0; i < 8; i += (int)small_or(5, 1)) {
        struct shape s = {1, small_or(150, 300), 420, 2, 2, i / 4 == 0 ? 64 : 128, i % 2 == 0,
            i / 2 % 2 == 0 ? DTYPE_BF16 : DTYPE_F16, DENSE, 5, 3};
        expect_kernels_match_reference(&s);
    }
}

/* Additions to dQ are kept in order in different ways, or not at all, by how many blocks of keys there are: more than 4, more
   than 16. */
static void test_many_blocks_of_keys_match_reference(void) {
    static const int64_t dims[] = {128, 64, 80}, keys[] = {700, 2330};
    for (int i = 0; i < 8 * small_or(1, 3); i++) {
        struct shape s = {1, small_or(70, 150), keys[i % 2], 2, 1, dims[i / 8], i / 2 % 2 == 0, DTYPE_BF16,
            DENSE, 1, 1, i / 4 % 2 == 0};
        expect_kernels_match_reference(&s);
    }
}

/* ---- bits ---- */

/* The first row of output t in which p->image differs from `first`, or -1. */
static int64_t differing_row(const struct problem *p, const uint16_t *first, int t) {
    const struct tensor_pair *x = &p->tensors[t];
    for (int64_t row = 0; row < p->shape.batch * x->seq_len * x->heads; row++) {
        int64_t b = row / (x->seq_len * x->heads), position = row / x->heads % x->seq_len;
        const uint16_t *now = element(p, &x->device, b, position, row % x->heads);
        if (memcmp(now, first + (now - p->image), (size_t)p->shape.head_dim * sizeof *now) != 0) {
            return row;
        }
    }
    return -1;
}

static int repeats(void) {
    const char *given = getenv("FLASHGPT_REPEATS");
    return given != NULL ? atoi(given) : (int)small_or(2, 50);
}

/* The outputs of every kernel are the same bits in every run; dQ only if deterministic. */
static void expect_repeatable(int64_t head_dim, bool causal, bool deterministic) {
    const int64_t seqlen = small_or(277, 777);
    struct shape s = {small_or(1, 2), seqlen, seqlen, small_or(2, 4), small_or(1, 2), head_dim, causal,
        DTYPE_BF16, PACKED, 1, 1};
    struct problem p = problem_new(&s);
    uint16_t *first;
    MUST(ALLOCATE(first, p.elements));
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (kernels[kernel] == NULL) {
            continue;
        }
        run_kernel(&p, kernel, deterministic);
        memcpy(first, p.image, (size_t)p.elements * sizeof *first);
        for (int i = 1; i < repeats(); i++) {
            run_kernel(&p, kernel, deterministic);
            for (int t = 0; t < TENSORS; t++) {
                int64_t row = t == DQ && !deterministic ? -1 : differing_row(&p, first, t);
                if (row >= 0) {
                    test_failures_in_this_++;
                    printf("        %s differs in run %d, row %d\n", tensor_names[t], i, (int)row);
                    describe(&s, attention_kernel_name(kernel));
                }
            }
        }
    }
    free(first);
    problem_free(&p);
}

static void test_outputs_are_bitwise_repeatable_but_for_dq(void) {
    expect_repeatable(64, false, false);
    expect_repeatable(128, true, false);
}

static void test_deterministic_makes_dq_repeatable_too(void) {
    static const int dims[] = {64, 80, 96, 128, 192, 256};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        expect_repeatable(dims[i], i % 2 == 0, true);
    }
}

/* Sequence 1 and heads 2 and 3 (one group of two) of a batch, computed alone. */
static void test_a_slice_alone_gives_the_same_bits_as_in_a_batch(void) {
    const int64_t seqlen = small_or(140, 300);
    struct shape s = {3, seqlen, seqlen, 6, 3, 128, true, DTYPE_BF16, PACKED, 1, 1};
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (kernel == standard_index || kernels[kernel] == NULL) {
            continue; /* cuBLAS may choose another algorithm for another batch */
        }
        struct problem p = problem_new(&s);
        run_kernel(&p, kernel, true);
        uint16_t *all;
        MUST(ALLOCATE(all, p.elements));
        memcpy(all, p.image, (size_t)p.elements * sizeof *all);
        struct attention_params a = params_of(&p, false);
        struct attention_tensor *tensors[TENSORS] = {&a.q, &a.o, &a.d_o, &a.dq, &a.k, &a.v, &a.dk, &a.dv};
        a.batch = 1, a.heads = 2, a.kv_heads = 1;
        a.deterministic = true;
        for (int t = 0; t < TENSORS; t++) {
            tensors[t]->data = (uint16_t *)tensors[t]->data + tensors[t]->batch_stride +
                               (t < K ? 2 : 1) * tensors[t]->head_stride;
        }
        MUST(attention_forward(kernels[kernel], &a));
        MUST(attention_backward(kernels[kernel], &a));
        CUDA_MUST(
            cudaMemcpy(p.image, p.memory, (size_t)p.elements * sizeof(uint16_t), cudaMemcpyDeviceToHost));
        EXPECT(memcmp(all, p.image, (size_t)p.elements * sizeof *all) == 0);
        free(all);
        problem_free(&p);
    }
}

/* ---- limits ---- */

static void test_more_sequences_and_heads_than_a_grid_dimension_has(void) {
    struct shape s = {11000, 2, 3, 6, 3, 64, true, DTYPE_BF16, DENSE, 1, 1};
    expect_kernels_match_reference(&s);
}

static bool has_memory(size_t bytes) {
    size_t free_bytes, total_bytes;
    CUDA_MUST(cudaMemGetInfo(&free_bytes, &total_bytes));
    return bytes + ((size_t)1 << 30) < free_bytes;
}

/* The same problem with its second sequence more than 2^31 elements behind the first. */
static void test_offsets_beyond_two_to_the_31_elements(void) {
    const int64_t far = ((int64_t)1 << 31) + 4096;
    if (!has_memory((size_t)(far * 2 * TENSORS))) {
        SKIP("needs 33 GiB of free GPU memory");
    }
    struct shape s = {2, 200, 200, 2, 2, 64, true, DTYPE_BF16, DENSE, 1, 1};
    struct problem p = problem_new(&s);
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (kernels[kernel] == NULL) {
            continue;
        }
        run_kernel(&p, kernel, true);
        struct attention_params a = params_of(&p, false);
        a.deterministic = true;
        struct attention_tensor *tensors[TENSORS] = {&a.q, &a.o, &a.d_o, &a.dq, &a.k, &a.v, &a.dk, &a.dv};
        for (int t = 0; t < TENSORS; t++) {
            struct attention_tensor near = *tensors[t];
            size_t bytes = (size_t)near.batch_stride * 2;
            tensors[t]->batch_stride = far;
            CUDA_MUST(cudaMalloc(&tensors[t]->data, (size_t)far * 2 + bytes));
            CUDA_MUST(cudaMemcpy2D(
                tensors[t]->data, (size_t)far * 2, near.data, bytes, bytes, 2, cudaMemcpyDefault));
            if (is_output(t)) {
                CUDA_MUST(cudaMemset2D(tensors[t]->data, (size_t)far * 2, 0xFF, bytes, 2));
            }
        }
        MUST(attention_forward(kernels[kernel], &a));
        MUST(attention_backward(kernels[kernel], &a));
        for (int t = 0; t < TENSORS; t++) {
            int64_t count = p.tensors[t].device.batch_stride;
            uint16_t *now;
            MUST(ALLOCATE(now, 2 * count));
            CUDA_MUST(cudaMemcpy2D(now, (size_t)count * 2, tensors[t]->data, (size_t)far * 2,
                (size_t)count * 2, 2, cudaMemcpyDefault));
            EXPECT(memcmp(now, element(&p, &p.tensors[t].device, 0, 0, 0), (size_t)count * 4) == 0);
            free(now);
            CUDA_MUST(cudaFree(tensors[t]->data));
        }
    }
    problem_free(&p);
}

/* 16 heads of 128, and rows as far apart as 72 heads are: at 256k positions the tensors span more than 2^31 elements. Rows
   of a head are checked. */
static void expect_long_rows_match(
    const char *name, int64_t seqlen_q, int64_t seqlen_k, bool causal, bool deterministic) {
    enum { ROW_ELEMENTS = 72 * 128, ROWS = 8 };
    struct attention_params p = {};
    p.dtype = DTYPE_BF16;
    p.batch = 1, p.heads = p.kv_heads = 16, p.head_dim = 128;
    p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
    p.scale = 1 / sqrt(128.0), p.causal = causal, p.deterministic = deterministic;
    make_random_data(&p, ROW_ELEMENTS, seed++);
    p.saved = poisoned_memory(attention_saved_bytes(name, &p));
    p.workspace = poisoned_memory(attention_workspace_bytes(name, &p));
    struct attention *kernel;
    MUST(attention_create(&kernel, name));
    MUST(attention_forward(kernel, &p));
    MUST(attention_backward(kernel, &p));
    CUDA_MUST(cudaDeviceSynchronize());
    double error = relative_error_of_rows(&p, ROWS);
    if (!(error <= LARGEST_ROW_ERROR)) {
        test_failures_in_this_++;
        printf("    %s, %d queries, %d keys: relative error %.3g, limit %.3g\n", name, (int)seqlen_q,
            (int)seqlen_k, error, LARGEST_ROW_ERROR);
    }
    attention_free(kernel);
    CUDA_MUST(cudaFree(p.saved));
    CUDA_MUST(cudaFree(p.workspace));
    free_data(&p);
}

/* standard would need 128 GiB for the P of 64k. fa1 has one thread block for a head and would take minutes over 256k
   queries and as many keys: it gets few of one and all of the other. cut1 has its code. */
static void test_sequences_of_64k_and_256k_match_reference(void) {
    enum { K64 = 65536, K256 = 262144, FEW = 512 };
    const struct {
        const char *kernel;
        int64_t seqlen_q, seqlen_k;
        bool causal, deterministic, long_only;
    } cases[] = {
        {"fa2", K64, K64, false, false, false},
        {"fa2", K256, K256, true, true, false},
        {"fa3", K64, K64, false, false, false},
        {"fa3", K256, K256, true, true, false},
        {"cut2", K64, K64, true, false, false},
        {"fa1", FEW, K256, true, false, false},
        {"fa1", K256, FEW, false, false, false},
        {"fa1", K64, K64, true, false, true},
        {"fa1", K256, K256, true, false, true},
    };
    if (!has_memory((size_t)80 << 30)) {
        SKIP("needs 80 GiB of free GPU memory");
    }
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int kernel = 0; kernel < kernel_count; kernel++) {
            if (strcmp(attention_kernel_name(kernel), cases[i].kernel) == 0 && kernels[kernel] != NULL &&
                (!cases[i].long_only || is_set("FLASHGPT_LONG"))) {
                expect_long_rows_match(cases[i].kernel, cases[i].seqlen_q, cases[i].seqlen_k, cases[i].causal,
                    cases[i].deterministic);
            }
        }
    }
}

static void test_invalid_arguments_are_refused_before_anything_runs(void) {
    struct shape s = {1, 8, 8, 2, 2, 64, true, DTYPE_BF16, DENSE, 1, 1};
    struct problem p = problem_new(&s);
    struct attention_params a = params_of(&p, false);
    a.d_o.dim_stride = 2;
    a.workspace = p.memory, a.saved = p.memory;
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (kernels[kernel] == NULL) {
            continue;
        }
        EXPECT(attention_backward(kernels[kernel], &a) == STATUS_ERROR);
        EXPECT_CONTAINS(error_message(), "d_o has stride 2 in its last dimension");
    }
    CUDA_MUST(cudaDeviceSynchronize());
    struct attention *none;
    EXPECT(attention_create(&none, "fa7") == STATUS_ERROR && none == NULL);
    EXPECT_CONTAINS(error_message(), "no kernel \"fa7\"");
    problem_free(&p);
}

int main(void) {
    const char *given = getenv("FLASHGPT_SEED");
    seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)time(NULL) * 1000003;
    srand((unsigned)seed); /* the rows that are checked of long sequences */
    printf("  FLASHGPT_SEED=%llu\n", (unsigned long long)seed);
    create_kernels();
    RUN(test_invalid_arguments_are_refused_before_anything_runs);
    RUN(test_a_slice_alone_gives_the_same_bits_as_in_a_batch);
    RUN(test_all_types_heads_and_layouts_match_reference);
    RUN(test_large_scores_match_reference);
    RUN(test_kernels_match_reference_at_small_head_dims);
    RUN(test_kernels_match_reference_at_middle_head_dims);
    RUN(test_kernels_match_reference_at_large_head_dims);
    RUN(test_many_blocks_of_keys_match_reference);
    RUN(test_outputs_are_bitwise_repeatable_but_for_dq);
    RUN(test_deterministic_makes_dq_repeatable_too);
    if (!small()) {
        RUN(test_more_sequences_and_heads_than_a_grid_dimension_has);
        RUN(test_offsets_beyond_two_to_the_31_elements);
        RUN(test_sequences_of_64k_and_256k_match_reference);
    }
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        attention_free(kernels[kernel]);
    }
    return test_summary();
}
