/* The attention reference, that every attention kernel is held against, itself held against values worked out by hand,
   against finite differences of its own forward, and against the checks that guard every call. */
#include "attention/attention.h"
#include "llmc/backend.h"
#include "llmc/random.h"
#include "test/test.h"

#include <stdlib.h>

/* ---- problems ---- */

/* Float64 Q, K, V, O, dO, dQ, dK, dV and lse, each with memory of its own. */
struct problem {
    struct attention_params params;
    double *memory;
};

enum { TENSORS = 8 };

static struct attention_tensor *tensor_of(struct attention_params *p, int index) {
    struct attention_tensor *tensors[TENSORS] = {
        &p->q, &p->o, &p->d_o, &p->dq, &p->k, &p->v, &p->dk, &p->dv}; /* first four: query side */
    return tensors[index];
}

/* Random inputs, outputs poisoned with NaN. */
static struct problem problem_new(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads,
    int64_t kv_heads, int64_t head_dim, bool causal, uint64_t seed) {
    struct problem problem = {.params = {.dtype = DTYPE_F64,
                                  .batch = batch,
                                  .seqlen_q = seqlen_q,
                                  .seqlen_k = seqlen_k,
                                  .heads = heads,
                                  .kv_heads = kv_heads,
                                  .head_dim = head_dim,
                                  .scale = 0.7,
                                  .causal = causal}};
    struct attention_params *p = &problem.params;
    int64_t q_count = batch * seqlen_q * heads * head_dim, k_count = batch * seqlen_k * kv_heads * head_dim;
    int64_t count = 4 * q_count + 4 * k_count + batch * heads * seqlen_q;
    problem.memory = malloc((size_t)count * sizeof *problem.memory);
    if (problem.memory == NULL) {
        exit(1);
    }
    for (int64_t i = 0; i < count; i++) {
        problem.memory[i] = random_normal(seed, 0, (uint64_t)i);
    }
    double *next = problem.memory;
    for (int i = 0; i < TENSORS; i++) {
        bool query_side = i < 4;
        *tensor_of(p, i) =
            attention_dense(next, query_side ? seqlen_q : seqlen_k, query_side ? heads : kv_heads, head_dim);
        next += query_side ? q_count : k_count;
    }
    p->lse = next;
    for (int64_t i = 0; i < q_count; i++) {
        ((double *)p->o.data)[i] = ((double *)p->dq.data)[i] = NAN;
    }
    for (int64_t i = 0; i < k_count; i++) {
        ((double *)p->dk.data)[i] = ((double *)p->dv.data)[i] = NAN;
    }
    return problem;
}

static double *at(const struct attention_tensor *t, int64_t b, int64_t i, int64_t h, int64_t d) {
    return (double *)t->data + b * t->batch_stride + i * t->seq_stride + h * t->head_stride + d;
}

/* sum(O * dO): the scalar whose gradients backward gives. */
static double objective(const struct attention_params *p) {
    double sum = 0;
    for (int64_t i = 0; i < p->batch * p->seqlen_q * p->heads * p->head_dim; i++) {
        sum += ((double *)p->o.data)[i] * ((double *)p->d_o.data)[i];
    }
    return sum;
}

/* ---- values by hand ---- */

static void test_one_key_gives_its_value_and_its_score_as_lse(void) {
    struct problem problem = problem_new(1, 1, 1, 1, 1, 3, false, 1);
    struct attention_params *p = &problem.params;
    EXPECT(attention_reference_forward(p) == STATUS_OK);
    double score = 0;
    for (int d = 0; d < 3; d++) {
        EXPECT_NEAR(*at(&p->o, 0, 0, 0, d), *at(&p->v, 0, 0, 0, d), 1e-15);
        score += 0.7 * *at(&p->q, 0, 0, 0, d) * *at(&p->k, 0, 0, 0, d);
    }
    EXPECT_NEAR(((double *)p->lse)[0], score, 1e-15);
    free(problem.memory);
}

