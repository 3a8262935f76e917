/* The whole model on the GPU: loss and every gradient against the CPU backend in fp64 on the same (bf16) weights, what
   must not change a bit, and training steps side by side. FLASHGPT_ATTENTION chooses the attention kernel;
   FLASHGPT_SMALL takes a smaller model and fewer steps, for compute-sanitizer (make sanitize-gpu). */
#include "../llmc/optimizer.h"
#include "../llmc/random.h"
#include "test.h"

#include <stdlib.h>
#include <time.h>

enum { BATCH = 4, SEQ_LEN = 160, TOKENS_IN_BATCH = BATCH * SEQ_LEN };

static const struct model_config all_shapes[] = {
    {3, 256, 4, 4, SEQ_LEN, 1000}, /* heads of 64 */
    {2, 320, 4, 2, SEQ_LEN, 515},  /* heads of 80, grouped */
    {2, 512, 4, 1, SEQ_LEN, 257},  /* heads of 128, one for keys and values */
};
static const struct model_config small_shape = {1, 64, 1, 1, SEQ_LEN, 65};
static const struct model_config *shapes = all_shapes;
static int shape_count = sizeof all_shapes / sizeof *all_shapes;

static uint64_t seed;
static const char *attention = "auto";
static bool small;

struct side {
    struct backend *backend;
    struct comm *comm;
    struct model *model;
    struct optimizer *optimizer;
};

static void must(enum status status) {
    if (status != STATUS_OK) {
        printf("    %s\n0 passed, 1 failed\n", error_message());
        exit(1);
    }
}

static void make_side(
    struct side *s, bool cuda, const struct model_config *config, enum recompute recompute) {
    struct model_options m = {
        .config = *config, .micro_batch = BATCH, .recompute = recompute, .ranks = 1, .logits_bytes = 1 << 18};
    struct optimizer_options o = {.adamw = {0.0, 0.9, 0.95, 1e-8, 0.1}, .clip = 1.0};
    const char *kernel =
        strcmp(attention, "auto") == 0 ? backend_cuda_attention(0, model_head_dim(config)) : attention;
    must(cuda ? backend_cuda_create(&s->backend, 0, kernel, true) : backend_cpu_f64_create(&s->backend, 0));
    must(comm_single_create(&s->comm));
    m.gradient_dtype = s->backend->profile.gradient_dtype;
    must(model_create(&s->model, s->backend, &m));
    must(optimizer_create(&s->optimizer, s->model, s->comm, &o));
    must(optimizer_initialize(s->optimizer, seed));
}

static void drop_side(struct side *s) {
    optimizer_free(s->optimizer);
    model_free(s->model);
    s->comm->free(s->comm);
    s->backend->free(s->backend);
}

/* A buffer of the backend as doubles; the caller frees it. */
static double *read_values(struct backend *b, struct tensor t, int64_t count) {
    char *raw = malloc((size_t)count * dtype_bytes(t.dtype));
    double *values = malloc((size_t)count * sizeof *values);
    must(b->copy_to_host(b, raw, t.data, (size_t)count * dtype_bytes(t.dtype)));
    for (int64_t i = 0; i < count; i++) {
        values[i] = t.dtype == DTYPE_F64   ? ((double *)(void *)raw)[i]
                    : t.dtype == DTYPE_F32 ? (double)((float *)(void *)raw)[i]
                                           : (double)bf16_to_float(((uint16_t *)(void *)raw)[i]);
    }
    free(raw);
    return values;
}

/* The GPU's rounded weights, on the CPU side. */
static void copy_weights(struct side *cpu, struct side *gpu) {
    int64_t n = model_get_layout(gpu->model)->total;
    double *weights = read_values(gpu->backend, model_parameters(gpu->model), n);
    memcpy(model_parameters(cpu->model).data, weights, (size_t)n * sizeof *weights);
    free(weights);
}

static void draw_batch(const struct model_config *c, int which, int32_t *tokens, int32_t *targets) {
    for (int i = 0; i < TOKENS_IN_BATCH; i++) {
        uint64_t at = (uint64_t)which * TOKENS_IN_BATCH + (uint64_t)i;
        tokens[i] = (int32_t)(random_uniform(seed, 77, at) * c->vocab_size);
        targets[i] = i % 37 == 5 ? -1 : (int32_t)(random_uniform(seed, 78, at) * c->vocab_size);
    }
}

static double forward_backward(struct side *s, int which, bool accumulate) {
    int32_t tokens[TOKENS_IN_BATCH], targets[TOKENS_IN_BATCH];
    double loss;
    draw_batch(model_get_config(s->model), which, tokens, targets);
    must(optimizer_begin_step(s->optimizer));
    must(model_forward_backward(s->model, tokens, targets, BATCH, SEQ_LEN, 1.0 / TOKENS_IN_BATCH, accumulate,
        optimizer_loss_sum(s->optimizer), NULL));
    must(backend_read_statistics(s->backend, optimizer_loss_sum(s->optimizer), 1, &loss));
    return loss / TOKENS_IN_BATCH;
}

