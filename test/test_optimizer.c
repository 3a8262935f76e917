/* The optimizer's step on one rank: what is applied, what is skipped, and that nothing of a skipped step stays; what counts
   as waiting for others. */
#include "test.h"

#include <stdlib.h>

#include "llmc/optimizer.h"

struct setup {
    struct backend *backend;
    struct comm *comm;
    struct model *model;
    struct optimizer *optimizer;
};

enum { T = 8, B = 2 };

static struct setup make(double clip) {
    struct setup s = {0};
    struct model_options m = {.config = {2, 16, 2, 1, T, 40}, .micro_batch = B, .ranks = 1};
    struct optimizer_options o = {.adamw = {0.0, 0.9, 0.95, 1e-8, 0.1}, .clip = clip};
    if (backend_cpu_create(&s.backend, 1) != STATUS_OK || comm_single_create(&s.comm) != STATUS_OK) {
        abort();
    }
    m.gradient_dtype = s.backend->profile.gradient_dtype;
    if (model_create(&s.model, s.backend, &m) != STATUS_OK ||
        optimizer_create(&s.optimizer, s.model, s.comm, &o) != STATUS_OK ||
        optimizer_initialize(s.optimizer, 42) != STATUS_OK) {
        abort();
    }
    return s;
}

static void drop(struct setup *s) {
    optimizer_free(s->optimizer);
    model_free(s->model);
    s->comm->free(s->comm);
    s->backend->free(s->backend);
}

static void backward(struct setup *s, int seed) {
    int32_t tokens[B * T], targets[B * T];
    for (int i = 0; i < B * T; i++) {
        tokens[i] = (i * 7 + seed) % 40;
        targets[i] = (i * 11 + seed) % 40;
    }
    EXPECT(optimizer_begin_step(s->optimizer) == STATUS_OK);
    EXPECT(model_forward_backward(s->model, tokens, targets, B, T, 1.0 / (B * T), false,
               optimizer_loss_sum(s->optimizer), NULL) == STATUS_OK);
}

static struct step_result step(struct setup *s, double loss_limit, double norm_limit) {
    struct step_result result = {0};
    EXPECT(optimizer_step(s->optimizer, 1e-2, B * T, loss_limit, norm_limit) == STATUS_OK);
    EXPECT(optimizer_result(s->optimizer, &result) == STATUS_OK);
    return result;
}

/* A copy of all weights and moments. */
static float *snapshot(const struct setup *s, size_t *bytes) {
    int64_t n = model_get_layout(s->model)->total, m = s->optimizer->state_total;
    float *copy = malloc((size_t)(n + 2 * m) * sizeof(float));
    memcpy(copy, model_parameters(s->model).data, (size_t)n * sizeof(float));
    memcpy(copy + n, s->optimizer->first_moment.data, (size_t)m * sizeof(float));
    memcpy(copy + n + m, s->optimizer->second_moment.data, (size_t)m * sizeof(float));
    *bytes = (size_t)(n + 2 * m) * sizeof(float);
    return copy;
}

static void expect_nothing_changed(const struct setup *s, float *before, size_t bytes) {
    size_t now_bytes;
    float *now = snapshot(s, &now_bytes);
    EXPECT(now_bytes == bytes && memcmp(now, before, bytes) == 0);
    free(now);
    free(before);
}

static void a_poisoned_gradient_is_skipped(float poison) {
    struct setup s = make(1.0);
    backward(&s, 1);
    EXPECT(step(&s, INFINITY, INFINITY).applied);
    int64_t places[3] = {0, model_get_layout(s.model)->bucket[1].offset + 5,
        model_get_layout(s.model)->bucket[2].offset + model_get_layout(s.model)->bucket[2].count - 1};
    for (int i = 0; i < 3; i++) {
        size_t bytes;
        float *before = snapshot(&s, &bytes);
        backward(&s, 2);
        ((float *)model_gradients(s.model).data)[places[i]] = poison;
        struct step_result result = step(&s, INFINITY, INFINITY);
        EXPECT(!result.applied);
        EXPECT(!isfinite(result.norm));
        EXPECT(result.optimizer_step == 1);
        expect_nothing_changed(&s, before, bytes);
    }
    backward(&s, 2);
    struct step_result result = step(&s, INFINITY, INFINITY);
    EXPECT(result.applied && result.optimizer_step == 2);
    drop(&s);
}

