/* The model's gradients against what defines them: central differences of the loss, in double precision, for
   every parameter tensor, with multi-head and grouped-query attention. And what must not change them: what
   is recomputed, how a batch is split into micro-steps, how the logits are split into chunks.

   The CPU backends' memory is the host's, so the tests read and write parameters and gradients in place. */
#include "test.h"

#include <stdlib.h>

#include "llmc/model.h"
#include "llmc/random.h"

enum { BATCH = 4, SEQ_LEN = 6, POSITIONS = 8, BATCH_TOKENS = BATCH * SEQ_LEN };

static const struct model_config shapes[] = {
    {.layers = 2, .channels = 24, .heads = 3, .kv_heads = 3, .seq_len = POSITIONS, .vocab_size = 31},
    {.layers = 3, .channels = 32, .heads = 4, .kv_heads = 2, .seq_len = POSITIONS, .vocab_size = 31},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

struct fixture {
    struct backend *backend;
    struct model *model;
    int32_t tokens[BATCH_TOKENS], targets[BATCH_TOKENS];
    double d_loss;  /* 1 / targets that count */
    void *loss_sum; /* statistic dtype */
};

/* For each parameter tensor of each layer. */
#define FOR_EACH_PARAMETER(config, id, layer)                                                                \
    for (enum parameter_id id = 0; id < PARAMETER_KINDS; id++)                                               \
        for (int layer = 0; layer < (parameter_table[id].per_layer ? (config)->layers : 1); layer++)

static double get(struct tensor t, int64_t i) {
    return t.dtype == DTYPE_F64 ? ((double *)t.data)[i] : (double)((float *)t.data)[i];
}
static void set(struct tensor t, int64_t i, double value) {
    if (t.dtype == DTYPE_F64) {
        ((double *)t.data)[i] = value;
    } else {
        ((float *)t.data)[i] = (float)value;
    }
}

static struct tensor parameter_at(struct fixture *f, enum parameter_id id, int layer) {
    const struct model_config *config = model_get_config(f->model);
    return tensor_at(
        model_parameters(f->model), layout_offset(model_get_layout(f->model), config, id, layer));
}
static struct tensor gradient_at(struct fixture *f, enum parameter_id id, int layer) {
    const struct model_config *config = model_get_config(f->model);
    return tensor_at(model_gradients(f->model), layout_offset(model_get_layout(f->model), config, id, layer));
}
/* Elements without the vocabulary's padding. */
static int64_t elements_in_file(const struct model_config *config, enum parameter_id id) {
    return parameter_table[id].file_rows(config) * parameter_table[id].columns(config);
}

/* ---- the model under test ---- */

/* Weights far from their initial values, so that attention is not uniform and no gradient vanishes. */
static void draw_weights(struct fixture *f) {
    const struct model_config *config = model_get_config(f->model);
    FOR_EACH_PARAMETER(config, id, layer) {
        struct tensor t = parameter_at(f, id, layer);
        double around = parameter_table[id].init == INIT_ONE ? 1 : 0;
        for (int64_t i = 0; i < elements_in_file(config, id); i++) {
            set(t, i,
                around +
                    0.2 * (double)random_normal(1, (uint64_t)(layer * PARAMETER_KINDS + id), (uint64_t)i));
        }
    }
}

static bool fixture_open(struct fixture *f, const struct model_config *config, enum dtype dtype, int threads,
    enum recompute recompute, int64_t logits_bytes) {
    memset(f, 0, sizeof *f);
    if (!succeeded(
            (dtype == DTYPE_F64 ? backend_cpu_f64_create : backend_cpu_create)(&f->backend, threads))) {
        return false;
    }
    struct model_options options = {
        .config = *config,
        .micro_batch = BATCH,
        .recompute = recompute,
        .gradient_dtype = dtype,
        .logits_bytes = logits_bytes,
        .ranks = 1,
    };
    if (!succeeded(model_create(&f->model, f->backend, &options)) ||
        !succeeded(f->backend->memory_allocate(f->backend, &f->loss_sum, dtype_bytes(dtype)))) {
        return false;
    }
    draw_weights(f);
    int counted = 0;
    for (int i = 0; i < BATCH_TOKENS; i++) {
        f->tokens[i] = (int32_t)(random_uniform(2, 0, (uint64_t)i) * config->vocab_size);
        bool counts = random_uniform(2, 2, (uint64_t)i) < 0.8;
        f->targets[i] = counts ? (int32_t)(random_uniform(2, 1, (uint64_t)i) * config->vocab_size) : -1;
        counted += counts;
    }
    f->d_loss = 1.0 / counted;
    return true;
}

static void fixture_close(struct fixture *f) {
    if (f->model != NULL) {
        model_free(f->model);
    }
    if (f->backend != NULL) {
        f->backend->memory_free(f->backend, f->loss_sum);
        f->backend->free(f->backend);
    }
}

static struct tensor loss_tensor(struct fixture *f) {
    struct tensor t = {f->loss_sum, f->backend->profile.statistic_dtype};
    return t;
}

static double mean_loss(struct fixture *f) {
    double losses[BATCH_TOKENS], sum = 0;
    EXPECT_OK(model_token_losses(f->model, f->tokens, f->targets, BATCH, SEQ_LEN, losses, NULL));
    for (int i = 0; i < BATCH_TOKENS; i++) {
        sum += losses[i];
    }
    return sum * f->d_loss;
}

/* The gradients of the whole batch in micro-steps of so many sequences; returns the mean loss. What is in
   the gradient buffer before must not matter, so there is NaN. */
static double compute_gradients(struct fixture *f, int micro_batch, const struct model_hooks *hooks) {
    const struct model_config *config = model_get_config(f->model);
    FOR_EACH_PARAMETER(config, id, layer) {
        for (int64_t i = 0; i < parameter_elements(config, id); i++) {
            set(gradient_at(f, id, layer), i, NAN);
        }
    }
    set(loss_tensor(f), 0, 0);
    for (int first = 0; first < BATCH; first += micro_batch) {
        EXPECT_OK(model_forward_backward(f->model, f->tokens + first * SEQ_LEN, f->targets + first * SEQ_LEN,
            micro_batch, SEQ_LEN, f->d_loss, first > 0, f->loss_sum, hooks));
    }
    return get(loss_tensor(f), 0) * f->d_loss;
}

/* ||a - b|| / ||a|| of a tensor's gradients in two models of one shape, worst tensor. */
static double gradient_distance(struct fixture *a, struct fixture *b) {
    const struct model_config *config = model_get_config(a->model);
    double worst = 0;
    FOR_EACH_PARAMETER(config, id, layer) {
        double difference = 0, norm = 0;
        for (int64_t i = 0; i < parameter_elements(config, id); i++) {
            double of_a = get(gradient_at(a, id, layer), i), of_b = get(gradient_at(b, id, layer), i);
            difference += (of_a - of_b) * (of_a - of_b);
            norm += of_a * of_a;
        }
        double relative = sqrt(difference / norm);
        worst = relative <= worst ? worst : relative; /* a NaN stays: it is not <= */
        if (isnan(relative)) {
            return NAN;
        }
    }
    return worst;
}

static bool gradients_are_bitwise_equal(struct fixture *a, struct fixture *b) {
    const struct model_config *config = model_get_config(a->model);
    FOR_EACH_PARAMETER(config, id, layer) {
        struct tensor of_a = gradient_at(a, id, layer), of_b = gradient_at(b, id, layer);
        size_t bytes = (size_t)parameter_elements(config, id) * dtype_bytes(of_a.dtype);
        if (memcmp(of_a.data, of_b.data, bytes) != 0) {
            printf("    the gradients of %s, layer %d, differ\n", parameter_table[id].hugging_face, layer);
            return false;
        }
    }
    return true;
}

/* ---- central differences ---- */

/* d loss / d t at 0, of the loss with `t * direction` added to the tensor's entries. */
static double central_difference(
    struct fixture *f, struct tensor parameter, const double *saved, const double *direction, int64_t count) {
    double step = 1e-4, loss[2];
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < count; i++) {
            set(parameter, i, saved[i] + (side == 0 ? step : -step) * direction[i]);
        }
        loss[side] = mean_loss(f);
    }
    memcpy(parameter.data, saved, (size_t)count * sizeof *saved);
    return (loss[0] - loss[1]) / (2 * step);
}

