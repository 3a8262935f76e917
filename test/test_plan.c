/* The memory plan against what is allocated, against arithmetic done by hand, and for GPUs that are not there. */
#include "test.h"

#include <stdlib.h>

#include "llmc/gpus.h"
#include "llmc/optimizer.h"
#include "llmc/plan.h"
#include "llmc/presets.h"

static struct plan_options gpt3_1_3b(enum recompute recompute) {
    struct plan_options o = {.zero_stage = 0};
    struct model_config config = {24, 2048, 16, 16, 2048, 50257};
    o.model.config = config;
    o.model.micro_batch = 16;
    o.model.recompute = recompute;
    o.model.gradient_dtype = DTYPE_F32;
    o.model.logits_bytes = (int64_t)512 << 20;
    o.model.ranks = 1;
    EXPECT(backend_profile_find(&o.device, "cuda", "fa2") == STATUS_OK);
    return o;
}

static void test_plan_is_what_the_cpu_backend_allocates(void) {
    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
        struct backend *backend;
        struct comm *comm = NULL;
        struct model *model;
        struct optimizer *optimizer;
        struct plan_options o = {.model = {.config = {3, 96, 6, 2, 64, 500},
                                     .micro_batch = 3,
                                     .ranks = 1,
                                     .recompute = (enum recompute)level,
                                     .logits_bytes = 100000}};
        EXPECT(backend_cpu_create(&backend, 1) == STATUS_OK && comm_single_create(&comm) == STATUS_OK);
        o.device = backend->profile;
        o.model.gradient_dtype = backend->profile.gradient_dtype;
        struct plan plan;
        EXPECT(plan_make(&plan, &o) == STATUS_OK);
        struct optimizer_options optimizer_options = {.clip = 1.0};
        EXPECT(model_create(&model, backend, &o.model) == STATUS_OK);
        EXPECT(optimizer_create(&optimizer, model, comm, &optimizer_options) == STATUS_OK);
        uint64_t used, peak, total;
        backend->memory_usage(backend, &used, &peak, &total);
        EXPECT_NEAR((double)used, (double)plan.total_bytes, 0.01 * (double)plan.total_bytes);
        optimizer_free(optimizer);
        model_free(model);
        comm->free(comm);
        backend->free(backend);
    }
}

static void test_parameters_are_counted_without_vocabulary_padding(void) {
    struct plan_options o = gpt3_1_3b(RECOMPUTE_NONE);
    struct plan plan;
    EXPECT(plan_make(&plan, &o) == STATUS_OK);
    /* C (V + T + 2) + L (12 C^2 + 13 C) */
    double c = 2048;
    EXPECT((double)plan.parameters == c * (50257 + 2048 + 2) + 24 * (12 * c * c + 13 * c));
    EXPECT_NEAR((double)(plan.parameter_bytes + plan.gradient_bytes + plan.moment_bytes + plan.master_bytes),
        18.0 * (double)plan.parameters, 0.002 * 18.0 * (double)plan.parameters);
}

static void test_activations_of_a_sequence_of_1_3b_at_2k(void) {
    /* per layer and token in bf16: residual in and mid, two norms, attention: 5 C; qkv 3 C; GELU before and after 8 C */
    double token_layer_channel = 2048.0 * 24 * 2048 * 2;
    const double channels[RECOMPUTE_LEVELS] = {16, 12, 10, 1};
    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
        struct plan_options o = gpt3_1_3b((enum recompute)level);
        struct plan plan;
        EXPECT(plan_make(&plan, &o) == STATUS_OK);
        double kept = 0.0;
        for (int id = RESIDUAL_IN; id <= GELU; id++) {
            if (buffer_copies((enum buffer_id)id, &o.model) > 1) {
                kept += (double)plan.buffer_bytes[id] / 16;
            }
        }
        EXPECT_NEAR(
            kept, channels[level] * token_layer_channel, 0.02 * channels[level] * token_layer_channel);
    }
}

static void test_zero_1_divides_the_optimizer_by_the_ranks(void) {
    struct plan_options o = gpt3_1_3b(RECOMPUTE_NONE);
    struct plan alone, shared;
    EXPECT(plan_make(&alone, &o) == STATUS_OK);
    o.model.ranks = 8;
    o.zero_stage = 1;
    EXPECT(plan_make(&shared, &o) == STATUS_OK);
    EXPECT_NEAR((double)shared.group_bytes[BUFFER_OPTIMIZER], (double)alone.group_bytes[BUFFER_OPTIMIZER] / 8,
        0.001 * (double)alone.group_bytes[BUFFER_OPTIMIZER]);
    EXPECT(shared.group_bytes[BUFFER_ACTIVATIONS] == alone.group_bytes[BUFFER_ACTIVATIONS]);
}

static void test_zero_2_keeps_of_the_gradients_a_share_and_what_is_on_its_way(void) {
    struct plan_options o = gpt3_1_3b(RECOMPUTE_NONE);
    struct plan plan;
    o.model.ranks = 8;
    o.zero_stage = 2;
    o.model.layer_gradients = ZERO2_LAYER_GRADIENTS;
    EXPECT(plan_make(&plan, &o) == STATUS_OK);
    /* fp32: an eighth of all, the embeddings and final norm, two layers */
    double c = 2048, once = c * (50304 + 2048 + 2), layer = 12 * c * c + 13 * c;
    double expected = 4 * ((once + 24 * layer) / 8 + once + 2 * layer);
    EXPECT_NEAR((double)plan.gradient_bytes, expected, 0.001 * expected);
    EXPECT(plan.wire_bytes == 0);
    o.reduce_dtype = DTYPE_BF16; /* two of the largest bucket */
    EXPECT(plan_make(&plan, &o) == STATUS_OK);
    EXPECT_NEAR((double)plan.wire_bytes, 2 * 2 * once, 0.001 * once);
}

