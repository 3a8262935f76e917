/* The model and the optimizer against PyTorch: test/golden/ holds two tiny GPTs (multi-head and grouped-query
   attention) with their logits, losses, gradients and ten AdamW steps, computed in float64 by
   scripts/golden_pytorch.py, which says what is in the files. Both CPU backends must agree with them. */
#include "test.h"

#include <stdlib.h>

#include "llmc/decoder.h"
#include "llmc/optimizer.h"
#include "llmc/safetensors.h"

/* What a backend's arithmetic may differ by. The files hold logits, gradients and weights as float32, which alone is an
   error of 6e-8 relative: all that fp64 has. In fp32 every operation adds as much: at the end of some hundred, their
   signs at random, it is ten times that; a further factor of ten is for other compilers and libraries.
   Losses and logits are up to 10 in size. */
struct device {
    const char *name;
    enum status (*create)(struct backend **out, int threads);
    int threads;
    double loss, logits; /* absolute */
    double gradient;     /* of the norm of the difference, relative to the tensor's norm */
    double norm;         /* of the global norm, relative */
    double trained;      /* absolute */
};
static const struct device devices[] = {
    {"cpu", backend_cpu_create, 2, 1e-5, 1e-5, 5e-6, 5e-6, 5e-6},
    {"cpu-f64", backend_cpu_f64_create, 1, 1e-12, 1e-6, 1e-7, 1e-12, 1e-7},
};
static const char *const models[] = {"mha", "gqa"};

struct fixture {
    const struct device *device;
    struct safetensors *golden;
    int steps, batch;
    int32_t *tokens, *targets, *lengths; /* (steps, batch, seq_len), the same, (steps) */
    struct backend *backend;
    struct model *model;
    struct comm *comm;
    struct optimizer *optimizer;
    int32_t *batch_tokens, *batch_targets; /* see take_batch */
    struct tensor loss_sum;
};

/* The larger one; a NaN wins. */
static double larger(double a, double b) {
    return b > a || isnan(b) ? b : a;
}

/* ---- the golden file ---- */

/* The tensor's values as doubles (int32 too); NULL if it is not there. The caller frees. */
static double *golden_values(const struct fixture *f, const char *name, int64_t *count) {
    const struct safetensors_entry *entry = safetensors_find(f->golden, name);
    if (entry == NULL) {
        printf("    the golden file has no tensor \"%s\"\n", name);
        EXPECT(entry != NULL);
        return NULL;
    }
    size_t bytes = (size_t)(entry->end - entry->begin);
    *count = (int64_t)(bytes / dtype_bytes(entry->dtype));
    char *raw = malloc(bytes);
    double *values = malloc((size_t)*count * sizeof *values);
    EXPECT_OK(safetensors_read(f->golden, entry, 0, raw, bytes));
    for (int64_t i = 0; i < *count; i++) {
        values[i] = entry->dtype == DTYPE_F64   ? ((double *)raw)[i]
                    : entry->dtype == DTYPE_F32 ? ((float *)raw)[i]
                                                : ((int32_t *)raw)[i];
    }
    free(raw);
    return values;
}

static int32_t *golden_integers(const struct fixture *f, const char *name) {
    int64_t count = 0;
    double *values = golden_values(f, name, &count);
    int32_t *integers = malloc((size_t)count * sizeof *integers);
    for (int64_t i = 0; i < count; i++) {
        integers[i] = (int32_t)values[i];
    }
    free(values);
    return integers;
}

static double golden_setting(const struct fixture *f, const char *key) {
    const char *text = safetensors_metadata(f->golden, key);
    EXPECT(text != NULL);
    return text == NULL ? 0 : atof(text);
}

/* A parameter's values in the file: `kind` is "weight", "gradient" or "trained". */
static double *golden_parameter(
    const struct fixture *f, const char *kind, enum parameter_id id, int layer, int64_t *count) {
    char hugging_face[128], name[160];
    snprintf(hugging_face, sizeof hugging_face, parameter_table[id].hugging_face, layer);
    snprintf(name, sizeof name, "%s/%s", kind, hugging_face);
    return golden_values(f, name, count);
}

/* ---- the model under test ---- */

/* For each parameter tensor of each layer. */
#define FOR_EACH_PARAMETER(config, id, layer)                                                                \
    for (enum parameter_id id = 0; id < PARAMETER_KINDS; id++)                                               \
        for (int layer = 0; layer < (parameter_table[id].per_layer ? (config)->layers : 1); layer++)