static void test_two_keys_are_weighted_three_to_one(void) {
    struct problem problem = problem_new(1, 1, 2, 1, 1, 1, false, 2);
    struct attention_params *p = &problem.params;
    p->scale = 1;
    *at(&p->q, 0, 0, 0, 0) = 1;
    *at(&p->k, 0, 0, 0, 0) = log(3.0), *at(&p->k, 0, 1, 0, 0) = 0;
    *at(&p->v, 0, 0, 0, 0) = 8, *at(&p->v, 0, 1, 0, 0) = -4;
    *at(&p->d_o, 0, 0, 0, 0) = 1;
    EXPECT(attention_reference_forward(p) == STATUS_OK);
    EXPECT(attention_reference_backward(p) == STATUS_OK);
    EXPECT_NEAR(*at(&p->o, 0, 0, 0, 0), 0.75 * 8 - 0.25 * 4, 1e-14); /* 5 */
    EXPECT_NEAR(((double *)p->lse)[0], log(4.0), 1e-15);
    EXPECT_NEAR(*at(&p->dv, 0, 0, 0, 0), 0.75, 1e-15);
    EXPECT_NEAR(*at(&p->dv, 0, 1, 0, 0), 0.25, 1e-15);
    /* ds = p (v - o): 0.75 * 3, 0.25 * -9; dk = ds q, dq = sum ds k */
    EXPECT_NEAR(*at(&p->dk, 0, 0, 0, 0), 2.25, 1e-14);
    EXPECT_NEAR(*at(&p->dk, 0, 1, 0, 0), -2.25, 1e-14);
    EXPECT_NEAR(*at(&p->dq, 0, 0, 0, 0), 2.25 * log(3.0), 1e-14);
    free(problem.memory);
}

static void test_causal_mask_ends_at_the_bottom_right(void) {
    /* Keys of zero are all equal, so that O is the mean of the visible values: 1, 2, 3, 4, 5. */
    struct problem problem = problem_new(1, 3, 5, 1, 1, 1, true, 3);
    struct attention_params *p = &problem.params;
    for (int j = 0; j < 5; j++) {
        *at(&p->k, 0, j, 0, 0) = 0;
        *at(&p->v, 0, j, 0, 0) = j + 1;
    }
    EXPECT(attention_reference_forward(p) == STATUS_OK);
    EXPECT_NEAR(*at(&p->o, 0, 0, 0, 0), 2.0, 1e-15);
    EXPECT_NEAR(*at(&p->o, 0, 1, 0, 0), 2.5, 1e-15);
    EXPECT_NEAR(*at(&p->o, 0, 2, 0, 0), 3.0, 1e-15);
    EXPECT_NEAR(((double *)p->lse)[0], log(3.0), 1e-15);
    free(problem.memory);
}

static void test_a_row_that_sees_nothing_gives_zero_and_no_gradient(void) {
    struct problem problem = problem_new(1, 3, 1, 1, 1, 2, true, 4);
    struct attention_params *p = &problem.params;
    EXPECT(attention_reference_forward(p) == STATUS_OK);
    EXPECT(attention_reference_backward(p) == STATUS_OK);
    for (int i = 0; i < 2; i++) {
        EXPECT(((double *)p->lse)[i] == -INFINITY);
        for (int d = 0; d < 2; d++) {
            EXPECT(*at(&p->o, 0, i, 0, d) == 0);
            EXPECT(*at(&p->dq, 0, i, 0, d) == 0);
        }
    }
    for (int d = 0; d < 2; d++) {
        EXPECT_NEAR(*at(&p->o, 0, 2, 0, d), *at(&p->v, 0, 0, 0, d), 1e-15);
        EXPECT_NEAR(*at(&p->dv, 0, 0, 0, d), *at(&p->d_o, 0, 2, 0, d), 1e-15); /* from the last row alone */
    }
    free(problem.memory);
}

static void test_large_scores_do_not_overflow(void) {
    struct problem problem = problem_new(1, 1, 2, 1, 1, 1, false, 5);
    struct attention_params *p = &problem.params;
    p->scale = 1;
    *at(&p->q, 0, 0, 0, 0) = 1000;
    *at(&p->k, 0, 0, 0, 0) = 1000, *at(&p->k, 0, 1, 0, 0) = 999;
    EXPECT(attention_reference_forward(p) == STATUS_OK);
    EXPECT_NEAR(*at(&p->o, 0, 0, 0, 0), *at(&p->v, 0, 0, 0, 0), 1e-15);
    EXPECT_NEAR(((double *)p->lse)[0], 1e6, 1e-9);
    free(problem.memory);
}