static void test_largest_micro_batch_fits_and_one_more_does_not(void) {
    struct plan_options o = gpt3_1_3b(RECOMPUTE_GELU);
    o.device_bytes = (uint64_t)80 << 30;
    struct plan plan;
    EXPECT(plan_make(&plan, &o) == STATUS_OK);
    int largest = plan.largest_micro_batch;
    EXPECT(largest > 1);
    o.model.micro_batch = largest;
    EXPECT(plan_make(&plan, &o) == STATUS_OK && plan.total_bytes <= o.device_bytes);
    o.model.micro_batch = largest + 1;
    EXPECT(plan_make(&plan, &o) == STATUS_OK && plan.total_bytes > o.device_bytes);
    o.device_bytes = (uint64_t)8 << 30; /* not even the parameters */
    EXPECT(plan_make(&plan, &o) == STATUS_OK && plan.largest_micro_batch == 0);
}

static void expect_last_line(const struct plan_options *o, const char *expected) {
    char *text = NULL;
    size_t bytes = 0;
    struct plan plan;
    FILE *memory = open_memstream(&text, &bytes);
    EXPECT(memory != NULL && plan_make(&plan, o) == STATUS_OK);
    plan_print(memory, &plan, o);
    fclose(memory);
    text[bytes - 1] = '\0'; /* the newline */
    EXPECT_STRING(strrchr(text, '\n') + 1, expected);
    free(text);
}

/* 1.3B take 18 bytes a parameter: 22.1 GiB. */
static void test_the_plan_ends_with_what_to_do_where_it_does_not_fit(void) {
    struct plan_options o = gpt3_1_3b(RECOMPUTE_NONE);
    o.device_bytes = (uint64_t)80 << 30;
    expect_last_line(&o, "  the device has 80.0 GiB: the plan fits");
    o.device_bytes = (uint64_t)40 << 30;
    expect_last_line(&o, "  the device has 40.0 GiB: too little, lower --micro-batch or recompute more");
    o.device_bytes = (uint64_t)20 << 30;
    expect_last_line(&o,
        "  the device has 20.0 GiB: too little for any micro-batch; more --ranks, --zero 2 and "
        "--recompute block take less");
}

/* What --help says of its table. */
static void test_presets_fit_a_gpu_of_80_gb_alone_and_6_7b_one_of_four(void) {
    int count;
    const struct preset *presets = preset_table(&count);
    const struct gpu_info *gpu = gpu_find_key("a100-80gb");
    for (int i = 0; i < count; i++) {
        const struct preset *p = &presets[i];
        struct plan_options o = gpt3_1_3b(RECOMPUTE_NONE);
        struct plan plan;
        o.model.config =
            (struct model_config){p->layers, p->channels, p->heads, p->heads, p->seq_len, p->vocab_size};
        o.model.micro_batch = p->micro_batch;
        o.model.logits_bytes = (int64_t)1 << 30;
        if (strcmp(p->name, "gpt3-6.7b") == 0) {
            o.model.ranks = 4;
            o.zero_stage = 1;
        }
        EXPECT(plan_make(&plan, &o) == STATUS_OK);
        EXPECT((double)plan.total_bytes < gpu->memory_gib * (1 << 30));
    }
}

static void test_standard_attention_plans_its_square_matrices(void) {
    struct plan_options o = gpt3_1_3b(RECOMPUTE_NONE);
    EXPECT(backend_profile_find(&o.device, "cuda", "standard") == STATUS_OK);
    struct plan plan;
    EXPECT(plan_make(&plan, &o) == STATUS_OK);
    double square = 16.0 * 16 * 2048 * 2048 * 2; /* B H T T bf16 */
    EXPECT_NEAR((double)plan.buffer_bytes[ATTENTION_SAVED], 24 * square, 0.001 * square);
    EXPECT((double)plan.buffer_bytes[ATTENTION_WORKSPACE] >= square / 16); /* dP of a sequence at a time */
}

static void test_sizes_beyond_all_memory_do_not_wrap_around(void) {
    struct plan_options o = gpt3_1_3b(RECOMPUTE_NONE);
    struct model_config config = {1024, 65536, 1024, 1024, 1 << 20, 65536};
    o.model.config = config;
    o.model.micro_batch = 65536;
    o.device_bytes = (uint64_t)80 << 30;
    const char *const kernels[] = {"standard", "fa2", "fa3"};
    for (int i = 0; i < 3; i++) {
        EXPECT(backend_profile_find(&o.device, "cuda", kernels[i]) == STATUS_OK);
        struct plan plan;
        EXPECT(plan_make(&plan, &o) == STATUS_OK);
        EXPECT(plan.total_bytes > UINT64_C(1) << 50 && plan.largest_micro_batch == 0);
    }
}

int main(void) {
    RUN(test_plan_is_what_the_cpu_backend_allocates);
    RUN(test_parameters_are_counted_without_vocabulary_padding);
    RUN(test_activations_of_a_sequence_of_1_3b_at_2k);
    RUN(test_zero_1_divides_the_optimizer_by_the_ranks);
    RUN(test_zero_2_keeps_of_the_gradients_a_share_and_what_is_on_its_way);
    RUN(test_largest_micro_batch_fits_and_one_more_does_not);
    RUN(test_the_plan_ends_with_what_to_do_where_it_does_not_fit);
    RUN(test_presets_fit_a_gpu_of_80_gb_alone_and_6_7b_one_of_four);
    RUN(test_standard_attention_plans_its_square_matrices);
    RUN(test_sizes_beyond_all_memory_do_not_wrap_around);
    return test_summary();
}
