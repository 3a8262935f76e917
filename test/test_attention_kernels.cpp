/* The attention kernels for GPUs, run on the CPU by attention_on_cpu.h and hopper_on_cpu.h, against the float64 reference: every
   generation's tiles, also those of GPUs that are not at hand, and every rung. test_attention_kernels.sh compiles and runs
   this. */
#include "test/hopper_on_cpu.h"

/* what fa2_forward and its like can choose from; the tests name the kernels that they run */
#define FA2_TUNE_HEAD_DIM 64
#define FA2_TUNE_SHARED_KB 99
#include "attention/fa1_backward.cu"
#include "attention/fa1_forward.cu"
#include "attention/fa2_backward.cu"
#include "attention/fa2_forward.cu"
#include "attention/fa3_backward.cu"
#include "attention/fa3_forward.cu"

#include "llmc/random.h"
#include "test/test.h"

/* params.c lists it; it needs cuBLAS */
extern "C" enum status standard_forward(const struct attention *, const struct attention_params *) {
    return fail("not on the CPU");
}
extern "C" enum status standard_backward(const struct attention *, const struct attention_params *) {
    return fail("not on the CPU");
}

/* ---- problems ---- */

struct shape {
    int64_t batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim;
    bool causal, deterministic;
    int larger; /* every third block of 128 keys, the second of them first, is so many times as large, and every third 8
                   queries, the second of them first, are 0; 0: neither */
};

enum { Q, O, D_O, DQ, K, V, DK, DV, TENSORS }; /* query side first */

static attention_tensor &tensor_of(attention_params &p, int t) {
    attention_tensor *tensors[TENSORS] = {&p.q, &p.o, &p.d_o, &p.dq, &p.k, &p.v, &p.dk, &p.dv};
    return *tensors[t];
}

/* Every tensor twice: 16-bit for the kernel, float64 for the reference. */
struct problem {
    attention_params kernel = {}, reference = {};
    std::vector<uint16_t> bits[TENSORS];
    std::vector<double> values[TENSORS];
    std::vector<float> lse;
    std::vector<double> reference_lse;
    std::vector<unsigned char> saved, workspace;
};

enum { ALIGNMENT = 256, GUARD = 4096 }; /* bytes; the guard behind working memory must stay as it is */