static void test_grouped_heads_read_the_key_head_of_their_group(void) {
    struct problem problem = problem_new(2, 3, 4, 6, 2, 5, true, 6);
    struct attention_params *p = &problem.params;
    EXPECT(attention_reference_forward(p) == STATUS_OK);
    for (int64_t h = 0; h < 6; h++) {
        /* the same head alone */
        struct attention_params one = *p;
        double o[2 * 3 * 5], lse[2 * 3];
        one.heads = one.kv_heads = 1;
        one.q.data = at(&p->q, 0, 0, h, 0);
        one.k.data = at(&p->k, 0, 0, h / 3, 0);
        one.v.data = at(&p->v, 0, 0, h / 3, 0);
        one.o = attention_dense(o, 3, 1, 5);
        one.lse = lse;
        EXPECT(attention_reference_forward(&one) == STATUS_OK);
        for (int64_t b = 0; b < 2; b++) {
            for (int64_t i = 0; i < 3; i++) {
                EXPECT(((double *)p->lse)[(b * 6 + h) * 3 + i] == lse[b * 3 + i]);
                EXPECT(memcmp(at(&p->o, b, i, h, 0), at(&one.o, b, i, 0, 0), 5 * sizeof(double)) == 0);
            }
        }
    }
    free(problem.memory);
}

/* ---- gradients ---- */

/* Every element of dQ, dK and dV against the central difference of sum(O * dO). */
static void expect_gradients_match_differences(struct problem *problem) {
    struct attention_params *p = &problem->params;
    const struct {
        struct attention_tensor *value, *gradient;
        int64_t count;
    } pairs[] = {{&p->q, &p->dq, p->batch * p->seqlen_q * p->heads * p->head_dim},
        {&p->k, &p->dk, p->batch * p->seqlen_k * p->kv_heads * p->head_dim},
        {&p->v, &p->dv, p->batch * p->seqlen_k * p->kv_heads * p->head_dim}};
    EXPECT(attention_reference_forward(p) == STATUS_OK);
    EXPECT(attention_reference_backward(p) == STATUS_OK);
    const double step = 1e-5;
    for (int t = 0; t < 3; t++) {
        for (int64_t i = 0; i < pairs[t].count; i++) {
            double *value = (double *)pairs[t].value->data + i, kept = *value;
            *value = kept + step;
            attention_reference_forward(p);
            double above = objective(p);
            *value = kept - step;
            attention_reference_forward(p);
            double below = objective(p);
            *value = kept;
            EXPECT_NEAR(((double *)pairs[t].gradient->data)[i], (above - below) / (2 * step), 1e-8);
        }
    }
}

static void test_gradients_match_finite_differences(void) {
    struct problem problem = problem_new(2, 4, 4, 2, 2, 3, false, 7);
    expect_gradients_match_differences(&problem);
    free(problem.memory);
}

static void test_gradients_match_finite_differences_causal_with_groups(void) {
    struct problem problem = problem_new(1, 3, 5, 4, 2, 3, true, 8);
    expect_gradients_match_differences(&problem);
    free(problem.memory);
}

static void test_gradients_match_finite_differences_when_rows_see_nothing(void) {
    struct problem problem = problem_new(1, 5, 3, 2, 1, 2, true, 9);
    expect_gradients_match_differences(&problem);
    free(problem.memory);
}

/* ---- layouts ---- */

static void test_packed_qkv_gives_the_same_bits_as_separate_tensors(void) {
    enum { B = 2, T = 5, H = 4, KV = 2, D = 3, PACKED = H + 2 * KV };
    struct problem problem = problem_new(B, T, T, H, KV, D, true, 10);
    struct attention_params *p = &problem.params, packed = *p;
    double qkv[B * T * PACKED * D], d_qkv[B * T * PACKED * D], o[B * T * H * D];
    packed.q = attention_packed(qkv, sizeof *qkv, T, PACKED, D, 0);
    packed.k = attention_packed(qkv, sizeof *qkv, T, PACKED, D, H);
    packed.v = attention_packed(qkv, sizeof *qkv, T, PACKED, D, H + KV);
    packed.dq = attention_packed(d_qkv, sizeof *d_qkv, T, PACKED, D, 0);
    packed.dk = attention_packed(d_qkv, sizeof *d_qkv, T, PACKED, D, H);
    packed.dv = attention_packed(d_qkv, sizeof *d_qkv, T, PACKED, D, H + KV);
    packed.o = attention_dense(o, T, H, D);
    const struct {
        struct attention_tensor *separate, *packed;
        int64_t heads;
    } inputs[] = {{&p->q, &packed.q, H}, {&p->k, &packed.k, KV}, {&p->v, &packed.v, KV}},
      outputs[] = {
          {&p->o, &packed.o, H}, {&p->dq, &packed.dq, H}, {&p->dk, &packed.dk, KV}, {&p->dv, &packed.dv, KV}};
    for (int t = 0; t < 3; t++) {
        for (int64_t row = 0; row < B * T * inputs[t].heads; row++) {
            int64_t b = row / (T * inputs[t].heads), i = row / inputs[t].heads % T, h = row % inputs[t].heads;
            memcpy(at(inputs[t].packed, b, i, h, 0), at(inputs[t].separate, b, i, h, 0), D * sizeof(double));
        }
    }
    EXPECT(attention_reference_forward(p) == STATUS_OK && attention_reference_backward(p) == STATUS_OK);
    EXPECT(attention_reference_forward(&packed) == STATUS_OK);
    EXPECT(attention_reference_backward(&packed) == STATUS_OK);
    for (int t = 0; t < 4; t++) {
        for (int64_t row = 0; row < B * T * outputs[t].heads; row++) {
            int64_t b = row / (T * outputs[t].heads), i = row / outputs[t].heads % T,
                    h = row % outputs[t].heads;
            EXPECT(memcmp(at(outputs[t].packed, b, i, h, 0), at(outputs[t].separate, b, i, h, 0),
                       D * sizeof(double)) == 0);
        }
    }
    free(problem.memory);
}

