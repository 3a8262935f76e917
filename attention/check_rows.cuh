/* Single rows of a kernel's results against the float64 reference, for problems too large to compute as a whole: what
   bench.cu does before it times a kernel, and the tests with long sequences. bf16. */
#ifndef ATTENTION_CHECK_ROWS_CUH
#define ATTENTION_CHECK_ROWS_CUH

#include "attention/attention.h"
#include "llmc/random.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        if ((call) != STATUS_OK) {                                                                           \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, error_message());                             \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define CUDA_MUST(call)                                                                                      \
    do {                                                                                                     \
        cudaError_t error_ = (call);                                                                         \
        if (error_ != cudaSuccess) {                                                                         \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));                  \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* ---- data ---- */

enum { Q, O, D_O, DQ, K, V, DK, DV, TENSORS }; /* query side first */

static struct attention_tensor *tensor_of(struct attention_params *p, int t) {
    struct attention_tensor *tensors[TENSORS] = {&p->q, &p->o, &p->d_o, &p->dq, &p->k, &p->v, &p->dk, &p->dv};
    return tensors[t];
}

static bool is_output(int t) {
    return t == O || t == DQ || t == DK || t == DV;
}

/* NaN everywhere */
static void *poisoned_memory(size_t bytes) {
    void *memory = NULL;
    if (bytes > 0) {
        CUDA_MUST(cudaMalloc(&memory, bytes));
        CUDA_MUST(cudaMemset(memory, 0xFF, bytes));
    }
    return memory;
}

static __global__ void fill_random(uint16_t *out, int64_t count, uint64_t seed, uint64_t stream) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        out[i] = (uint16_t)(__float_as_uint(random_normal(seed, stream, (uint64_t)i)) >> 16); /* truncated */
    }
}

/* Gives p, whose sizes are set, tensors with random inputs and poisoned outputs, and lse. Rows of the sequence are
   row_elements apart, or as close as they can be if that is 0. */
static void make_random_data(struct attention_params *p, int64_t row_elements, uint64_t seed) {
    for (int t = 0; t < TENSORS; t++) {
        int64_t seqlen = t < K ? p->seqlen_q : p->seqlen_k, heads = t < K ? p->heads : p->kv_heads;
        int64_t row = row_elements > 0 ? row_elements : heads * p->head_dim, count = p->batch * seqlen * row;
        void *data = poisoned_memory((size_t)count * sizeof(uint16_t));
        *tensor_of(p, t) = attention_dense(data, seqlen, heads, p->head_dim);
        tensor_of(p, t)->seq_stride = row;
        tensor_of(p, t)->batch_stride = seqlen * row;
        if (!is_output(t)) {
            fill_random<<<1024, 256>>>((uint16_t *)data, count, seed, (uint64_t)t);
        }
    }
    p->lse = poisoned_memory((size_t)(p->batch * p->heads * p->seqlen_q) * sizeof(float));
    CUDA_MUST(cudaDeviceSynchronize());
}

static void free_data(struct attention_params *p) {
    for (int t = 0; t < TENSORS; t++) {
        CUDA_MUST(cudaFree(tensor_of(p, t)->data));
    }
    CUDA_MUST(cudaFree(p->lse));
}

/* ---- is it right ---- */

/* A key/value head with its query heads, [seq, group, head_dim] in float64: what the kernel has read and written. And
   what the reference says, of which single rows are looked at. */
struct checked_group {
    double *kernel[TENSORS], *reference[TENSORS];
    double *lse, *row_lse; /* [group, seqlen_q]; of the rows being checked */
    int64_t seqlen_q, seqlen_k, group, dim;
    double difference[TENSORS + 1],
        size[TENSORS + 1]; /* sums of squares over what was compared; lse is the last */
};

static double *host_memory(int64_t count) {
    double *memory;
    MUST(ALLOCATE(memory, count));
    return memory;
}

static struct checked_group fetch_group(const struct attention_params *p, int64_t batch, int64_t kv_head) {
    struct checked_group g = {};
    g.seqlen_q = p->seqlen_q, g.seqlen_k = p->seqlen_k;
    g.group = p->heads / p->kv_heads, g.dim = p->head_dim;
    for (int t = 0; t < TENSORS; t++) {
        const struct attention_tensor *x = tensor_of((struct attention_params *)p, t);
        int64_t row = (t < K ? g.group : 1) * g.dim, count = (t < K ? g.seqlen_q : g.seqlen_k) * row;
        uint16_t *bits;
        MUST(ALLOCATE(bits, count));
        CUDA_MUST(
            cudaMemcpy2D(bits, (size_t)row * 2, (uint16_t *)x->data + batch * x->batch_stride + kv_head * row,
                (size_t)x->seq_stride * 2, (size_t)row * 2, (size_t)(count / row), cudaMemcpyDeviceToHost));
        g.kernel[t] = host_memory(count);
        g.reference[t] = host_memory(count);
        for (int64_t i = 0; i < count; i++) {
            g.kernel[t][i] = bf16_to_float(bits[i]);
        }
        free(bits);
    }
    int64_t rows = g.group * g.seqlen_q;
    float *lse;
    MUST(ALLOCATE(lse, rows));
    CUDA_MUST(cudaMemcpy(lse, (float *)p->lse + (batch * p->heads + kv_head * g.group) * g.seqlen_q,
        (size_t)rows * sizeof *lse, cudaMemcpyDeviceToHost));
    g.lse = host_memory(rows);
    g.row_lse = host_memory(rows);
    for (int64_t i = 0; i < rows; i++) {
        g.lse[i] = lse[i];
    }
    free(lse);
    return g;
}