static void test_loss_and_every_gradient_match_the_cpu_in_fp64(void) {
    for (int i = 0; i < shape_count; i++) {
        struct side gpu, cpu;
        const struct model_config *c = &shapes[i];
        make_side(&gpu, true, c, RECOMPUTE_NONE);
        make_side(&cpu, false, c, RECOMPUTE_NONE);
        copy_weights(&cpu, &gpu);
        double on_gpu = forward_backward(&gpu, 0, false), on_cpu = forward_backward(&cpu, 0, false);
        EXPECT_NEAR(on_gpu, on_cpu, 2e-3); /* the rounding of a logit of 1 to bf16, 2^-9 or less */
        const struct layout *layout = model_get_layout(gpu.model);
        double *a = read_values(gpu.backend, model_gradients(gpu.model), layout->total);
        double *b = read_values(cpu.backend, model_gradients(cpu.model), layout->total);
        double worst = 0.0;
        for (int id = 0; id < PARAMETER_KINDS; id++) {
            for (int layer = 0; layer < (parameter_table[id].per_layer ? c->layers : 1); layer++) {
                int64_t from = layout_offset(layout, c, (enum parameter_id)id, layer);
                int64_t n = parameter_elements(c, (enum parameter_id)id);
                double difference = 0.0, norm = 0.0;
                for (int64_t k = from; k < from + n; k++) {
                    difference += (a[k] - b[k]) * (a[k] - b[k]);
                    norm += b[k] * b[k];
                }
                double error = sqrt(difference / norm);
                worst = fmax(worst, error);
                /* bf16 keeps 8 bits: each of some ten roundings on the way adds 2^-9 or less */
                if (!(error < 0.02)) {
                    printf("    %s, layer %d of shape %d: relative error %.4f\n",
                        parameter_table[id].hugging_face, layer, i, error);
                }
                EXPECT(error < 0.02);
            }
        }
        printf("    shape %d: loss %.5f and %.5f, worst gradient error %.4f\n", i, on_gpu, on_cpu, worst);
        free(a);
        free(b);
        drop_side(&gpu);
        drop_side(&cpu);
    }
}

/* The gradients' bytes; the caller frees them. */
static char *gradient_bytes(struct side *s, size_t *bytes) {
    struct tensor gradients = model_gradients(s->model);
    *bytes = (size_t)model_get_layout(s->model)->total * dtype_bytes(gradients.dtype);
    char *copy = malloc(*bytes);
    must(s->backend->copy_to_host(s->backend, copy, gradients.data, *bytes));
    return copy;
}

static void test_every_recompute_level_gives_the_gradients_of_none_bitwise(void) {
    for (int i = 0; i < shape_count; i++) {
        char *expected = NULL;
        for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
            struct side gpu;
            size_t bytes;
            make_side(&gpu, true, &shapes[i], (enum recompute)level);
            forward_backward(&gpu, 0, false);
            char *gradients = gradient_bytes(&gpu, &bytes);
            if (level == RECOMPUTE_NONE) {
                expected = gradients;
            } else {
                EXPECT(memcmp(gradients, expected, bytes) == 0);
                free(gradients);
            }
            drop_side(&gpu);
        }
        free(expected);
    }
}

static void test_the_same_micro_step_repeated_gives_the_same_bits(void) {
    for (int i = 0; i < shape_count; i++) {
        struct side gpu;
        size_t bytes;
        make_side(&gpu, true, &shapes[i], RECOMPUTE_NONE);
        double loss = forward_backward(&gpu, 0, false);
        char *expected = gradient_bytes(&gpu, &bytes);
        for (int repeat = 0; repeat < (small ? 1 : 20); repeat++) {
            EXPECT(forward_backward(&gpu, 0, false) == loss);
            char *gradients = gradient_bytes(&gpu, &bytes);
            EXPECT(memcmp(gradients, expected, bytes) == 0);
            free(gradients);
        }
        free(expected);
        drop_side(&gpu);
    }
}

static void test_two_micro_steps_add_their_gradients(void) {
    struct side gpu;
    make_side(&gpu, true, &shapes[0], RECOMPUTE_NONE);
    int64_t n = model_get_layout(gpu.model)->total;
    forward_backward(&gpu, 0, false);
    double *first = read_values(gpu.backend, model_gradients(gpu.model), n);
    forward_backward(&gpu, 1, false);
    double *second = read_values(gpu.backend, model_gradients(gpu.model), n);
    forward_backward(&gpu, 0, false);
    forward_backward(&gpu, 1, true);
    double *both = read_values(gpu.backend, model_gradients(gpu.model), n);
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double sum = first[i] + second[i];
        difference += (both[i] - sum) * (both[i] - sum);
        norm += sum * sum;
    }
    EXPECT_NEAR(sqrt(difference / norm), 0.0, 1e-5);
    free(first);
    free(second);
    free(both);
    drop_side(&gpu);
}