/* A dozen entries of a tensor, and all of them at once along a random direction of norm 1. */
static void check_tensor(struct fixture *f, enum parameter_id id, int layer) {
    int64_t count = elements_in_file(model_get_config(f->model), id);
    uint64_t stream = (uint64_t)(layer * PARAMETER_KINDS + id);
    struct tensor parameter = parameter_at(f, id, layer), gradient = gradient_at(f, id, layer);
    double *saved = malloc((size_t)count * sizeof *saved),
           *direction = calloc((size_t)count, sizeof *direction);
    memcpy(saved, parameter.data, (size_t)count * sizeof *saved);

    double difference = 0, norm = 0;
    for (uint64_t sample = 0; sample < 12; sample++) {
        int64_t i = (int64_t)(random_uniform(3, stream, sample) * (double)count);
        direction[i] = 1;
        double error = central_difference(f, parameter, saved, direction, count) - get(gradient, i);
        direction[i] = 0;
        difference += error * error;
        norm += get(gradient, i) * get(gradient, i);
    }
    double entries = sqrt(difference / norm);
    EXPECT_NEAR(entries, 0, 1e-6);

    double expected = 0, gradient_norm = 0, length = 1 / sqrt((double)count);
    for (int64_t i = 0; i < count; i++) {
        direction[i] = random_uniform(4, stream, (uint64_t)i) < 0.5 ? -length : length;
        expected += direction[i] * get(gradient, i);
        gradient_norm += get(gradient, i) * get(gradient, i);
    }
    /* the derivative along a random direction is about ||gradient|| / sqrt(count) */
    double along = central_difference(f, parameter, saved, direction, count) - expected;
    double relative = fabs(along) / (sqrt(gradient_norm) * length);
    EXPECT_NEAR(relative, 0, 1e-6);

    if (!(entries <= 1e-6 && relative <= 1e-6)) {
        printf("    ... in %s, layer %d\n", parameter_table[id].hugging_face, layer);
    }
    free(saved);
    free(direction);
}