static void *aligned(std::vector<unsigned char> &memory, size_t bytes) {
    memory.assign(ALIGNMENT + bytes + GUARD, 0xFF);
    return (void *)(((uintptr_t)memory.data() + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static bool guard_is_untouched(const void *memory, size_t bytes) {
    const unsigned char *guard = (const unsigned char *)memory + bytes;
    return std::all_of(guard, guard + GUARD - ALIGNMENT, [](unsigned char c) { return c == 0xFF; });
}

template <enum dtype TYPE> static void make_tensors(problem &p, const shape &s) {
    for (int t = 0; t < TENSORS; t++) {
        int64_t seqlen = t < K ? s.seqlen_q : s.seqlen_k, heads = t < K ? s.heads : s.kv_heads;
        size_t count = (size_t)(s.batch * seqlen * heads * s.head_dim);
        p.bits[t].assign(count + 8, 0xFFFF); /* NaN */
        p.values[t].assign(count, NAN);
        uint16_t *begin = (uint16_t *)(((uintptr_t)p.bits[t].data() + 15) / 16 * 16);
        for (size_t i = 0; i < count && (t == Q || t == K || t == V || t == D_O); i++) {
            int64_t position = (int64_t)i / s.head_dim / heads % seqlen;
            float factor = s.larger > 0 && t == K && position / 128 % 3 == 1 ? (float)s.larger
                           : s.larger > 0 && t == Q && position / 8 % 3 == 1 ? 0
                                                                             : 1;
            begin[i] = (uint16_t)pack<TYPE>(factor * random_normal(7, (uint64_t)t, i), 0);
            p.values[t][i] = unpack<TYPE>(begin[i]).x;
        }
        tensor_of(p.kernel, t) = attention_dense(begin, seqlen, heads, s.head_dim);
        tensor_of(p.reference, t) = attention_dense(p.values[t].data(), seqlen, heads, s.head_dim);
    }
}

template <enum dtype TYPE> static void make_problem(problem &p, const shape &s, const char *kernel) {
    attention_params sizes = {};
    sizes.batch = s.batch, sizes.seqlen_q = s.seqlen_q, sizes.seqlen_k = s.seqlen_k;
    sizes.heads = s.heads, sizes.kv_heads = s.kv_heads, sizes.head_dim = s.head_dim;
    sizes.scale = 1 / sqrt((double)s.head_dim);
    sizes.causal = s.causal, sizes.deterministic = s.deterministic;
    p.kernel = p.reference = sizes;
    p.kernel.dtype = TYPE, p.reference.dtype = DTYPE_F64;
    make_tensors<TYPE>(p, s);
    p.lse.assign((size_t)(s.batch * s.heads * s.seqlen_q), NAN);
    p.reference_lse.assign(p.lse.size(), NAN);
    p.kernel.lse = p.lse.data(), p.reference.lse = p.reference_lse.data();
    p.kernel.saved = aligned(p.saved, attention_saved_bytes(kernel, &p.kernel));
    p.kernel.workspace = aligned(p.workspace, attention_workspace_bytes(kernel, &p.kernel));
}

template <enum dtype TYPE> static void expect_results_match(problem &p) {
    static const char *const names[TENSORS] = {"q", "o", "d_o", "dq", "k", "v", "dk", "dv"};
    const double limit = TYPE == DTYPE_BF16 ? 5e-3 : 7e-4;
    for (int t : {(int)O, (int)DQ, (int)DK, (int)DV}) {
        const uint16_t *bits = (const uint16_t *)tensor_of(p.kernel, t).data;
        double difference = 0, size = 0;
        for (size_t i = 0; i < p.values[t].size(); i++) {
            double value = unpack<TYPE>(bits[i]).x, reference = p.values[t][i];
            difference += (value - reference) * (value - reference);
            size += reference * reference;
        }
        double floor = 1e-2 * sqrt((double)p.values[t].size()); /* gradients can be 0 */
        if (!(sqrt(difference) <= limit * (sqrt(size) + floor))) {
            test_failures_in_this_++;
            printf("    %s: relative error %.3g\n", names[t], sqrt(difference / size));
        }
    }
    for (size_t i = 0; i < p.lse.size(); i++) {
        EXPECT(p.lse[i] == p.reference_lse[i] ||
               fabs(p.lse[i] - p.reference_lse[i]) <= 1e-5); /* -infinity too */
    }
}

typedef enum status (*pass)(const attention_params *p);

/* timing: 0 and 1 are early and late copies, warps and thread blocks in both orders; 2 and more are different random orders,
   products late in every other one. */
template <enum dtype TYPE>
static void run_problem(
    problem &p, const char *kernel, pass forward, pass backward, const shape &s, int timing) {
    make_problem<TYPE>(p, s, kernel);
    cpu.last_first = timing == 1, cpu.copies_late = timing % 2 == 1;
    cpu.random = timing > 1 ? (uint64_t)timing * 0x9E3779B97F4A7C15u : 0;
    EXPECT(attention_check(kernel, &p.kernel, true) == STATUS_OK);
    EXPECT(forward(&p.kernel) == STATUS_OK);
    EXPECT(backward(&p.kernel) == STATUS_OK);
    if (timing > 1) { /* again, with what the first one has left in working memory */
        EXPECT(backward(&p.kernel) == STATUS_OK);
    }
    cpu_run();
}

template <enum dtype TYPE>
static void expect_matches_reference(const char *kernel, pass forward, pass backward, const shape &s,
    int first_timing = 0, int end_timing = 2) {
    problem p;
    for (int timing = first_timing; timing < end_timing; timing++) {
        run_problem<TYPE>(p, kernel, forward, backward, s, timing);
        EXPECT(attention_reference_forward(&p.reference) == STATUS_OK);
        EXPECT(attention_reference_backward(&p.reference) == STATUS_OK);
        expect_results_match<TYPE>(p);
        EXPECT(guard_is_untouched(p.kernel.workspace, attention_workspace_bytes(kernel, &p.kernel)));
        EXPECT(guard_is_untouched(p.kernel.saved, attention_saved_bytes(kernel, &p.kernel)));
    }
}

template <enum dtype TYPE, int D, int SHARED_KB> static void expect_fa2_matches(const shape &s) {
    expect_matches_reference<TYPE>(
        "fa2", forward_pass<TYPE, D, SHARED_KB>::call, backward_pass<TYPE, D, SHARED_KB>::call, s);
}

/* ---- fa2, by generation ---- */

static void test_fa2_as_on_an_h100_matches_reference() {
    expect_fa2_matches<DTYPE_BF16, 64, 227>({1, 140, 140, 2, 1, 64, true, true});
    expect_fa2_matches<DTYPE_BF16, 64, 227>({2, 33, 70, 1, 1, 40, false, false});
    expect_fa2_matches<DTYPE_BF16, 80, 227>({1, 100, 100, 1, 1, 80, true, false});
    expect_fa2_matches<DTYPE_F16, 80, 227>({1, 70, 90, 1, 1, 72, false, true});
    expect_fa2_matches<DTYPE_BF16, 128, 227>({1, 140, 140, 1, 1, 128, true, true});
    expect_fa2_matches<DTYPE_BF16, 128, 227>({1, 40, 130, 1, 1, 104, false, false});
    expect_fa2_matches<DTYPE_BF16, 64, 227>({1, 200, 300, 1, 1, 64, true, false});
    expect_fa2_matches<DTYPE_F16, 128, 227>({1, 200, 170, 1, 1, 128, true, false});
}

static void test_fa2_as_on_an_a100_matches_reference() {
    expect_fa2_matches<DTYPE_BF16, 128, 163>({1, 100, 140, 2, 1, 128, true, true});
    expect_fa2_matches<DTYPE_F16, 128, 163>({1, 40, 130, 1, 1, 128, false, false});
    expect_fa2_matches<DTYPE_BF16, 192, 163>({1, 40, 70, 1, 1, 160, true, false});
}

static void test_fa2_as_on_an_rtx_4090_matches_reference() {
    expect_fa2_matches<DTYPE_BF16, 64, 99>({1, 70, 140, 2, 1, 64, true, false});
    expect_fa2_matches<DTYPE_BF16, 128, 99>({1, 40, 70, 1, 1, 128, true, true});
    expect_fa2_matches<DTYPE_BF16, 256, 99>({1, 33, 40, 1, 1, 224, false, false});
}

/* ---- fa3 ---- */

/* few multiprocessors: a thread block gets several tiles */
static const struct attention hopper = {nullptr, nullptr, 2, 90, (void *)cuTensorMapEncodeTiled};

template <enum dtype TYPE>
static void expect_fa3_matches(const shape &s, int first_timing = 0, int end_timing = 2) {
    expect_matches_reference<TYPE>(
        "fa3", [](const attention_params *p) { return fa3_forward(&hopper, p); },
        [](const attention_params *p) { return fa3_backward(&hopper, p); }, s, first_timing, end_timing);
}

static void test_fa3_at_every_head_dimension_of_its_own_matches_reference() {
    expect_fa3_matches<DTYPE_BF16>({1, 140, 140, 1, 1, 64, true, true});
    expect_fa3_matches<DTYPE_BF16>({1, 140, 140, 1, 1, 80, true, true});
    expect_fa3_matches<DTYPE_F16>({1, 140, 140, 1, 1, 96, true, true});
    expect_fa3_matches<DTYPE_BF16>({1, 140, 140, 1, 1, 128, true, true});
}

/* Backward is fa2's there: fa3_backward goes to the one of this file's generation, which is another. */
template <enum dtype TYPE, int D> static void expect_fa3_forward_matches(const shape &s) {
    expect_matches_reference<TYPE>(
        "fa3", [](const attention_params *p) { return fa3_forward(&hopper, p); },
        backward_pass<TYPE, D, 227>::call, s);
}

static void test_fa3_forward_at_large_head_dimensions_matches_reference() {
    expect_fa3_forward_matches<DTYPE_BF16, 192>({1, 140, 130, 1, 1, 192, true, true});
    expect_fa3_forward_matches<DTYPE_F16, 192>({1, 140, 20, 1, 1, 136, true, false});
    expect_fa3_forward_matches<DTYPE_BF16, 256>({1, 100, 170, 1, 1, 224, true, false});
}

static void test_fa3_at_head_dimensions_between_matches_reference() {
    expect_fa3_matches<DTYPE_BF16>({1, 33, 150, 1, 1, 8, false, true});
    expect_fa3_matches<DTYPE_F16>({1, 70, 90, 1, 1, 72, true, false});
    expect_fa3_matches<DTYPE_BF16>({1, 40, 130, 1, 1, 104, false, false});
}

/* Stages and phases go round more than once, and a thread block has several tiles. */
static void test_fa3_over_many_blocks_matches_reference() {
    expect_fa3_matches<DTYPE_BF16>({1, 200, 400, 2, 1, 64, true, true});
    expect_fa3_matches<DTYPE_BF16>({1, 270, 150, 1, 1, 128, false, true});
    expect_fa3_matches<DTYPE_BF16>({2, 140, 270, 1, 1, 80, true, false});
    expect_fa3_matches<DTYPE_BF16>({1, 40, 650, 1, 1, 64, false, true});  /* dQ has a pass after */
    expect_fa3_matches<DTYPE_BF16>({3, 70, 530, 2, 1, 64, false, false}); /* for one head after the other */
    expect_fa3_matches<DTYPE_BF16>({1, 270, 650, 1, 1, 128, false, false});
    expect_fa3_matches<DTYPE_F16>({1, 130, 2100, 2, 1, 128, true, false});
}

/* Not every block of keys is searched for new maxima: here they grow where none is, in the first 8 rows of a warp, in the last
   8 or in both. */
static void test_fa3_over_scores_that_grow_from_one_block_to_the_next_matches_reference() {
    expect_fa3_matches<DTYPE_BF16>({1, 70, 390, 1, 1, 128, false, false, 5});
    expect_fa3_matches<DTYPE_F16>({1, 70, 500, 1, 1, 112, true, false, 5}, 1, 2);
    expect_fa3_matches<DTYPE_F16>({1, 70, 650, 1, 1, 128, false, false, 5}, 2, 3);
}

/* Row 0 sees blocks of 128 keys as they are, and none of the last one. */
static void test_fa3_with_a_row_that_begins_at_a_block_that_is_not_searched_matches_reference() {
    expect_fa3_matches<DTYPE_BF16>({1, 16, 399, 1, 1, 128, true, false});
}

/* A score of -infinity is a key that is not seen, and there may be no other in two blocks. */
static void test_fa3_forward_over_keys_of_minus_infinity_matches_reference() {
    enum { QUERIES = 20, KEYS = 500, D = 128, SEEN = 200 };
    problem p;
    make_problem<DTYPE_F16>(p, {1, QUERIES, KEYS, 1, 1, D, false, false}, "fa3");
    uint16_t *q = (uint16_t *)p.kernel.q.data, *k = (uint16_t *)p.kernel.k.data;
    for (int i = 0; i < QUERIES; i++) {
        q[i * D] = (uint16_t)pack<DTYPE_F16>(1, 0), p.values[Q][(size_t)i * D] = 1;
    }
    for (int i = SEEN; i < KEYS; i++) {
        k[i * D] = (uint16_t)pack<DTYPE_F16>(-INFINITY, 0), p.values[K][(size_t)i * D] = -INFINITY;
    }
    EXPECT(fa3_forward(&hopper, &p.kernel) == STATUS_OK);
    cpu_run();
    EXPECT(attention_reference_forward(&p.reference) == STATUS_OK);
    const uint16_t *o = (const uint16_t *)p.kernel.o.data;
    for (size_t i = 0; i < p.values[O].size(); i++) {
        EXPECT(fabs(unpack<DTYPE_F16>(o[i]).x - p.values[O][i]) < 2e-3);
    }
    for (size_t i = 0; i < p.lse.size(); i++) {
        EXPECT(fabs(p.lse[i] - p.reference_lse[i]) < 1e-5);
    }
}

static void test_fa3_at_one_query_and_one_key_matches_reference() {
    expect_fa3_matches<DTYPE_BF16>({1, 1, 150, 1, 1, 64, true, false});
    expect_fa3_matches<DTYPE_BF16>({1, 140, 1, 1, 1, 80, false, true});
    expect_fa3_matches<DTYPE_BF16>({1, 1, 1, 1, 1, 128, true, true});
}

static void test_fa3_with_rows_that_see_nothing_matches_reference() {
    expect_fa3_matches<DTYPE_BF16>({1, 200, 10, 1, 1, 64, true, false});
    expect_fa3_matches<DTYPE_BF16>({1, 200, 10, 1, 1, 128, true, true});
}

/* ---- corners ---- */

static void test_fa2_at_one_query_and_one_key_matches_reference() {
    expect_fa2_matches<DTYPE_BF16, 64, 227>({1, 1, 150, 1, 1, 64, true, false});
    expect_fa2_matches<DTYPE_BF16, 64, 227>({1, 40, 1, 1, 1, 64, false, true});
}

static void test_fa2_with_rows_that_see_nothing_matches_reference() {
    expect_fa2_matches<DTYPE_BF16, 64, 227>({1, 140, 10, 1, 1, 64, true, false});
    expect_fa2_matches<DTYPE_BF16, 64, 227>({1, 140, 10, 1, 1, 64, true, true});
}

static void test_fa2_over_several_splits_and_rounds_matches_reference() {
    expect_fa2_matches<DTYPE_BF16, 64, 227>({1, 10, 1100, 1, 1, 64, true, true});
}

/* ---- random orders ---- */

static void test_kernels_whose_thread_blocks_wait_for_each_other_match_reference_in_random_orders() {
    expect_fa3_matches<DTYPE_BF16>({2, 30, 530, 2, 1, 64, false, true}, 2, 6);
    expect_fa3_matches<DTYPE_BF16>({2, 30, 530, 1, 1, 128, false, true}, 2, 6);
    expect_fa3_matches<DTYPE_BF16>({1, 30, 2060, 1, 1, 128, false, false}, 2, 5);
    expect_matches_reference<DTYPE_BF16>("fa2", forward_pass<DTYPE_BF16, 64, 227>::call,
        backward_pass<DTYPE_BF16, 64, 227>::call, {1, 70, 300, 2, 1, 64, true, true}, 2, 4);
}

/* ---- deterministic ---- */

/* dQ of the first sequence, as it is in memory */
static std::vector<uint16_t> first_dq(const problem &p) {
    const uint16_t *dq = (const uint16_t *)p.kernel.dq.data;
    return std::vector<uint16_t>(dq, dq + p.kernel.dq.batch_stride);
}

template <enum dtype TYPE>
static void expect_same_dq(const char *kernel, pass forward, pass backward, const shape &s) {
    problem p;
    run_problem<TYPE>(p, kernel, forward, backward, s, 0);
    std::vector<uint16_t> bits = first_dq(p);
    run_problem<TYPE>(p, kernel, forward, backward, s, 1);
    EXPECT(first_dq(p) == bits);
    shape batch = s;
    batch.batch = 2;
    run_problem<TYPE>(p, kernel, forward, backward, batch, 0);
    EXPECT(first_dq(p) == bits);
}

static void test_deterministic_dq_has_the_same_bits_in_any_order_of_thread_blocks_and_any_batch() {
    pass forward = [](const attention_params *p) { return fa3_forward(&hopper, p); },
         backward = [](const attention_params *p) { return fa3_backward(&hopper, p); };
    expect_same_dq<DTYPE_F16>("fa2", forward_pass<DTYPE_F16, 64, 227>::call,
        backward_pass<DTYPE_F16, 64, 227>::call, {1, 40, 1100, 1, 1, 64, false, true});
    expect_same_dq<DTYPE_F16>("fa3", forward, backward, {1, 140, 400, 2, 1, 64, true, true});
    expect_same_dq<DTYPE_F16>("fa3", forward, backward, {1, 70, 650, 1, 1, 128, false, true});
}

/* O and lse of the first sequence, as they are in memory */
static std::vector<uint32_t> first_forward(const problem &p, const shape &s) {
    const uint16_t *o = (const uint16_t *)p.kernel.o.data;
    std::vector<uint32_t> bits(o, o + p.kernel.o.batch_stride);
    for (int64_t i = 0; i < s.heads * s.seqlen_q; i++) {
        bits.push_back(__float_as_uint(p.lse[(size_t)i]));
    }
    return bits;
}

static void test_fa3_forward_has_the_same_bits_in_any_order_and_any_batch_where_maxima_grow() {
    const shape alone = {1, 70, 390, 1, 1, 128, false, false, 5};
    std::vector<uint32_t> bits;
    for (int timing = 0; timing < 4; timing++) {
        shape s = alone;
        s.batch = timing < 2 ? 1 : 2;
        problem p;
        make_problem<DTYPE_F16>(p, s, "fa3");
        cpu.last_first = timing == 1, cpu.copies_late = timing % 2 == 1, cpu.random = 0;
        EXPECT(fa3_forward(&hopper, &p.kernel) == STATUS_OK);
        cpu_run();
        EXPECT(timing == 0 || first_forward(p, s) == bits);
        bits = first_forward(p, s);
    }
}

/* ---- the order of blocks ---- */

/* Every block of every head once; a head's blocks in order, as thread blocks that wait for each other need it; and a group of
   heads before the next one begins. */
static void expect_order(int blocks, int heads, int together, int groups_at_end) {
    block_order order = order_heads(blocks, heads, together, groups_at_end);
    int groups = (heads + together - 1) / together, index = 0;
    for (int first = 0, members; first < heads; first += members) {
        bool last = first / together >= groups - groups_at_end;
        members = last ? heads - first : together;
        for (int i = 0; i < blocks * members; i++, index++) {
            int block, head;
            order.find((unsigned)index, &block, &head);
            if (block != i / members || head != first + i % members) {
                test_failures_in_this_++;
                printf("    %d blocks of %d heads, %d together, %d groups at the end: thread block %d\n",
                    blocks, heads, together, groups_at_end, index);
                return;
            }
        }
    }
}

static void test_order_of_blocks_has_every_block_once_and_groups_of_heads_one_after_the_other() {
    for (int heads = 1; heads <= 20; heads++) {
        for (int together = 1; together <= heads + 1; together++) {
            for (int groups_at_end = 1; groups_at_end <= 5; groups_at_end++) {
                expect_order(1, heads, together, groups_at_end);
                expect_order(5, heads, together, groups_at_end);
            }
        }
    }
    expect_order(3, 66000, 128, 4);
}

/* ---- the rungs ---- */

template <int D> static void expect_rungs_match(const shape &s) {
    expect_matches_reference<DTYPE_BF16>(
        "fa1", [](const attention_params *p) { return fa1_forward_pass<DTYPE_BF16, D, 0>::call(p, FA1); },
        [](const attention_params *p) { return fa1_backward_pass<DTYPE_BF16, D, 0>::call(p, FA1); }, s);
    expect_matches_reference<DTYPE_BF16>(
        "cut1", [](const attention_params *p) { return fa1_forward_pass<DTYPE_BF16, D, 0>::call(p, CUT1); },
        [](const attention_params *p) { return fa1_backward_pass<DTYPE_BF16, D, 0>::call(p, CUT1); }, s);
    expect_matches_reference<DTYPE_BF16>(
        "cut2", [](const attention_params *p) { return fa1_forward_pass<DTYPE_BF16, D, 0>::call(p, CUT2); },
        [](const attention_params *p) { return fa1_backward_pass<DTYPE_BF16, D, 0>::call(p, CUT2); }, s);
}

static void test_rungs_match_reference() {
    expect_rungs_match<64>({1, 70, 140, 1, 1, 64, true, false});
    expect_rungs_match<80>({1, 30, 80, 2, 1, 80, false, true});
    expect_rungs_match<256>({1, 20, 30, 1, 1, 256, true, false});
}

static void test_rungs_with_rows_that_see_nothing_match_reference() {
    expect_rungs_match<64>({1, 70, 10, 1, 1, 64, true, true});
}

int main() {
    RUN(test_fa2_as_on_an_h100_matches_reference);
    RUN(test_fa2_as_on_an_a100_matches_reference);
    RUN(test_fa2_as_on_an_rtx_4090_matches_reference);
    RUN(test_fa3_at_every_head_dimension_of_its_own_matches_reference);
    RUN(test_fa3_forward_at_large_head_dimensions_matches_reference);
    RUN(test_fa3_at_head_dimensions_between_matches_reference);
    RUN(test_fa3_over_many_blocks_matches_reference);
    RUN(test_fa3_over_scores_that_grow_from_one_block_to_the_next_matches_reference);
    RUN(test_fa3_with_a_row_that_begins_at_a_block_that_is_not_searched_matches_reference);
    RUN(test_fa3_forward_over_keys_of_minus_infinity_matches_reference);
    RUN(test_fa3_at_one_query_and_one_key_matches_reference);
    RUN(test_fa3_with_rows_that_see_nothing_matches_reference);
    RUN(test_fa2_at_one_query_and_one_key_matches_reference);
    RUN(test_fa2_with_rows_that_see_nothing_matches_reference);
    RUN(test_fa2_over_several_splits_and_rounds_matches_reference);
    RUN(test_kernels_whose_thread_blocks_wait_for_each_other_match_reference_in_random_orders);
    RUN(test_deterministic_dq_has_the_same_bits_in_any_order_of_thread_blocks_and_any_batch);
    RUN(test_fa3_forward_has_the_same_bits_in_any_order_and_any_batch_where_maxima_grow);
    RUN(test_order_of_blocks_has_every_block_once_and_groups_of_heads_one_after_the_other);
    RUN(test_rungs_match_reference);
    RUN(test_rungs_with_rows_that_see_nothing_match_reference);
    return test_summary();
}