/* The learning rate is low enough for the loss to fall at every step: where it leaps, every rounding counts. */
static void test_twenty_steps_give_the_losses_of_the_cpu(void) {
    const double learning_rate = 3e-4;
    for (int i = 0; i < shape_count; i++) {
        struct side gpu, cpu;
        make_side(&gpu, true, &shapes[i], RECOMPUTE_NONE);
        make_side(&cpu, false, &shapes[i], RECOMPUTE_NONE);
        double worst = 0.0, first = 0.0, last = 0.0;
        for (int step = 0; step < (small ? 3 : 20); step++) {
            struct step_result on_gpu, on_cpu;
            struct side *sides[2] = {&gpu, &cpu};
            struct step_result *results[2] = {&on_gpu, &on_cpu};
            for (int s = 0; s < 2; s++) {
                forward_backward(sides[s], step % 2, false);
                must(optimizer_step(sides[s]->optimizer, learning_rate, TOKENS_IN_BATCH, INFINITY, INFINITY));
                must(optimizer_result(sides[s]->optimizer, results[s]));
                EXPECT(results[s]->applied);
            }
            first = step == 0 ? on_cpu.loss : first;
            last = on_cpu.loss;
            /* a gradient that is off by 2%, as the test above allows, makes a step gain so much more or less */
            double difference = fabs(on_gpu.loss - on_cpu.loss), allowed = 2e-3 + 0.02 * (first - last);
            worst = fmax(worst, difference / allowed);
            EXPECT_NEAR(on_gpu.loss, on_cpu.loss, allowed);
            if (step < 5) { /* later the runs are no longer at the same point */
                EXPECT_NEAR(on_gpu.norm, on_cpu.norm, 0.02 * on_cpu.norm);
            }
        }
        EXPECT(last < first - (small ? 0.0 : 0.5)); /* it learns the two batches */
        printf("    shape %d: loss %.3f to %.3f, at worst %.2f of what may differ\n", i, first, last, worst);
        drop_side(&gpu);
        drop_side(&cpu);
    }
}

static void test_initial_weights_are_the_cpus_rounded(void) {
    struct side gpu, cpu;
    make_side(&gpu, true, &shapes[0], RECOMPUTE_NONE);
    must(backend_cpu_create(&cpu.backend, 0));
    must(comm_single_create(&cpu.comm));
    struct model_options m = {.config = shapes[0], .micro_batch = 1, .ranks = 1, .gradient_dtype = DTYPE_F32};
    struct optimizer_options o = {.clip = 1.0};
    must(model_create(&cpu.model, cpu.backend, &m));
    must(optimizer_create(&cpu.optimizer, cpu.model, cpu.comm, &o));
    must(optimizer_initialize(cpu.optimizer, seed));
    const struct layout *layout = model_get_layout(gpu.model);
    double *rounded = read_values(gpu.backend, model_parameters(gpu.model), layout->total);
    const float *exact = model_parameters(cpu.model).data;
    for (int64_t i = 0; i < layout->total; i++) {
        EXPECT(rounded[i] == (double)bf16_to_float(float_to_bf16(exact[i])));
    }
    for (int b = 0; b < layout->buckets; b++) { /* masters are exact */
        float *master = malloc((size_t)layout->bucket[b].count * sizeof *master);
        must(optimizer_export_bucket(gpu.optimizer, b, master));
        EXPECT(memcmp(master, exact + layout->bucket[b].offset,
                   (size_t)layout->bucket[b].count * sizeof *master) == 0);
        free(master);
    }
    free(rounded);
    drop_side(&gpu);
    drop_side(&cpu);
}

int main(void) {
    const char *given = getenv("FLASHGPT_SEED"), *kernel = getenv("FLASHGPT_ATTENTION");
    seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    attention = kernel != NULL ? kernel : attention;
    small = getenv("FLASHGPT_SMALL") != NULL;
    if (small) {
        shapes = &small_shape;
        shape_count = 1;
    }
    printf("  FLASHGPT_SEED=%llu, attention %s\n", (unsigned long long)seed, attention);
    RUN(test_initial_weights_are_the_cpus_rounded);
    RUN(test_loss_and_every_gradient_match_the_cpu_in_fp64);
    RUN(test_every_recompute_level_gives_the_gradients_of_none_bitwise);
    RUN(test_the_same_micro_step_repeated_gives_the_same_bits);
    RUN(test_two_micro_steps_add_their_gradients);
    RUN(test_twenty_steps_give_the_losses_of_the_cpu);
    return test_summary();
}