static void check_central_differences(const struct model_config *config) {
    struct fixture f;
    bool open = fixture_open(&f, config, DTYPE_F64, 1, RECOMPUTE_NONE, 0);
    EXPECT(open);
    if (open) {
        double loss = compute_gradients(&f, BATCH, NULL);
        EXPECT_NEAR(loss, mean_loss(&f), 1e-13);
        FOR_EACH_PARAMETER(config, id, layer) {
            check_tensor(&f, id, layer);
        }
    }
    fixture_close(&f);
}

static void test_gradients_are_central_differences_with_multi_head_attention(void) {
    check_central_differences(&shapes[0]);
}
static void test_gradients_are_central_differences_with_grouped_query_attention(void) {
    check_central_differences(&shapes[1]);
}

static void test_gradients_of_unused_positions_and_padded_vocabulary_are_zero(void) {
    struct fixture f;
    bool open = fixture_open(&f, &shapes[0], DTYPE_F64, 1, RECOMPUTE_NONE, 0);
    EXPECT(open);
    if (open) {
        int64_t channels = shapes[0].channels, nonzero = 0;
        compute_gradients(&f, BATCH, NULL);
        for (int64_t i = SEQ_LEN * channels; i < POSITIONS * channels; i++) {
            nonzero += get(gradient_at(&f, POSITION_EMBEDDING, 0), i) != 0;
        }
        for (int64_t i = shapes[0].vocab_size * channels; i < parameter_elements(&shapes[0], TOKEN_EMBEDDING);
             i++) {
            nonzero += get(gradient_at(&f, TOKEN_EMBEDDING, 0), i) != 0;
        }
        EXPECT(nonzero == 0);
    }
    fixture_close(&f);
}

/* ---- what must not change them ---- */

