/* The profiler between a model and its backend: it changes no bit of what is computed, and it counts the work that the
   model's shape says. */
#include "test.h"

#include "llmc/profile.h"
#include "llmc/random.h"

enum { BATCH = 2, SEQ_LEN = 16, ROWS = BATCH * SEQ_LEN };

static const struct model_config config = {
    .layers = 3, .channels = 32, .heads = 4, .kv_heads = 2, .seq_len = SEQ_LEN, .vocab_size = 300};

struct fixture {
    struct backend *backend;
    struct profile *profile; /* NULL: none */
    struct model *model;
    float loss_sum;
};

static void open_fixture(struct fixture *f, bool profiled, enum recompute recompute) {
    memset(f, 0, sizeof *f);
    EXPECT_OK(backend_cpu_create(&f->backend, 1));
    if (profiled) {
        EXPECT_OK(profile_create(&f->profile, f->backend, &config));
    }
    struct model_options options = {.config = config,
        .micro_batch = BATCH,
        .recompute = recompute,
        .gradient_dtype = DTYPE_F32,
        .ranks = 1};
    EXPECT_OK(model_create(&f->model, profiled ? profile_backend(f->profile) : f->backend, &options));
    EXPECT_OK(
        model_initialize(f->model, model_parameters(f->model), 0, model_get_layout(f->model)->total, 1));
}

static void close_fixture(struct fixture *f) {
    model_free(f->model);
    profile_free(f->profile);
    f->backend->free(f->backend);
}

static void micro_step(struct fixture *f, bool accumulate) {
    int32_t tokens[ROWS], targets[ROWS];
    for (int i = 0; i < ROWS; i++) {
        tokens[i] = (int32_t)(random_uniform(1, 1, (uint64_t)i) * config.vocab_size);
        targets[i] = (int32_t)(random_uniform(1, 2, (uint64_t)i) * config.vocab_size);
    }
    EXPECT_OK(model_forward_backward(
        f->model, tokens, targets, BATCH, SEQ_LEN, 1.0 / ROWS, accumulate, &f->loss_sum, NULL));
}

static void test_a_profiled_step_computes_the_same_bits(void) {
    for (int recompute = 0; recompute < RECOMPUTE_LEVELS; recompute++) {
        struct fixture plain, profiled;
        open_fixture(&plain, false, (enum recompute)recompute);
        open_fixture(&profiled, true, (enum recompute)recompute);
        EXPECT_OK(profile_begin_step(profiled.profile));
        for (int i = 0; i < 2; i++) {
            micro_step(&plain, i > 0);
            micro_step(&profiled, i > 0);
        }
        EXPECT_OK(profile_end_step(profiled.profile));
        EXPECT(plain.loss_sum > 0 && plain.loss_sum == profiled.loss_sum);
        size_t bytes = (size_t)model_get_layout(plain.model)->total * sizeof(float);
        EXPECT(memcmp(model_gradients(plain.model).data, model_gradients(profiled.model).data, bytes) == 0);
        close_fixture(&plain);
        close_fixture(&profiled);
    }
}

/* ---- the report ---- */

static struct json *report_of(struct profile *profile) {
    struct json_writer writer;
    struct json *report = NULL;
    char *text = NULL;
    size_t bytes = 0;
    json_writer_init(&writer, false);
    json_begin_object(&writer);
    profile_write_json(profile, &writer);
    json_end_object(&writer);
    EXPECT_OK(json_writer_finish(&writer, &text, &bytes));
    EXPECT_OK(json_parse(&report, text, bytes, "the report"));
    free(text);
    return report;
}

static const struct json *row_of(const struct json *report, const char *name) {
    const struct json *rows = json_get(report, "rows");
    for (size_t i = 0; rows != NULL && i < rows->count; i++) {
        const char *found = "";
        EXPECT_OK(json_get_string(&rows->items[i], "name", &found, "row"));
        if (strcmp(found, name) == 0) {
            return &rows->items[i];
        }
    }
    return NULL;
}

static double number_of(const struct json *row, const char *key) {
    const struct json *value = json_get(row, key);
    EXPECT(value != NULL && value->type == JSON_NUMBER);
    return value != NULL ? value->number : (double)NAN;
}