static void test_nan_in_any_gradient_never_reaches_weights_or_moments(void) {
    a_poisoned_gradient_is_skipped(NAN);
}
static void test_infinity_in_any_gradient_never_reaches_weights_or_moments(void) {
    a_poisoned_gradient_is_skipped(INFINITY);
    a_poisoned_gradient_is_skipped(-INFINITY);
}

static void test_nan_loss_with_finite_gradients_is_skipped(void) {
    struct setup s = make(1.0);
    size_t bytes;
    float *before = snapshot(&s, &bytes);
    backward(&s, 3);
    *(float *)optimizer_loss_sum(s.optimizer) = NAN;
    EXPECT(!step(&s, INFINITY, INFINITY).applied);
    expect_nothing_changed(&s, before, bytes);
    drop(&s);
}

static void test_loss_or_norm_over_its_limit_is_skipped_and_equal_to_it_is_not(void) {
    struct setup s = make(0.0);
    backward(&s, 4);
    struct step_result first = step(&s, 0.0, INFINITY); /* loss is positive */
    EXPECT(!first.applied && first.loss > 1.0);
    backward(&s, 4);
    EXPECT(!step(&s, INFINITY, first.norm * 0.999).applied);
    backward(&s, 4);
    struct step_result third = step(&s, first.loss, first.norm);
    EXPECT(third.applied && third.loss == first.loss && third.norm == first.norm);
    drop(&s);
}

static void test_norm_is_that_of_all_gradients_and_clipping_scales_to_it(void) {
    struct setup s = make(0.0), clipped = make(0.05);
    backward(&s, 5);
    backward(&clipped, 5);
    const float *gradients = model_gradients(s.model).data;
    double squares = 0.0;
    for (int64_t i = 0; i < model_get_layout(s.model)->total; i++) {
        squares += (double)gradients[i] * gradients[i];
    }
    EXPECT_NEAR(step(&s, INFINITY, INFINITY).norm, sqrt(squares), 1e-5 * sqrt(squares));
    EXPECT_NEAR(step(&clipped, INFINITY, INFINITY).norm, sqrt(squares), 1e-5 * sqrt(squares));
    /* after the first step the first moment is (1 - beta1) times the scaled gradient */
    const float *full = s.optimizer->first_moment.data, *scaled = clipped.optimizer->first_moment.data;
    double largest = 0.0;
    for (int64_t i = 0; i < s.optimizer->state_total; i++) {
        largest = fmax(largest, fabs(scaled[i] - full[i] * 0.05 / sqrt(squares)));
    }
    EXPECT(sqrt(squares) > 0.05);
    EXPECT_NEAR(largest, 0.0, 1e-6);
    drop(&s);
    drop(&clipped);
}

static void test_only_matrices_and_embeddings_decay(void) {
    struct setup s = make(1.0);
    const struct layout *layout = model_get_layout(s.model);
    const struct model_config *config = model_get_config(s.model);
    float *weights = model_parameters(s.model).data;
    for (int64_t i = 0; i < layout->total; i++) {
        weights[i] = 1.0f;
    }
    EXPECT(optimizer_begin_step(s.optimizer) == STATUS_OK); /* all gradients are still 0 */
    EXPECT(step(&s, INFINITY, INFINITY).applied);
    for (int id = 0; id < PARAMETER_KINDS; id++) {
        for (int layer = 0; layer < (parameter_table[id].per_layer ? config->layers : 1); layer++) {
            int64_t offset = layout_offset(layout, config, (enum parameter_id)id, layer);
            int64_t last = offset + parameter_elements(config, (enum parameter_id)id) - 1;
            bool matrix = parameter_table[id].columns(config) > 1;
            EXPECT_NEAR(weights[offset], matrix ? 1.0 - 1e-2 * 0.1 : 1.0, 1e-7);
            EXPECT_NEAR(weights[last], matrix ? 1.0 - 1e-2 * 0.1 : 1.0, 1e-7);
        }
    }
    drop(&s);
}