static void test_reference_agrees_with_the_cpu_backend(void) {
    enum { B = 2, T = 37, H = 4, KV = 2, D = 16, PACKED = H + 2 * KV };
    static double qkv[B * T * PACKED * D], d_out[B * T * H * D], d_qkv[B * T * PACKED * D],
        backend_d_qkv[B * T * PACKED * D], out[B * T * H * D], backend_out[B * T * H * D], lse[B * H * T],
        backend_lse[B * H * T];
    const struct attention_shape shape = {B, T, H, KV, D};
    for (int i = 0; i < B * T * PACKED * D; i++) {
        qkv[i] = random_normal(12, 0, (uint64_t)i);
    }
    for (int i = 0; i < B * T * H * D; i++) {
        d_out[i] = random_normal(12, 1, (uint64_t)i);
    }
    struct attention_params p = {.dtype = DTYPE_F64,
        .batch = B,
        .seqlen_q = T,
        .seqlen_k = T,
        .heads = H,
        .kv_heads = KV,
        .head_dim = D,
        .scale = 0.25, /* 1 / sqrt(D), as the backend has it */
        .causal = true,
        .q = attention_packed(qkv, sizeof *qkv, T, PACKED, D, 0),
        .k = attention_packed(qkv, sizeof *qkv, T, PACKED, D, H),
        .v = attention_packed(qkv, sizeof *qkv, T, PACKED, D, H + KV),
        .dq = attention_packed(d_qkv, sizeof *d_qkv, T, PACKED, D, 0),
        .dk = attention_packed(d_qkv, sizeof *d_qkv, T, PACKED, D, H),
        .dv = attention_packed(d_qkv, sizeof *d_qkv, T, PACKED, D, H + KV),
        .o = attention_dense(out, T, H, D),
        .d_o = attention_dense(d_out, T, H, D),
        .lse = lse};
    EXPECT(attention_reference_forward(&p) == STATUS_OK && attention_reference_backward(&p) == STATUS_OK);

    struct backend *b;
    void *workspace = NULL, *saved = NULL;
    EXPECT(backend_cpu_f64_create(&b, 1) == STATUS_OK);
    EXPECT(b->memory_allocate(b, &workspace, backend_attention_workspace_bytes(&b->profile, shape) + 1) ==
           STATUS_OK);
    EXPECT(b->memory_allocate(b, &saved, backend_attention_saved_bytes(&b->profile, shape) + 1) == STATUS_OK);
    EXPECT(b->attention_forward(b, backend_out, backend_lse, saved, workspace, qkv, shape) == STATUS_OK);
    EXPECT(b->attention_backward(
               b, backend_d_qkv, workspace, d_out, backend_out, backend_lse, saved, qkv, shape) == STATUS_OK);
    for (int i = 0; i < B * T * H * D; i++) {
        EXPECT_NEAR(backend_out[i], out[i], 1e-12);
    }
    for (int i = 0; i < B * H * T; i++) {
        EXPECT_NEAR(backend_lse[i], lse[i], 1e-12);
    }
    for (int i = 0; i < B * T * PACKED * D; i++) {
        EXPECT_NEAR(backend_d_qkv[i], d_qkv[i], 1e-12);
    }
    b->memory_free(b, workspace);
    b->memory_free(b, saved);
    b->free(b);
}