static double *read_values(struct backend *b, struct tensor from, int64_t count) {
    size_t bytes = (size_t)count * dtype_bytes(from.dtype);
    char *raw = malloc(bytes);
    double *values = malloc((size_t)count * sizeof *values);
    EXPECT(from.dtype == DTYPE_F64 || from.dtype == DTYPE_F32);
    EXPECT_OK(b->copy_to_host(b, raw, from.data, bytes));
    for (int64_t i = 0; i < count; i++) {
        values[i] = from.dtype == DTYPE_F64 ? ((double *)raw)[i] : ((float *)raw)[i];
    }
    free(raw);
    return values;
}

static bool import_weights(struct fixture *f) {
    const struct model_config *config = model_get_config(f->model);
    const struct layout *layout = model_get_layout(f->model);
    float *flat = calloc((size_t)layout->total, sizeof *flat);
    FOR_EACH_PARAMETER(config, id, layer) {
        int64_t count = 0;
        double *values = golden_parameter(f, "weight", id, layer, &count);
        float *to = flat + layout_offset(layout, config, id, layer);
        for (int64_t i = 0; i < count; i++) {
            to[i] = (float)values[i];
        }
        free(values);
    }
    bool good = true;
    for (int b = 0; b < layout->buckets; b++) {
        good = good && succeeded(optimizer_import_bucket(f->optimizer, b, flat + layout->bucket[b].offset));
    }
    free(flat);
    return good;
}

static bool fixture_open(struct fixture *f, const char *model, const struct device *device) {
    memset(f, 0, sizeof *f);
    f->device = device;
    char path[64];
    snprintf(path, sizeof path, "test/golden/%s.safetensors", model);
    if (!succeeded(safetensors_open(&f->golden, path)) ||
        !succeeded(device->create(&f->backend, device->threads))) {
        return false;
    }
    struct model_options model_options = {
        .config = {.layers = (int)golden_setting(f, "layers"),
            .channels = (int)golden_setting(f, "channels"),
            .heads = (int)golden_setting(f, "heads"),
            .kv_heads = (int)golden_setting(f, "kv_heads"),
            .seq_len = (int)golden_setting(f, "seq_len"),
            .vocab_size = (int)golden_setting(f, "vocab_size")},
        .recompute = RECOMPUTE_NONE,
        .gradient_dtype = f->backend->profile.gradient_dtype,
        .logits_bytes = INT64_C(1) << 20,
        .ranks = 1,
    };
    const struct safetensors_entry *tokens = safetensors_find(f->golden, "tokens");
    EXPECT(tokens != NULL && tokens->dimensions == 3);
    f->steps = (int)tokens->shape[0];
    f->batch = (int)tokens->shape[1];
    model_options.micro_batch = f->batch;
    f->tokens = golden_integers(f, "tokens");
    f->targets = golden_integers(f, "targets");
    f->lengths = golden_integers(f, "lengths");
    struct optimizer_options optimizer_options = {
        .zero_stage = 0,
        .adamw = {.beta1 = golden_setting(f, "beta1"),
            .beta2 = golden_setting(f, "beta2"),
            .epsilon = golden_setting(f, "epsilon"),
            .weight_decay = golden_setting(f, "weight_decay")},
        .clip = golden_setting(f, "clip"),
    };
    size_t batch_tokens = (size_t)f->batch * (size_t)model_options.config.seq_len;
    f->batch_tokens = malloc(batch_tokens * sizeof(int32_t));
    f->batch_targets = malloc(batch_tokens * sizeof(int32_t));
    struct backend *b = f->backend;
    f->loss_sum.dtype = b->profile.statistic_dtype;
    return succeeded(model_create(&f->model, b, &model_options)) && succeeded(comm_single_create(&f->comm)) &&
           succeeded(optimizer_create(&f->optimizer, f->model, f->comm, &optimizer_options)) &&
           succeeded(b->memory_allocate(b, &f->loss_sum.data, dtype_bytes(f->loss_sum.dtype))) &&
           import_weights(f);
}

static void fixture_close(struct fixture *f) {
    struct backend *b = f->backend;
    if (b != NULL) {
        b->memory_free(b, f->loss_sum.data);
    }
    if (f->optimizer != NULL) {
        optimizer_free(f->optimizer);
    }
    if (f->comm != NULL) {
        f->comm->free(f->comm);
    }
    if (f->model != NULL) {
        model_free(f->model);
    }
    if (b != NULL) {
        b->free(b);
    }
    if (f->golden != NULL) {
        safetensors_close(f->golden);
    }
    free(f->tokens);
    free(f->targets);
    free(f->lengths);
    free(f->batch_tokens);
    free(f->batch_targets);
}