/* Opens two models, runs both, and checks the second against the first. */
static void compare(const struct model_config *config, enum dtype dtype, enum recompute recompute,
    int64_t logits_bytes, int micro_batch, double tolerance) {
    struct fixture plain, other;
    bool open = fixture_open(&plain, config, dtype, 2, RECOMPUTE_NONE, 0);
    open = fixture_open(&other, config, dtype, 2, recompute, logits_bytes) && open;
    EXPECT(open);
    if (open) {
        double plain_loss = compute_gradients(&plain, BATCH, NULL);
        double other_loss = compute_gradients(&other, micro_batch, NULL);
        EXPECT_NEAR(other_loss, plain_loss, tolerance);
        if (tolerance == 0) {
            EXPECT(gradients_are_bitwise_equal(&plain, &other));
        } else {
            EXPECT_NEAR(gradient_distance(&plain, &other), 0, tolerance);
        }
    }
    fixture_close(&plain);
    fixture_close(&other);
}

static void test_every_recompute_level_gives_the_gradients_of_none_bitwise(void) {
    for (int shape = 0; shape < SHAPES; shape++) {
        for (enum recompute level = RECOMPUTE_GELU; level < RECOMPUTE_LEVELS; level++) {
            compare(&shapes[shape], DTYPE_F64, level, 0, BATCH, 0);
            compare(&shapes[shape], DTYPE_F32, level, 0, BATCH, 0);
        }
    }
}

static void test_micro_steps_of_any_size_sum_to_the_gradients_of_the_batch(void) {
    for (int shape = 0; shape < SHAPES; shape++) {
        compare(&shapes[shape], DTYPE_F64, RECOMPUTE_NONE, 0, 1, 1e-12);
        compare(&shapes[shape], DTYPE_F64, RECOMPUTE_BLOCK, 0, 2, 1e-12);
    }
}

/* Chunks change the order in which the token embedding's gradient is summed over rows, hence not bitwise. */
static void test_logits_in_chunks_give_the_gradients_of_logits_at_once(void) {
    int64_t row_bytes = model_padded_vocab(&shapes[0]) * (int64_t)sizeof(double);
    compare(&shapes[0], DTYPE_F64, RECOMPUTE_NONE, 7 * row_bytes, BATCH, 1e-12);
    compare(&shapes[0], DTYPE_F64, RECOMPUTE_NONE, 10 * row_bytes, 1, 1e-12);
    compare(&shapes[0], DTYPE_F64, RECOMPUTE_NONE, 1, BATCH, 1e-12); /* row by row */
}

static void test_the_same_computation_twice_gives_the_same_bits(void) {
    for (int shape = 0; shape < SHAPES; shape++) {
        compare(&shapes[shape], DTYPE_F32, RECOMPUTE_NONE, 0, BATCH, 0);
    }
}

/* ---- hooks ---- */

/* Keeps the parameters away until a bucket is asked for, and the gradients of each bucket as they were when
   it was told to be ready. */
struct hook_log {
    struct model *model;
    double *hidden, *ready; /* flat layout */
    int order[8], count;    /* buckets in the order in which they became ready */
};

static enum status give_parameters(void *context, int bucket) {
    struct hook_log *log = context;
    const struct bucket *at = &model_get_layout(log->model)->bucket[bucket];
    double *parameters = model_parameters(log->model).data;
    memcpy(parameters + at->offset, log->hidden + at->offset, (size_t)at->count * sizeof(double));
    return STATUS_OK;
}

static enum status take_gradients(void *context, int bucket) {
    struct hook_log *log = context;
    const struct bucket *at = &model_get_layout(log->model)->bucket[bucket];
    const double *gradients = model_bucket_gradients(log->model, bucket).data;
    memcpy(log->ready + at->offset, gradients, (size_t)at->count * sizeof(double));
    log->order[log->count++ % 8] = bucket;
    return STATUS_OK;
}

static void check_hooks(struct fixture *f) {
    const struct layout *layout = model_get_layout(f->model);
    size_t total = (size_t)layout->total;
    double *parameters = model_parameters(f->model).data, *gradients = model_gradients(f->model).data;
    struct hook_log log = {
        .model = f->model, .hidden = calloc(total, sizeof(double)), .ready = calloc(total, sizeof(double))};
    struct model_hooks hooks = {give_parameters, NULL, take_gradients, &log};
    double loss = compute_gradients(f, BATCH, NULL);
    memcpy(log.hidden, parameters, total * sizeof(double));
    for (size_t i = 0; i < total; i++) {
        parameters[i] = NAN;
    }
    EXPECT_NEAR(compute_gradients(f, BATCH, &hooks), loss, 0);
    EXPECT(log.count == layout->buckets);
    for (int i = 0; i < log.count && i < layout->buckets; i++) {
        const struct bucket *bucket = &layout->bucket[log.order[i]];
        EXPECT(log.order[i] == layout->buckets - 1 - i);
        EXPECT(memcmp(log.ready + bucket->offset, gradients + bucket->offset,
                   (size_t)bucket->count * sizeof(double)) == 0);
    }
    free(log.hidden);
    free(log.ready);
}