/* ---- checks ---- */

/* A valid call of the standard kernel; nothing behind the pointers is touched by a check. */
static struct attention_params valid_params(void) {
    static _Alignas(256) char somewhere[512];
    struct attention_params p = {.dtype = DTYPE_BF16,
        .batch = 2,
        .seqlen_q = 3,
        .seqlen_k = 5,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 64,
        .scale = 0.125,
        .lse = somewhere,
        .saved = somewhere,
        .workspace = somewhere};
    for (int i = 0; i < TENSORS; i++) {
        *tensor_of(&p, i) = attention_dense(somewhere, i < 4 ? 3 : 5, i < 4 ? 4 : 2, 64);
    }
    return p;
}

#define EXPECT_REFUSED(change, message)                                                                      \
    do {                                                                                                     \
        struct attention_params p = valid_params();                                                          \
        change;                                                                                              \
        EXPECT(attention_check("standard", &p, true) == STATUS_ERROR);                                       \
        EXPECT_CONTAINS(error_message(), message);                                                           \
    } while (0)

static void test_valid_parameters_pass(void) {
    struct attention_params p = valid_params();
    EXPECT(attention_check("standard", &p, false) == STATUS_OK);
    EXPECT(attention_check("standard", &p, true) == STATUS_OK);
    p.batch = 1;
    p.d_o.batch_stride = 7; /* never used */
    p.d_o.seq_stride = 0;   /* an input may repeat */
    EXPECT(attention_check("standard", &p, true) == STATUS_OK);
    p.o.data = NULL; /* checked in both directions */
    EXPECT(attention_check("standard", &p, false) == STATUS_ERROR);
    p = valid_params();
    p.dq.data = p.d_o.data = NULL; /* forward does not look */
    EXPECT(attention_check("standard", &p, false) == STATUS_OK);
}

static void test_invalid_parameters_are_refused_with_the_reason(void) {
    EXPECT_REFUSED(p.dtype = DTYPE_F32, "dtype F32, must be BF16 or F16");
    EXPECT_REFUSED(p.batch = 0, "batch is 0");
    EXPECT_REFUSED(p.seqlen_k = -1, "seqlen_k is -1");
    EXPECT_REFUSED(p.seqlen_q = (int64_t)1 << 31, "seqlen_q is 2147483648");
    EXPECT_REFUSED(p.kv_heads = 3, "heads 4 is not a multiple of kv_heads 3");
    EXPECT_REFUSED(p.head_dim = 60, "head_dim is 60, must be a multiple of 8");
    EXPECT_REFUSED(p.head_dim = 264, "head_dim is 264, must be a multiple of 8, at most 256");
    EXPECT_REFUSED(p.scale = 0, "scale is 0");
    EXPECT_REFUSED(p.scale = NAN, "scale is nan");
    EXPECT_REFUSED(p.q.data = NULL, "q has no data");
    EXPECT_REFUSED(p.lse = NULL, "lse has no data");
    EXPECT_REFUSED(p.d_o.dim_stride = 3, "d_o has stride 3 in its last dimension, must be 1");
    EXPECT_REFUSED(p.d_o.seq_stride = 257, "seq_stride of d_o is 257 elements, must be a multiple of 8");
    EXPECT_REFUSED(p.dk.head_stride = 0, "head_stride of dk is 0: its rows of 64 overlap");
    EXPECT_REFUSED(p.v.data = (char *)p.v.data + 2, "must be a multiple of 16 bytes");
    EXPECT_REFUSED(p.saved = NULL, "saved is NULL, needs 512 bytes");
    EXPECT_REFUSED(p.workspace = NULL, "workspace is NULL, needs 5376 bytes");
    EXPECT_REFUSED(p.workspace = (char *)p.workspace + 16, "is not a multiple of 256 bytes");
    EXPECT_REFUSED((p.batch = p.heads = p.seqlen_q = p.seqlen_k = 1 << 30), "more memory than can be");
    struct attention_params p = valid_params();
    EXPECT(attention_check("fa9", &p, true) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "no kernel \"fa9\"; known are");
    EXPECT(attention_reference_forward(&p) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "dtype BF16, must be F64");
}