/* Every model on every backend. */
static void for_each_fixture(void (*check)(struct fixture *f)) {
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
            struct fixture f;
            int failures_before = test_failures_in_this_;
            bool open = fixture_open(&f, models[m], &devices[d]);
            EXPECT(open);
            if (open) {
                check(&f);
            }
            fixture_close(&f);
            if (test_failures_in_this_ != failures_before) {
                printf("    ... with model %s on %s\n", models[m], devices[d].name);
            }
        }
    }
}

/* Takes a step's batch, cut to its length, into f->batch_tokens and f->batch_targets; returns the number of targets that
   count. */
static int take_batch(struct fixture *f, int step) {
    int seq_len = model_get_config(f->model)->seq_len, length = f->lengths[step], counted = 0;
    for (int i = 0; i < f->batch * length; i++) {
        int from = (step * f->batch + i / length) * seq_len + i % length;
        f->batch_tokens[i] = f->tokens[from];
        f->batch_targets[i] = f->targets[from];
        counted += f->batch_targets[i] != -1;
    }
    return counted;
}

/* ---- the checks ---- */

static void check_losses(struct fixture *f) {
    int64_t count = 0;
    double *losses = golden_values(f, "losses", &count);
    double *token_losses = golden_values(f, "token_losses", &count), sum = 0;
    double *got = malloc((size_t)count * sizeof *got);
    int counted = take_batch(f, 0);
    EXPECT(counted > 0 && counted < count && count == (int64_t)f->batch * f->lengths[0]);
    EXPECT_OK(
        model_token_losses(f->model, f->batch_tokens, f->batch_targets, f->batch, f->lengths[0], got, NULL));
    for (int64_t i = 0; i < count; i++) {
        EXPECT_NEAR(got[i], token_losses[i], f->device->loss);
        sum += got[i];
    }
    EXPECT_NEAR(sum / counted, losses[0], f->device->loss);
    free(got);
    free(token_losses);
    free(losses);
}

static void check_logits(struct fixture *f) {
    int64_t count = 0;
    double *golden = golden_values(f, "logits", &count); /* (B, T, V) */
    int vocab_size = model_get_config(f->model)->vocab_size, seq_len = model_get_config(f->model)->seq_len;
    float *logits = malloc((size_t)vocab_size * sizeof *logits);
    struct decoder *decoder = NULL;
    EXPECT_OK(decoder_create(&decoder, f->model, 1, 0));
    for (int sequence = 0; sequence < f->batch; sequence++) {
        const int32_t *tokens = f->tokens + sequence * seq_len;
        decoder_clear(decoder);
        for (int length = 1, last = 0; length <= seq_len; last = length, length += 1 + length % 3) {
            const double *expected = golden + (sequence * seq_len + length - 1) * vocab_size;
            EXPECT_OK(decoder_next(decoder, tokens + last, length - last, logits));
            double largest = 0;
            for (int v = 0; v < vocab_size; v++) {
                largest = larger(largest, fabs(logits[v] - expected[v]));
            }
            EXPECT_NEAR(largest, 0, f->device->logits);
        }
    }
    decoder_free(decoder);
    free(logits);
    free(golden);
}

static void check_gradients(struct fixture *f) {
    const struct model_config *config = model_get_config(f->model);
    const struct layout *layout = model_get_layout(f->model);
    int counted = take_batch(f, 0);
    EXPECT_OK(model_forward_backward(f->model, f->batch_tokens, f->batch_targets, f->batch, f->lengths[0],
        1.0 / counted, false, f->loss_sum.data, NULL));
    FOR_EACH_PARAMETER(config, id, layer) {
        int64_t count = 0, elements = parameter_elements(config, id);
        double *golden = golden_parameter(f, "gradient", id, layer, &count);
        struct tensor at = tensor_at(model_gradients(f->model), layout_offset(layout, config, id, layer));
        double *gradient = read_values(f->backend, at, elements);
        double difference = 0, norm = 0;
        for (int64_t i = 0; i < elements; i++) {
            double expected = i < count ? golden[i] : 0; /* rows of the vocabulary's padding */
            difference += (gradient[i] - expected) * (gradient[i] - expected);
            norm += expected * expected;
        }
        EXPECT(norm > 0);
        double relative = sqrt(difference / norm);
        EXPECT_NEAR(relative, 0, f->device->gradient);
        if (!(relative <= f->device->gradient)) {
            printf("    ... in the gradient of %s, layer %d\n", parameter_table[id].hugging_face, layer);
        }
        free(gradient);
        free(golden);
    }
}