static void expect_product(
    const struct json *report, const char *layer, double calls, double in, double out) {
    const char *passes[] = {"forward", "input gradient", "weight gradient"};
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s %s", layer, passes[i]);
        const struct json *row = row_of(report, name);
        double gflop = number_of(row, "tflops") * number_of(row, "ms"),
               expected = 2e-9 * calls * ROWS * in * out;
        EXPECT_NEAR(number_of(row, "calls"), calls, 0);
        EXPECT_NEAR(gflop, expected, 1e-9 * expected);
    }
}

static void test_the_report_has_the_work_that_the_shape_says(void) {
    struct fixture f;
    open_fixture(&f, true, RECOMPUTE_GELU);
    for (int step = 0; step < 2; step++) {
        EXPECT_OK(profile_begin_step(f.profile));
        micro_step(&f, false);
        EXPECT_OK(profile_end_step(f.profile));
    }
    micro_step(&f, false); /* outside of the steps that are measured */
    EXPECT(profile_steps(f.profile) == 2);
    struct json *report = report_of(f.profile);
    const double layers = config.layers, channels = config.channels, hidden = 4 * channels;
    const double qkv = model_qkv_features(&config), vocab = model_padded_vocab(&config);
    expect_product(report, "qkv", layers, channels, qkv);
    expect_product(report, "projection", layers, channels, channels);
    expect_product(report, "mlp up", layers, channels, hidden);
    expect_product(report, "mlp down", layers, hidden, channels);
    expect_product(report, "head", 1, channels, vocab);
    double per_token = 6 * (layers * channels * (qkv + channels + 2 * hidden) + channels * vocab);
    const struct json *all = row_of(report, "all products");
    EXPECT_NEAR(
        number_of(all, "tflops") * number_of(all, "ms"), 1e-9 * ROWS * per_token, 1e-15 * ROWS * per_token);

    /* forward of every layer, and again in backward but in the last, whose values are still there */
    EXPECT_NEAR(number_of(row_of(report, "gelu"), "calls"), 2 * layers - 1, 0);
    EXPECT_NEAR(number_of(row_of(report, "bias gradients"), "calls"), 4 * layers, 0);
    EXPECT_NEAR(number_of(row_of(report, "layernorm forward"), "calls"), 2 * layers + 1, 0);
    EXPECT_NEAR(number_of(row_of(report, "layernorm backward"), "calls"), 2 * layers + 1, 0);
    EXPECT_NEAR(number_of(row_of(report, "attention forward"), "calls"), layers, 0);
    EXPECT_NEAR(number_of(row_of(report, "attention backward"), "calls"), layers, 0);
    EXPECT_NEAR(number_of(row_of(report, "classifier"), "calls"), 1, 0);
    EXPECT(row_of(report, "adamw") == NULL); /* nothing of the kind ran */
    json_free(report);
    close_fixture(&f);
}

static void test_shares_add_up_to_the_step(void) {
    struct fixture f;
    open_fixture(&f, true, RECOMPUTE_NONE);
    EXPECT_OK(profile_begin_step(f.profile));
    micro_step(&f, false);
    EXPECT_OK(profile_end_step(f.profile));
    struct json *report = report_of(f.profile);
    const struct json *rows = json_get(report, "rows"), *all = row_of(report, "all products");
    double share = 0, ms = 0;
    for (size_t i = 0; i < rows->count; i++) {
        if (&rows->items[i] != all) { /* told once more, as a sum */
            share += number_of(&rows->items[i], "share");
            ms += number_of(&rows->items[i], "ms");
        }
    }
    EXPECT_NEAR(share, 1, 1e-9);
    EXPECT_NEAR(ms, number_of(report, "step_ms"), 1e-9 * ms);
    EXPECT(number_of(row_of(report, "idle and unnamed"), "ms") >= 0);
    EXPECT(number_of(report, "copy_gbs") > 0);
    json_free(report);
    close_fixture(&f);
}

int main(void) {
    RUN(test_a_profiled_step_computes_the_same_bits);
    RUN(test_the_report_has_the_work_that_the_shape_says);
    RUN(test_shares_add_up_to_the_step);
    return test_summary();
}