static void test_the_standard_kernel_keeps_its_probabilities(void) {
    struct attention_params p = {.dtype = DTYPE_BF16,
        .batch = 16,
        .seqlen_q = 2048,
        .seqlen_k = 2048,
        .heads = 16,
        .kv_heads = 16,
        .head_dim = 128};
    size_t one_sequence = (size_t)16 * 2048 * 2048 * 2;
    EXPECT(attention_saved_bytes("standard", &p) == 16 * one_sequence);
    EXPECT(attention_workspace_bytes("standard", &p) == one_sequence);
    p.kv_heads = 2; /* dK and dV of one sequence in fp32 as well */
    EXPECT(attention_workspace_bytes("standard", &p) == one_sequence + (size_t)2 * 2048 * 2 * 128 * 4);
    EXPECT(attention_saved_bytes("fa9", &p) == 0);
}

static void test_memory_of_the_flash_kernels_is_linear_in_the_sequence(void) {
    struct attention_params p = {.dtype = DTYPE_BF16,
        .batch = 1,
        .seqlen_q = 1 << 18,
        .seqlen_k = 1 << 18,
        .heads = 16,
        .kv_heads = 16,
        .head_dim = 128};
    EXPECT(attention_saved_bytes("fa2", &p) == 0 && attention_saved_bytes("cut1", &p) == 0);
    EXPECT(attention_saved_bytes("fa1", &p) == (size_t)2 * 16 * (1 << 18) * 4); /* m and l */
    size_t long_bytes = attention_workspace_bytes("fa2", &p);
    p.seqlen_q = p.seqlen_k = 1 << 16;
    size_t short_bytes = attention_workspace_bytes("fa2", &p);
    EXPECT_NEAR((double)long_bytes / (double)short_bytes, 4, 1e-3);
    /* dQ in fp32 is most of it */
    EXPECT(short_bytes > (size_t)16 * 65536 * 128 * 4 && short_bytes < (size_t)16 * 65536 * 132 * 4);
    /* deterministic: a sum of dQ for every 1024 keys, at most 16 */
    p.deterministic = true;
    p.seqlen_k = 3000;
    EXPECT_NEAR((double)attention_workspace_bytes("fa2", &p) / (double)short_bytes, 3, 0.1);
    p.seqlen_k = 1 << 18;
    EXPECT_NEAR((double)attention_workspace_bytes("fa2", &p) / (double)short_bytes, 16, 0.5);
    EXPECT_NEAR((double)attention_workspace_bytes("fa3", &p) / (double)short_bytes, 1, 0.01); /* always one */
}

static void test_kernels_are_listed_best_first(void) {
    EXPECT_STRING(attention_kernel_name(0), "fa3");
    EXPECT_STRING(attention_kernel_name(5), "standard");
    EXPECT(attention_kernel_name(6) == NULL && attention_kernel_name(-1) == NULL);
}

static void test_the_best_kernel_suits_the_gpu_and_the_head_dimension(void) {
    EXPECT_STRING(attention_kernel_best(90, 128), "fa3");
    EXPECT_STRING(attention_kernel_best(90, 256), "fa3");
    EXPECT(attention_kernel_best(90, 264) == NULL);
    EXPECT_STRING(attention_kernel_best(80, 64), "fa2");
    EXPECT_STRING(attention_kernel_best(100, 64), "fa2");
    EXPECT(attention_kernel_best(75, 64) == NULL);
    EXPECT(!attention_kernel_suits("fa3", 89, 64) && !attention_kernel_suits("fa9", 90, 64));
}

int main(void) {
    RUN(test_one_key_gives_its_value_and_its_score_as_lse);
    RUN(test_two_keys_are_weighted_three_to_one);
    RUN(test_causal_mask_ends_at_the_bottom_right);
    RUN(test_a_row_that_sees_nothing_gives_zero_and_no_gradient);
    RUN(test_large_scores_do_not_overflow);
    RUN(test_grouped_heads_read_the_key_head_of_their_group);
    RUN(test_gradients_match_finite_differences);
    RUN(test_gradients_match_finite_differences_causal_with_groups);
    RUN(test_gradients_match_finite_differences_when_rows_see_nothing);
    RUN(test_packed_qkv_gives_the_same_bits_as_separate_tensors);
    RUN(test_reference_agrees_with_the_cpu_backend);
    RUN(test_valid_parameters_pass);
    RUN(test_invalid_parameters_are_refused_with_the_reason);
    RUN(test_the_standard_kernel_keeps_its_probabilities);
    RUN(test_memory_of_the_flash_kernels_is_linear_in_the_sequence);
    RUN(test_kernels_are_listed_best_first);
    RUN(test_the_best_kernel_suits_the_gpu_and_the_head_dimension);
    return test_summary();
}