static void test_exported_buckets_imported_into_another_model_give_the_same_weights(void) {
    struct setup a = make(1.0), b = make(1.0);
    const struct layout *layout = model_get_layout(a.model);
    backward(&a, 6);
    EXPECT(step(&a, INFINITY, INFINITY).applied);
    for (int i = 0; i < layout->buckets; i++) {
        float *host = malloc((size_t)layout->bucket[i].count * sizeof(float));
        EXPECT(optimizer_export_bucket(a.optimizer, i, host) == STATUS_OK);
        EXPECT(optimizer_import_bucket(b.optimizer, i, host) == STATUS_OK);
        free(host);
    }
    EXPECT(memcmp(model_parameters(a.model).data, model_parameters(b.model).data,
               (size_t)layout->total * sizeof(float)) == 0);
    drop(&a);
    drop(&b);
}

static void test_initial_values_follow_the_table(void) {
    struct setup s = make(1.0);
    const struct layout *layout = model_get_layout(s.model);
    const struct model_config *c = model_get_config(s.model);
    const float *weights = model_parameters(s.model).data;
    for (int id = 0; id < PARAMETER_KINDS; id++) {
        const struct parameter_info *info = &parameter_table[id];
        int64_t n = info->file_rows(c) * info->columns(c),
                padded = parameter_elements(c, (enum parameter_id)id);
        const float *w = weights + layout_offset(layout, c, (enum parameter_id)id, 1);
        double sum = 0.0, squares = 0.0;
        for (int64_t i = 0; i < n; i++) {
            sum += w[i];
            squares += (double)w[i] * w[i];
        }
        double mean = sum / (double)n, std = sqrt(squares / (double)n - mean * mean);
        double expected = info->init == INIT_NORMAL ? 0.02 : info->init == INIT_NORMAL_RESIDUAL ? 0.01 : 0.0;
        EXPECT_NEAR(std, expected, 0.15 * expected + 1e-12); /* 0.02 / sqrt(2 * 2 layers) = 0.01 */
        EXPECT_NEAR(mean, info->init == INIT_ONE ? 1.0 : 0.0, 0.25 * expected + 1e-12);
        for (int64_t i = n; i < padded; i++) {
            EXPECT(w[i] == 0.0f);
        }
    }
    drop(&s);
}

static double waited_ms; /* for other ranks, since the optimizer last asked */

static double fake_blocked_ms(struct comm *c) {
    (void)c;
    double ms = waited_ms;
    waited_ms = 0.0;
    return ms;
}

static void test_only_waits_within_a_step_are_its_own(void) {
    struct setup s = make(1.0);
    s.comm->ranks = 2; /* whose sums are this rank's alone */
    s.comm->blocked_ms = fake_blocked_ms;
    for (int i = 1; i <= 3; i++) {
        waited_ms = 1000.0; /* while the other one writes a sample */
        backward(&s, i);
        waited_ms += i;
        EXPECT(step(&s, INFINITY, INFINITY).wait_ms == i);
    }
    s.comm->ranks = 1;
    drop(&s);
}

int main(void) {
    RUN(test_nan_in_any_gradient_never_reaches_weights_or_moments);
    RUN(test_infinity_in_any_gradient_never_reaches_weights_or_moments);
    RUN(test_nan_loss_with_finite_gradients_is_skipped);
    RUN(test_loss_or_norm_over_its_limit_is_skipped_and_equal_to_it_is_not);
    RUN(test_norm_is_that_of_all_gradients_and_clipping_scales_to_it);
    RUN(test_only_matrices_and_embeddings_decay);
    RUN(test_exported_buckets_imported_into_another_model_give_the_same_weights);
    RUN(test_initial_values_follow_the_table);
    RUN(test_only_waits_within_a_step_are_its_own);
    return test_summary();
}