/* What was in a bucket's buffer must not matter once its turn is announced. */
static enum status spoil_gradients(void *context, int bucket) {
    struct hook_log *log = context;
    double *gradients = model_bucket_gradients(log->model, bucket).data;
    for (int64_t i = 0; i < model_get_layout(log->model)->bucket[bucket].count; i++) {
        gradients[i] = NAN;
    }
    return STATUS_OK;
}

/* Layers that take turns in `buffers` buffers have the gradients of layers that have their own. */
static void check_turns(struct fixture *f, int buffers) {
    const struct layout *layout = model_get_layout(f->model);
    size_t total = (size_t)layout->total;
    struct model_options options = {.config = *model_get_config(f->model),
        .micro_batch = BATCH,
        .gradient_dtype = DTYPE_F64,
        .layer_gradients = buffers,
        .ranks = 1};
    struct hook_log log = {.ready = calloc(total, sizeof(double))};
    struct model_hooks hooks = {NULL, spoil_gradients, take_gradients, &log};
    EXPECT(model_create(&log.model, f->backend, &options) == STATUS_OK);
    memcpy(model_parameters(log.model).data, model_parameters(f->model).data, total * sizeof(double));
    EXPECT(model_gradient_elements(layout, buffers) ==
           layout->bucket[0].padded_count + buffers * layout->bucket[1].padded_count);
    compute_gradients(f, BATCH, NULL);
    set(loss_tensor(f), 0, 0);
    EXPECT(model_forward_backward(log.model, f->tokens, f->targets, BATCH, SEQ_LEN, f->d_loss, false,
               f->loss_sum, &hooks) == STATUS_OK);
    EXPECT(log.count == layout->buckets);
    for (int i = 0; i < layout->buckets; i++) {
        const struct bucket *bucket = &layout->bucket[i];
        EXPECT(memcmp(log.ready + bucket->offset, model_bucket_gradients(f->model, i).data,
                   (size_t)bucket->count * sizeof(double)) == 0);
    }
    free(log.ready);
    model_free(log.model);
}

static void test_layers_that_take_turns_in_gradient_buffers_have_the_same_gradients(void) {
    struct fixture f;
    bool open = fixture_open(&f, &shapes[1], DTYPE_F64, 1, RECOMPUTE_NONE, 0);
    EXPECT(open);
    for (int buffers = 2; open && buffers <= 3; buffers++) {
        check_turns(&f, buffers);
    }
    fixture_close(&f);
}

static void test_hooks_come_before_parameters_are_read_and_after_gradients_are_final(void) {
    for (enum recompute level = RECOMPUTE_NONE; level < RECOMPUTE_LEVELS; level++) {
        struct fixture f;
        bool open = fixture_open(&f, &shapes[1], DTYPE_F64, 1, level, 0);
        EXPECT(open);
        if (open) {
            check_hooks(&f);
        }
        fixture_close(&f);
    }
}

int main(void) {
    RUN(test_gradients_are_central_differences_with_multi_head_attention);
    RUN(test_gradients_are_central_differences_with_grouped_query_attention);
    RUN(test_gradients_of_unused_positions_and_padded_vocabulary_are_zero);
    RUN(test_every_recompute_level_gives_the_gradients_of_none_bitwise);
    RUN(test_micro_steps_of_any_size_sum_to_the_gradients_of_the_batch);
    RUN(test_logits_in_chunks_give_the_gradients_of_logits_at_once);
    RUN(test_the_same_computation_twice_gives_the_same_bits);
    RUN(test_layers_that_take_turns_in_gradient_buffers_have_the_same_gradients);
    RUN(test_hooks_come_before_parameters_are_read_and_after_gradients_are_final);
    return test_summary();
}