/* Adding a constant to all keys shifts all scores of a query alike, which softmax does not see: the gradient of key
   biases is rounding noise around 0. */
static bool loss_depends_on(const struct model_config *config, enum parameter_id id, int64_t index) {
    int64_t head = index / model_head_dim(config);
    return id != QKV_BIAS || head < config->heads || head >= config->heads + config->kv_heads;
}

/* How far AdamW can take a parameter whose gradient is noise: m / (sqrt(v) + epsilon) is at most the square root of the sum
   of w^2 / u, w being the weights of the gradients in m and u those in v (Cauchy and Schwarz), which is 1 in the first step
   and 1.0115 in the tenth. PyTorch's own noise of 1e-17 in fp64 is nothing beside epsilon, and its parameter stays; noise
   in fp32 is of epsilon's size. */
static double farthest_by_noise(const struct fixture *f) {
    bool f64 = f->backend->profile.statistic_dtype == DTYPE_F64;
    return f64 ? f->device->trained : 1.0115 * f->steps * golden_setting(f, "learning_rate");
}

static void check_training(struct fixture *f) {
    const struct model_config *config = model_get_config(f->model);
    const struct layout *layout = model_get_layout(f->model);
    const struct device *device = f->device;
    int64_t count = 0;
    double *losses = golden_values(f, "losses", &count), *norms = golden_values(f, "norms", &count);
    double learning_rate = golden_setting(f, "learning_rate");
    EXPECT(f->steps == 10);
    for (int step = 0; step < f->steps; step++) {
        int counted = take_batch(f, step);
        struct step_result result = {0};
        EXPECT_OK(optimizer_begin_step(f->optimizer));
        struct model_hooks hooks = optimizer_hooks(f->optimizer, true);
        EXPECT_OK(model_forward_backward(f->model, f->batch_tokens, f->batch_targets, f->batch,
            f->lengths[step], 1.0 / counted, false, optimizer_loss_sum(f->optimizer), &hooks));
        EXPECT_OK(optimizer_step(f->optimizer, learning_rate, counted, INFINITY, INFINITY));
        EXPECT_OK(optimizer_result(f->optimizer, &result));
        EXPECT_NEAR(result.loss, losses[step], device->loss);
        EXPECT_NEAR(result.norm / norms[step], 1, device->norm);
        EXPECT(result.applied);
    }
    free(losses);
    free(norms);

    FOR_EACH_PARAMETER(config, id, layer) {
        int64_t elements = parameter_elements(config, id);
        double *golden = golden_parameter(f, "trained", id, layer, &count);
        struct tensor at = tensor_at(model_parameters(f->model), layout_offset(layout, config, id, layer));
        double *trained = read_values(f->backend, at, elements);
        double largest = 0, largest_without_cause = 0;
        for (int64_t i = 0; i < elements; i++) {
            double *of = loss_depends_on(config, id, i) ? &largest : &largest_without_cause;
            *of = larger(*of, fabs(trained[i] - (i < count ? golden[i] : 0)));
        }
        EXPECT_NEAR(largest, 0, device->trained);
        EXPECT_NEAR(largest_without_cause, 0, farthest_by_noise(f));
        if (!(largest <= device->trained)) {
            printf("    ... in the trained %s, layer %d\n", parameter_table[id].hugging_face, layer);
        }
        free(trained);
        free(golden);
    }
}

static void test_losses_of_single_tokens_and_of_a_batch_are_pytorchs(void) {
    for_each_fixture(check_losses);
}
static void test_logits_after_prefixes_of_several_lengths_are_pytorchs(void) {
    for_each_fixture(check_logits);
}
static void test_gradients_of_all_parameters_are_pytorchs(void) {
    for_each_fixture(check_gradients);
}
static void test_ten_adamw_steps_give_pytorchs_losses_norms_and_parameters(void) {
    for_each_fixture(check_training);
}

int main(void) {
    RUN(test_losses_of_single_tokens_and_of_a_batch_are_pytorchs);
    RUN(test_logits_after_prefixes_of_several_lengths_are_pytorchs);
    RUN(test_gradients_of_all_parameters_are_pytorchs);
    RUN(test_ten_adamw_steps_give_pytorchs_losses_norms_and_parameters);
    return test_summary();
}
