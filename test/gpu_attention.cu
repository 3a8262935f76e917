/* Every attention kernel on the GPU against the float64 reference on the CPU.

   A kernel is as good as its precision allows if its largest error is at most twice (gradients: three times) that of the
   plain formula in the same precision, the standard kernel, plus twice the rounding of the reference at 0.3. The standard
   kernel itself, and every other, must also be within a relative error of the reference in the Euclidean norm.

   Inputs are new in every run; TEST_SEED repeats one. Outputs hold NaN before. TEST_SHORT=1 keeps to small shapes, for
   compute-sanitizer; TEST_KERNEL=NAME to one kernel. */
#include "attention/attention.h"
#include "llmc/random.h"
#include "test/test.h"

#include <cuda_runtime.h>
#include <stdlib.h>
#include <time.h>

static uint64_t seed;

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        if ((call) != STATUS_OK) {                                                                           \
            printf("    %s:%d: %s\n", __FILE__, __LINE__, error_message());                                  \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define CUDA_MUST(call)                                                                                      \
    do {                                                                                                     \
        cudaError_t error_ = (call);                                                                         \
        if (error_ != cudaSuccess) {                                                                         \
            printf("    %s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

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
};

enum { Q, O, D_O, DQ, K, V, DK, DV, TENSORS }; /* query side first */
enum { GAP = 8 };                              /* elements between rows */

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
    void *saved, *workspace;
    size_t saved_bytes, workspace_bytes;
};

static float to_float(enum dtype dtype, uint16_t bits) {
    return dtype == DTYPE_BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

static uint16_t to_bits(enum dtype dtype, float value) {
    return dtype == DTYPE_BF16 ? float_to_bf16(value) : float_to_f16(value);
}

static bool is_output(int t) {
    return t == O || t == DQ || t == DK || t == DV;
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

static void *device_memory(size_t bytes) {
    void *memory = NULL;
    if (bytes > 0) {
        CUDA_MUST(cudaMalloc(&memory, bytes));
        CUDA_MUST(cudaMemset(memory, 0xFF, bytes));
    }
    return memory;
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
    p.memory = (uint16_t *)device_memory((size_t)p.elements * sizeof(uint16_t));
    lay_out(&p);
    MUST(ALLOCATE(p.image, p.elements));
    MUST(ALLOCATE(p.host_lse, s->batch * s->heads * s->seqlen_q));
    p.lse = (float *)device_memory((size_t)(s->batch * s->heads * s->seqlen_q) * sizeof(float));
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

/* Kernels that are not tested stay NULL: other than TEST_KERNEL, or for other GPUs. */
static void create_kernels(void) {
    const char *only = getenv("TEST_KERNEL");
    for (const char *name; (name = attention_kernel_name(kernel_count)) != NULL; kernel_count++) {
        bool standard = strcmp(name, "standard") == 0;
        if (standard) {
            standard_index = kernel_count;
        }
        if (!attention_kernel_suits(name, compute_capability(), 64)) {
            printf("  %s is not tested: it is for other GPUs\n", name);
            EXPECT(attention_create(&kernels[kernel_count], name) == STATUS_ERROR);
            EXPECT_CONTAINS(error_message(), "is needed");
        } else if (only == NULL || standard || strcmp(only, name) == 0) {
            MUST(attention_create(&kernels[kernel_count], name));
        }
    }
}

/* Whether a kernel is tested, and made for this head dimension. */
static bool has_kernel(int kernel, int64_t head_dim) {
    return kernels[kernel] != NULL &&
           attention_kernel_suits(attention_kernel_name(kernel), compute_capability(), head_dim);
}

/* Runs a kernel both ways, outputs and working memory poisoned before; the device's tensors come back to p->image. */
static void run_kernel(struct problem *p, int kernel, bool deterministic) {
    const char *name = attention_kernel_name(kernel);
    struct attention_params a = params_of(p, false);
    a.deterministic = deterministic;
    size_t saved = attention_saved_bytes(name, &a), workspace = attention_workspace_bytes(name, &a);
    if (saved > p->saved_bytes || workspace > p->workspace_bytes) {
        cudaFree(p->saved);
        cudaFree(p->workspace);
        p->saved_bytes = saved, p->workspace_bytes = workspace;
        p->saved = device_memory(saved), p->workspace = device_memory(workspace);
    }
    if (p->workspace != NULL) {
        CUDA_MUST(cudaMemset(p->workspace, 0xFF, p->workspace_bytes));
    }
    if (p->saved != NULL) {
        CUDA_MUST(cudaMemset(p->saved, 0xFF, p->saved_bytes));
    }
    CUDA_MUST(cudaMemset(p->lse, 0xFF, (size_t)(a.batch * a.heads * a.seqlen_q) * sizeof(float)));
    for (int t = 0; t < TENSORS; t++) {
        if (is_output(t)) {
            for_rows(p, t, [](enum dtype, uint16_t *bits, double *, int64_t count) {
                memset(bits, 0xFF, (size_t)count * sizeof *bits);
            });
        }
    }
    CUDA_MUST(
        cudaMemcpy(p->memory, p->image, (size_t)p->elements * sizeof(uint16_t), cudaMemcpyHostToDevice));
    a = params_of(p, false);
    a.deterministic = deterministic;
    MUST(attention_forward(kernels[kernel], &a));
    MUST(attention_backward(kernels[kernel], &a));
    CUDA_MUST(cudaDeviceSynchronize());
    CUDA_MUST(
        cudaMemcpy(p->image, p->memory, (size_t)p->elements * sizeof(uint16_t), cudaMemcpyDeviceToHost));
}

/* ---- comparison ---- */

struct error {
    double largest;  /* of an element */
    double relative; /* ||kernel - reference|| / ||reference|| */
    double rounding; /* the largest rounding error of reference + 0.3 */
    double size;     /* root mean square of the reference */
};

static struct error error_sums;
static int64_t error_count;

static void add_row_error(enum dtype dtype, uint16_t *bits, double *reference, int64_t count) {
    for (int64_t d = 0; d < count; d++) {
        double difference = fabs(to_float(dtype, bits[d]) - reference[d]);
        float shifted = (float)reference[d] + 0.3f;
        double rounding = fabs((double)to_float(dtype, to_bits(dtype, shifted)) - shifted);
        error_sums.largest =
            difference <= error_sums.largest ? error_sums.largest : difference; /* NaN stays */
        error_sums.relative += difference * difference;
        error_sums.rounding = fmax(error_sums.rounding, rounding);
        error_sums.size += reference[d] * reference[d];
    }
    error_count += count;
}

static struct error error_of(struct problem *p, int t) {
    memset(&error_sums, 0, sizeof error_sums);
    error_count = 0;
    for_rows(p, t, add_row_error);
    struct error e = error_sums;
    e.relative = sqrt(e.relative) / fmax(sqrt(e.size), 1e-30);
    e.size = sqrt(e.size / (double)error_count);
    return e;
}

static double lse_error(struct problem *p) {
    int64_t count = p->shape.batch * p->shape.heads * p->shape.seqlen_q;
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

static const char *const tensor_names[TENSORS] = {"q", "o", "d_o", "dq", "k", "v", "dk", "dv"};

static void describe(const struct shape *s, const char *kernel) {
    printf("    %s: batch %d, %d x %d, heads %d/%d, head_dim %d, %s, %s, layout %d, seed %llu:\n", kernel,
        (int)s->batch, (int)s->seqlen_q, (int)s->seqlen_k, (int)s->heads, (int)s->kv_heads, (int)s->head_dim,
        s->causal ? "causal" : "full", dtype_name(s->dtype), s->layout, (unsigned long long)seed);
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

static void expect_kernels_match_reference(const struct shape *s) {
    struct problem p = problem_new(s);
    struct attention_params reference = params_of(&p, true);
    MUST(attention_reference_forward(&reference));
    MUST(attention_reference_backward(&reference));
    bool large = s->q_factor > 1;
    double relative_limit = (s->dtype == DTYPE_BF16 ? 8e-3 : 1.2e-3) * (large ? 2 : 1);
    struct error plain[TENSORS];
    run_kernel(&p, standard_index, false);
    for (int t = 0; t < TENSORS; t++) {
        plain[t] = error_of(&p, t);
    }
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (!has_kernel(kernel, s->head_dim)) {
            continue;
        }
        const char *name = attention_kernel_name(kernel);
        int before = test_failures_in_this_;
        run_kernel(&p, kernel, false);
        for (int t = 0; t < TENSORS; t++) {
            if (!is_output(t)) {
                continue;
            }
            struct error e = error_of(&p, t);
            double limit = (t == O ? 2 : 3) * plain[t].largest + 2 * e.rounding;
            /* a few roundings decide, or large scores rounded to 16 bits, as the plain formula does */
            bool loose =
                e.size < 1e-3 || s->seqlen_q * s->seqlen_k < 100 || (large && kernel == standard_index);
            bool close = e.largest <= limit && (e.relative <= relative_limit || loose);
            if (!close) {
                test_failures_in_this_++;
                describe(s, name);
                printf("        %s: largest error %.3g, limit %.3g; relative error %.3g, limit %.3g\n",
                    tensor_names[t], e.largest, limit, e.relative, relative_limit);
            }
        }
        /* scores are rounded to 16 bits by the standard kernel alone */
        double lse_limit = kernel == standard_index
                               ? (s->dtype == DTYPE_BF16 ? 0.05 : 0.01) * (large ? 16 : 1)
                               : 1e-5 * (large ? 16 : 1) + 1e-5;
        EXPECT_NEAR(lse_error(&p), 0, lse_limit);
        EXPECT(gaps_are_untouched(&p));
        if (test_failures_in_this_ > before) {
            describe(s, name);
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

/* Every pair of lengths with every head dimension, causal and not; types, head counts and layouts take turns. The long
   ones would keep the reference busy: there one type, and few heads. */
static void check_head_dim(int64_t head_dim) {
    static int turn;
    for (int i = 0; i < LENGTHS; i++) {
        int64_t pairs = lengths[i][0] * lengths[i][1];
        for (int causal = 0; causal < 2; causal++, turn++) {
            struct shape s = {pairs > 100000 ? 1 : 2, lengths[i][0], lengths[i][1], 6, 6, head_dim,
                causal == 1, turn / 2 % 2 == 0 ? DTYPE_BF16 : DTYPE_F16, (enum layout)(turn / 3 % LAYOUTS), 1,
                1};
            if (pairs > 1000000) {
                s.heads = s.kv_heads = 2;
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
    for (int i = 0; i < HEAD_COUNTS * LAYOUTS * 4; i++) {
        struct shape s = {2, 190, 190, head_counts[i % HEAD_COUNTS][0], head_counts[i % HEAD_COUNTS][1],
            i % 5 < 3 ? 128 : 80, i / (HEAD_COUNTS * LAYOUTS) % 2 == 0,
            i / (HEAD_COUNTS * LAYOUTS * 2) == 0 ? DTYPE_BF16 : DTYPE_F16,
            (enum layout)(i / HEAD_COUNTS % LAYOUTS), 1, 1};
        expect_kernels_match_reference(&s);
    }
}

static void test_large_scores_match_reference(void) {
    for (int i = 0; i < 8; i++) {
        struct shape s = {1, 300, 400, 2, 2, i / 4 == 0 ? 64 : 128, i % 2 == 0,
            i / 2 % 2 == 0 ? DTYPE_BF16 : DTYPE_F16, DENSE, 5, 3};
        expect_kernels_match_reference(&s);
    }
}

/* ---- bits ---- */

/* Output t of every kernel, run `times` times: the same bits. */
static void expect_repeatable(int64_t head_dim, bool causal, bool deterministic, int times) {
    struct shape s = {2, 777, 777, 4, 2, head_dim, causal, DTYPE_BF16, PACKED, 1, 1};
    struct problem p = problem_new(&s);
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (!has_kernel(kernel, head_dim)) {
            continue;
        }
        run_kernel(&p, kernel, deterministic);
        uint16_t *first;
        MUST(ALLOCATE(first, p.elements));
        memcpy(first, p.image, (size_t)p.elements * sizeof *first);
        for (int i = 1; i < times; i++) {
            run_kernel(&p, kernel, deterministic);
            for (int t = 0; t < TENSORS; t++) {
                bool promised = deterministic || t != DQ;
                struct tensor_pair *x = &p.tensors[t];
                for (int64_t row = 0; row < s.batch * x->seq_len * x->heads && promised; row++) {
                    int64_t b = row / (x->seq_len * x->heads), position = row / x->heads % x->seq_len;
                    uint16_t *now = element(&p, &x->device, b, position, row % x->heads);
                    if (memcmp(now, first + (now - p.image), (size_t)s.head_dim * sizeof *now) != 0) {
                        test_failures_in_this_++;
                        describe(&s, attention_kernel_name(kernel));
                        printf("        %s differs in run %d, row %d\n", tensor_names[t], i, (int)row);
                        break;
                    }
                }
            }
        }
        free(first);
    }
    problem_free(&p);
}

static void test_outputs_are_bitwise_repeatable_but_for_dq(void) {
    expect_repeatable(64, false, false, 50);
    expect_repeatable(128, true, false, 50);
}

static void test_deterministic_makes_dq_repeatable_too(void) {
    expect_repeatable(64, true, true, 50);
    expect_repeatable(80, true, true, 20);
    expect_repeatable(128, false, true, 50);
    expect_repeatable(128, true, true, 20);
    expect_repeatable(192, true, true, 10);
    expect_repeatable(256, true, true, 10);
}

/* Sequence 1 and heads 2 and 3 (one group of two) of a batch, computed alone. */
static void test_a_slice_alone_gives_the_same_bits_as_in_a_batch(void) {
    struct shape s = {3, 300, 300, 6, 3, 128, true, DTYPE_BF16, PACKED, 1, 1};
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (kernel == standard_index || !has_kernel(kernel, s.head_dim)) {
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
    struct shape s = {16384, 2, 3, 6, 3, 64, true, DTYPE_BF16, DENSE, 1, 1};
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (kernel == standard_index || !has_kernel(kernel, s.head_dim)) {
            continue; /* it loops over sequences */
        }
        struct problem p = problem_new(&s);
        struct attention_params reference = params_of(&p, true);
        MUST(attention_reference_forward(&reference));
        MUST(attention_reference_backward(&reference));
        run_kernel(&p, kernel, false);
        EXPECT(error_of(&p, O).relative < 8e-3);
        EXPECT(error_of(&p, DQ).relative < 8e-3);
        EXPECT(error_of(&p, DK).relative < 8e-3);
        EXPECT(error_of(&p, DV).relative < 8e-3);
        problem_free(&p);
    }
}

/* The same problem with its second sequence more than 2^31 elements behind the first. */
static void test_offsets_beyond_two_to_the_31_elements(void) {
    const int64_t far = ((int64_t)1 << 31) + 4096;
    size_t free_bytes, total_bytes;
    CUDA_MUST(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (free_bytes < (size_t)(far * 2 * TENSORS) + ((size_t)1 << 30)) {
        printf("    (skipped: needs %d GB of free memory)\n", (int)(far * 2 * TENSORS >> 30) + 1);
        return;
    }
    struct shape s = {2, 200, 200, 2, 2, 64, true, DTYPE_BF16, DENSE, 1, 1};
    struct problem p = problem_new(&s);
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (!has_kernel(kernel, s.head_dim)) {
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

static void test_invalid_arguments_are_refused_before_anything_runs(void) {
    struct shape s = {1, 8, 8, 2, 2, 64, true, DTYPE_BF16, DENSE, 1, 1};
    struct problem p = problem_new(&s);
    struct attention_params a = params_of(&p, false);
    a.d_o.dim_stride = 2;
    a.workspace = p.memory, a.saved = p.memory;
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        if (!has_kernel(kernel, s.head_dim)) {
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
    const char *given = getenv("TEST_SEED");
    seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)time(NULL) * 1000003;
    printf("  TEST_SEED=%llu\n", (unsigned long long)seed);
    create_kernels();
    RUN(test_invalid_arguments_are_refused_before_anything_runs);
    RUN(test_a_slice_alone_gives_the_same_bits_as_in_a_batch);
    RUN(test_all_types_heads_and_layouts_match_reference);
    RUN(test_large_scores_match_reference);
    if (getenv("TEST_SHORT") == NULL) {
        RUN(test_kernels_match_reference_at_small_head_dims);
        RUN(test_kernels_match_reference_at_middle_head_dims);
        RUN(test_kernels_match_reference_at_large_head_dims);
        RUN(test_outputs_are_bitwise_repeatable_but_for_dq);
        RUN(test_deterministic_makes_dq_repeatable_too);
        RUN(test_more_sequences_and_heads_than_a_grid_dimension_has);
        RUN(test_offsets_beyond_two_to_the_31_elements);
    }
    for (int kernel = 0; kernel < kernel_count; kernel++) {
        attention_free(kernels[kernel]);
    }
    return test_summary();
}
