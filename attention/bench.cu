/* TFLOP/s of the attention kernels over the FlashAttention-2 paper's grid, and a little more.

   usage: bench-attention [--kernel NAME] [--head-dim D] [--seqlen S] [--repeats N] [--json FILE] [--deterministic]
          (--kernel, --head-dim and --seqlen keep only the cases that agree)

   The grid: 16,384 tokens, hidden dimension 2048 (2560 for head dimension 80), bf16, causal and not. FLOPs: forward 4
   seqlen^2 head_dim heads a sequence, half of it causal; backward 2.5 times that. Times are medians of single calls
   between events, after a warm-up, on random data.

   Before a kernel is timed, random rows of its results are compared with the float64 reference; a case that is wrong
   prints "wrong" and makes the exit status 1. */
#include "attention/attention.h"
#include "llmc/random.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        if ((call) != STATUS_OK) {                                                                           \
            fprintf(stderr, "bench-attention: %s\n", error_message());                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define CUDA_MUST(call)                                                                                      \
    do {                                                                                                     \
        cudaError_t error_ = (call);                                                                         \
        if (error_ != cudaSuccess) {                                                                         \
            fprintf(stderr, "bench-attention: %s: %s\n", #call, cudaGetErrorString(error_));                 \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

struct bench_case {
    int64_t head_dim, seqlen, batch, heads, kv_heads;
    bool causal;
};

struct bench_options {
    const char *kernel, *json;
    int64_t head_dim, seqlen;
    int repeats;
    bool deterministic;
};

/* ---- data ---- */

enum { Q, O, D_O, DQ, K, V, DK, DV, TENSORS }; /* query side first */

struct bench_data {
    struct attention_params params;
    size_t saved_bytes, workspace_bytes;
};

static struct attention_tensor *tensor_of(struct attention_params *p, int t) {
    struct attention_tensor *tensors[TENSORS] = {&p->q, &p->o, &p->d_o, &p->dq, &p->k, &p->v, &p->dk, &p->dv};
    return tensors[t];
}

static int64_t elements_of(const struct attention_params *p, int t) {
    return p->batch * p->seqlen_q * (t < K ? p->heads : p->kv_heads) * p->head_dim;
}

__global__ void fill_random(uint16_t *out, int64_t count, uint64_t stream) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        out[i] =
            (uint16_t)(__float_as_uint(random_normal(1, stream, (uint64_t)i)) >> 16); /* bf16, truncated */
    }
}

static void *device_memory(size_t bytes) {
    void *memory = NULL;
    if (bytes > 0) {
        CUDA_MUST(cudaMalloc(&memory, bytes));
        CUDA_MUST(cudaMemset(memory, 0xFF, bytes));
    }
    return memory;
}

static struct attention_params make_data(const struct bench_case *c, bool deterministic) {
    struct attention_params p = {};
    p.dtype = DTYPE_BF16;
    p.batch = c->batch, p.seqlen_q = p.seqlen_k = c->seqlen;
    p.heads = c->heads, p.kv_heads = c->kv_heads, p.head_dim = c->head_dim;
    p.scale = 1 / sqrt((double)c->head_dim);
    p.causal = c->causal, p.deterministic = deterministic;
    for (int t = 0; t < TENSORS; t++) {
        void *data = device_memory((size_t)elements_of(&p, t) * sizeof(uint16_t));
        *tensor_of(&p, t) = attention_dense(data, c->seqlen, t < K ? c->heads : c->kv_heads, c->head_dim);
        if (t == Q || t == K || t == V || t == D_O) {
            fill_random<<<1024, 256>>>((uint16_t *)data, elements_of(&p, t), (uint64_t)t);
        }
    }
    p.lse = device_memory((size_t)(c->batch * c->heads * c->seqlen) * sizeof(float));
    CUDA_MUST(cudaDeviceSynchronize());
    return p;
}

static void free_data(struct attention_params *p) {
    for (int t = 0; t < TENSORS; t++) {
        CUDA_MUST(cudaFree(tensor_of(p, t)->data));
    }
    CUDA_MUST(cudaFree(p->lse));
}

/* ---- is it right ---- */

enum { CHECKED_ROWS = 8 };

/* A key/value head with its query heads, [seq, group, head_dim] in float64: what the kernel has read and written, and
   what the reference says. */
struct checked_group {
    double *kernel[TENSORS], *reference[TENSORS];
    double *lse, *row_lse; /* [group, seqlen]; of the rows being checked */
    int64_t seqlen, group, dim;
    double difference, size; /* sums of squares over what was compared */
};

static double *host_memory(int64_t count) {
    double *memory;
    MUST(ALLOCATE(memory, count));
    return memory;
}

static struct checked_group fetch_group(const struct attention_params *p, int64_t batch, int64_t kv_head) {
    struct checked_group g = {};
    g.seqlen = p->seqlen_q, g.group = p->heads / p->kv_heads, g.dim = p->head_dim;
    for (int t = 0; t < TENSORS; t++) {
        const struct attention_tensor *x = tensor_of((struct attention_params *)p, t);
        int64_t heads = t < K ? g.group : 1, row = heads * g.dim;
        uint16_t *bits;
        MUST(ALLOCATE(bits, g.seqlen * row));
        CUDA_MUST(
            cudaMemcpy2D(bits, (size_t)row * 2, (uint16_t *)x->data + batch * x->batch_stride + kv_head * row,
                (size_t)x->seq_stride * 2, (size_t)row * 2, (size_t)g.seqlen, cudaMemcpyDeviceToHost));
        g.kernel[t] = host_memory(g.seqlen * row);
        g.reference[t] = host_memory(g.seqlen * row);
        for (int64_t i = 0; i < g.seqlen * row; i++) {
            g.kernel[t][i] = bf16_to_float(bits[i]);
        }
        free(bits);
    }
    float *lse;
    MUST(ALLOCATE(lse, g.group * g.seqlen));
    CUDA_MUST(cudaMemcpy(lse, (float *)p->lse + (batch * p->heads + kv_head * g.group) * g.seqlen,
        (size_t)(g.group * g.seqlen) * sizeof *lse, cudaMemcpyDeviceToHost));
    g.lse = host_memory(g.group * g.seqlen);
    g.row_lse = host_memory(g.group * g.seqlen);
    for (int64_t i = 0; i < g.group * g.seqlen; i++) {
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

static void compare(struct checked_group *g, const double *kernel, const double *reference, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        g->difference += (kernel[i] - reference[i]) * (kernel[i] - reference[i]);
        g->size += reference[i] * reference[i];
    }
}

static void compare_rows(struct checked_group *g, int t, int64_t row) {
    int64_t count = (t < K ? g->group : 1) * g->dim;
    compare(g, g->kernel[t] + row * count, g->reference[t] + row * count, count);
}

/* O, lse and dQ of one query, from the keys that it sees */
static void check_query(struct checked_group *g, const struct attention_params *p, int64_t i) {
    struct attention_params r = part_of(g, p, i, 1, 0, p->causal ? i + 1 : g->seqlen, true);
    MUST(attention_reference_forward(&r));
    MUST(attention_reference_backward(&r));
    compare_rows(g, O, i);
    compare_rows(g, DQ, i);
    for (int64_t h = 0; h < g->group; h++) {
        compare(g, g->lse + h * g->seqlen + i, g->row_lse + h, 1);
    }
}

/* dK and dV of one key, from the queries that see it */
static void check_key(struct checked_group *g, const struct attention_params *p, int64_t j) {
    int64_t first = p->causal ? j : 0, queries = g->seqlen - first;
    for (int64_t h = 0; h < g->group; h++) {
        memcpy(g->row_lse + h * queries, g->lse + h * g->seqlen + first, (size_t)queries * sizeof *g->lse);
    }
    struct attention_params r = part_of(g, p, first, queries, j, 1, false);
    MUST(attention_reference_backward(&r));
    compare_rows(g, DK, j);
    compare_rows(g, DV, j);
}

/* Relative error over random rows of a random head. */
static double relative_error(const struct attention_params *p) {
    struct checked_group g = fetch_group(p, rand() % p->batch, rand() % p->kv_heads);
    for (int i = 0; i < CHECKED_ROWS; i++) {
        check_query(&g, p, rand() % g.seqlen);
        check_key(&g, p, rand() % g.seqlen);
    }
    double error = sqrt(g.difference / g.size);
    free_group(&g);
    return error;
}

/* ---- timing ---- */

typedef enum status (*pass)(struct attention *, const struct attention_params *);

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median_ms(struct attention *kernel, const struct attention_params *p, pass run, int repeats) {
    enum { WARM_UP = 3, MOST_REPEATS = 1000 };
    float times[MOST_REPEATS];
    cudaEvent_t begin, end;
    CUDA_MUST(cudaEventCreate(&begin));
    CUDA_MUST(cudaEventCreate(&end));
    repeats = repeats < MOST_REPEATS ? repeats : MOST_REPEATS;
    for (int i = -WARM_UP; i < repeats; i++) {
        CUDA_MUST(cudaEventRecord(begin));
        MUST(run(kernel, p));
        CUDA_MUST(cudaEventRecord(end));
        CUDA_MUST(cudaEventSynchronize(end));
        CUDA_MUST(cudaEventElapsedTime(&times[i < 0 ? 0 : i], begin, end));
    }
    CUDA_MUST(cudaEventDestroy(begin));
    CUDA_MUST(cudaEventDestroy(end));
    qsort(times, (size_t)repeats, sizeof *times, compare_floats);
    return times[repeats / 2];
}

/* ---- the table ---- */

static const double LARGEST_RELATIVE_ERROR = 8e-3; /* of bf16 results */

/* False if the kernel was wrong. */
static bool bench_kernel(
    const struct bench_case *c, struct attention_params *p, const char *name, int repeats, FILE *json) {
    struct attention *kernel;
    MUST(attention_create(&kernel, name));
    p->saved = device_memory(attention_saved_bytes(name, p));
    p->workspace = device_memory(attention_workspace_bytes(name, p));
    MUST(attention_forward(kernel, p));
    MUST(attention_backward(kernel, p));
    double error = relative_error(p), forward = median_ms(kernel, p, attention_forward, repeats);
    double backward = median_ms(kernel, p, attention_backward, repeats);
    double flops =
        4.0 * (double)(c->seqlen * c->seqlen * c->head_dim * c->heads * c->batch) * (c->causal ? 0.5 : 1);
    double rates[] = {
        flops / forward / 1e9, 2.5 * flops / backward / 1e9, 3.5 * flops / (forward + backward) / 1e9};
    bool right = error <= LARGEST_RELATIVE_ERROR;
    printf("%4d %6d %6d %3d/%-3d %-6s %-9s %8.3f %8.3f  %6.1f %6.1f %6.1f  %s\n", (int)c->head_dim,
        (int)c->seqlen, (int)c->batch, (int)c->heads, (int)c->kv_heads, c->causal ? "causal" : "full", name,
        forward, backward, rates[0], rates[1], rates[2], right ? "" : "wrong");
    fflush(stdout);
    if (json != NULL) {
        fprintf(json,
            "{\"kernel\": \"%s\", \"head_dim\": %d, \"seqlen\": %d, \"batch\": %d, \"heads\": %d, "
            "\"kv_heads\": %d, "
            "\"causal\": %s, \"forward_ms\": %.4f, \"backward_ms\": %.4f, \"forward_tflops\": %.1f, "
            "\"backward_tflops\": %.1f, \"both_tflops\": %.1f, \"relative_error\": %.2e}\n",
            name, (int)c->head_dim, (int)c->seqlen, (int)c->batch, (int)c->heads, (int)c->kv_heads,
            c->causal ? "true" : "false", forward, backward, rates[0], rates[1], rates[2], error);
    }
    attention_free(kernel);
    CUDA_MUST(cudaFree(p->saved));
    CUDA_MUST(cudaFree(p->workspace));
    return right;
}

/* Made for this GPU and head dimension, and what it keeps fits: the standard kernel does not at every length. */
static bool suits(const char *name, const struct attention_params *p) {
    struct cudaDeviceProp device;
    CUDA_MUST(cudaGetDeviceProperties(&device, 0));
    if (!attention_kernel_suits(name, 10 * device.major + device.minor, p->head_dim)) {
        return false;
    }
    size_t free_bytes, total_bytes;
    CUDA_MUST(cudaMemGetInfo(&free_bytes, &total_bytes));
    return attention_saved_bytes(name, p) + attention_workspace_bytes(name, p) < free_bytes / 10 * 9;
}

static bool bench_case_run(const struct bench_case *c, const struct bench_options *o, FILE *json) {
    if ((o->head_dim != 0 && o->head_dim != c->head_dim) || (o->seqlen != 0 && o->seqlen != c->seqlen)) {
        return true;
    }
    struct attention_params p = make_data(c, o->deterministic);
    bool right = true;
    const char *name;
    for (int i = 0; (name = attention_kernel_name(i)) != NULL; i++) {
        if ((o->kernel == NULL || strcmp(o->kernel, name) == 0) && suits(name, &p)) {
            right &= bench_kernel(c, &p, name, o->repeats, json);
        }
    }
    free_data(&p);
    return right;
}

static bool bench_grid(const struct bench_options *o, FILE *json) {
    static const int64_t grouped[][5] = {/* head_dim, seqlen, batch, heads, kv_heads */
        {128, 2048, 8, 16, 4}, {128, 8192, 2, 16, 4}, {64, 2048, 8, 32, 1}, {256, 2048, 8, 8, 8},
        {256, 8192, 2, 8, 8}};
    static const int64_t head_dims[] = {64, 128, 80};
    bool right = true;
    for (int causal = 0; causal < 2; causal++) {
        for (int d = 0; d < 3; d++) {
            for (int64_t seqlen = 512; seqlen <= 16384; seqlen *= 2) {
                int64_t heads = (head_dims[d] == 80 ? 2560 : 2048) / head_dims[d];
                struct bench_case c = {head_dims[d], seqlen, 16384 / seqlen, heads, heads, causal == 1};
                right &= bench_case_run(&c, o, json);
            }
        }
        for (size_t i = 0; i < sizeof grouped / sizeof grouped[0]; i++) {
            const int64_t *g = grouped[i];
            struct bench_case c = {g[0], g[1], g[2], g[3], g[4], causal == 1};
            right &= bench_case_run(&c, o, json);
        }
    }
    return right;
}

/* ---- the program ---- */

static const char USAGE[] =
    "usage: bench-attention [--kernel NAME] [--head-dim D] [--seqlen S] [--repeats N] "
    "[--json FILE] [--deterministic]\n";

static struct bench_options parse(int argc, char **argv) {
    struct bench_options o = {};
    o.repeats = 15;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--deterministic") == 0) {
            o.deterministic = true;
            continue;
        }
        if (value != NULL && strcmp(argv[i], "--kernel") == 0) {
            o.kernel = value;
        } else if (value != NULL && strcmp(argv[i], "--json") == 0) {
            o.json = value;
        } else if (value != NULL && strcmp(argv[i], "--head-dim") == 0) {
            o.head_dim = atoll(value);
        } else if (value != NULL && strcmp(argv[i], "--seqlen") == 0) {
            o.seqlen = atoll(value);
        } else if (value != NULL && strcmp(argv[i], "--repeats") == 0 && atoi(value) > 0) {
            o.repeats = atoi(value);
        } else {
            fputs(USAGE, stderr);
            exit(1);
        }
        i++;
    }
    return o;
}

int main(int argc, char **argv) {
    struct bench_options o = parse(argc, argv);
    FILE *json = o.json != NULL ? fopen(o.json, "w") : NULL;
    if (o.json != NULL && json == NULL) {
        fprintf(stderr, "bench-attention: cannot write %s\n", o.json);
        return 1;
    }
    struct cudaDeviceProp device;
    CUDA_MUST(cudaGetDeviceProperties(&device, 0));
    printf("%s, %d multiprocessors; bf16, medians of %d%s\n", device.name, device.multiProcessorCount,
        o.repeats, o.deterministic ? ", deterministic" : "");
    printf("%4s %6s %6s %-7s %-6s %-9s %8s %8s  %6s %6s %6s\n", "dim", "seqlen", "batch", "heads", "mask",
        "kernel", "fwd ms", "bwd ms", "fwd", "bwd", "both TFLOP/s");
    bool right = bench_grid(&o, json);
    if (json != NULL && fclose(json) != 0) {
        fprintf(stderr, "bench-attention: cannot write %s\n", o.json);
        return 1;
    }
    return right ? 0 : 1;
}