static void free_group(struct checked_group *g) {
    for (int t = 0; t < TENSORS; t++) {
        free(g->kernel[t]);
        free(g->reference[t]);
    }
    free(g->lse);
    free(g->row_lse);
}

/* Some queries with some keys, all visible, as a problem of their own. O is what the kernel wrote or what the reference
   is to write. */
static struct attention_params part_of(const struct checked_group *g, const struct attention_params *p,
    int64_t first_query, int64_t queries, int64_t first_key, int64_t keys, bool reference_output) {
    struct attention_params r = {};
    r.dtype = DTYPE_F64, r.batch = 1, r.kv_heads = 1, r.heads = g->group, r.head_dim = g->dim,
    r.scale = p->scale;
    r.seqlen_q = queries, r.seqlen_k = keys;
    for (int t = 0; t < TENSORS; t++) {
        bool output = t == DQ || t == DK || t == DV || (t == O && reference_output);
        int64_t heads = t < K ? g->group : 1, first = t < K ? first_query : first_key;
        *tensor_of(&r, t) =
            attention_dense((output ? g->reference[t] : g->kernel[t]) + first * heads * g->dim,
                t < K ? queries : keys, heads, g->dim);
    }
    r.lse = g->row_lse;
    return r;
}

static void compare(
    struct checked_group *g, int t, const double *kernel, const double *reference, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        g->difference[t] += (kernel[i] - reference[i]) * (kernel[i] - reference[i]);
        g->size[t] += reference[i] * reference[i];
    }
}

static void compare_row(struct checked_group *g, int t, int64_t row) {
    int64_t count = (t < K ? g->group : 1) * g->dim;
    compare(g, t, g->kernel[t] + row * count, g->reference[t] + row * count, count);
}

/* O, lse and dQ of one query, from the keys that it sees: at least one */
static void check_query(struct checked_group *g, const struct attention_params *p, int64_t i) {
    int64_t keys = p->causal ? i + 1 + g->seqlen_k - g->seqlen_q : g->seqlen_k;
    struct attention_params r = part_of(g, p, i, 1, 0, keys, true);
    MUST(attention_reference_forward(&r));
    MUST(attention_reference_backward(&r));
    compare_row(g, O, i);
    compare_row(g, DQ, i);
    for (int64_t h = 0; h < g->group; h++) {
        compare(g, TENSORS, g->lse + h * g->seqlen_q + i, g->row_lse + h, 1);
    }
}

/* dK and dV of one key, from the queries that see it: at least one */
static void check_key(struct checked_group *g, const struct attention_params *p, int64_t j) {
    int64_t first = p->causal ? max_i64(j + g->seqlen_q - g->seqlen_k, 0) : 0, queries = g->seqlen_q - first;
    for (int64_t h = 0; h < g->group; h++) {
        memcpy(g->row_lse + h * queries, g->lse + h * g->seqlen_q + first, (size_t)queries * sizeof *g->lse);
    }
    struct attention_params r = part_of(g, p, first, queries, j, 1, false);
    MUST(attention_reference_backward(&r));
    compare_row(g, DK, j);
    compare_row(g, DV, j);
}

/* What it may be: P or dS, O, D and the result itself are rounded to bf16, each by 2^-9 at most. */
static const double LARGEST_ROW_ERROR = 1.0 / 128;

/* The largest ||kernel - reference|| / ||reference|| of O, lse, dQ, dK and dV over `rows` random queries and keys, the
   last of each among them, of a random head. NaN if there is one. */
static double relative_error_of_rows(const struct attention_params *p, int rows) {
    struct checked_group g = fetch_group(p, rand() % p->batch, rand() % p->kv_heads);
    int64_t unseeing = p->causal ? max_i64(g.seqlen_q - g.seqlen_k, 0) : 0; /* queries */
    for (int i = 0; i < rows; i++) {
        check_query(&g, p, i == 0 ? g.seqlen_q - 1 : unseeing + rand() % (g.seqlen_q - unseeing));
        check_key(&g, p, i == 0 ? g.seqlen_k - 1 : rand() % g.seqlen_k);
    }
    double largest = 0;
    for (int t = 0; t <= TENSORS; t++) {
        if (t == TENSORS || is_output(t)) {
            double error = sqrt(g.difference[t] / g.size[t]);
            largest = error <= largest ? largest : error;
        }
    }
    free_group(&g);
    return largest;
}

#endif
