/* Generation on the GPU: attention with a cache against the CPU backend in fp64 on the same (bf16) values, and the
   decoder's logits for a 124M GPT with random weights against recomputing everything. Inputs are new in every run;
   FLASHGPT_SEED=n repeats the run that printed n; FLASHGPT_SMALL takes a small GPT and less text, for compute-sanitizer. */
#include "../llmc/decoder.h"
#include "../llmc/random.h"
#include "loss.h"
#include "test.h"

#include <stdlib.h>
#include <time.h>

static struct backend *gpu, *cpu;
static uint64_t seed, draws;
static bool small;

static void must(enum status status) {
    if (status != STATUS_OK) {
        printf("    %s\n0 passed, 1 failed\n", error_message());
        exit(1);
    }
}

static void *host_memory(int64_t count, size_t size) {
    void *memory;
    must(allocate(&memory, (size_t)count, size));
    return memory;
}

static void *device_memory(struct backend *b, int64_t count, size_t size) {
    void *memory;
    must(b->memory_allocate(b, &memory, (size_t)count * size));
    return memory;
}

/* ---- attention with a cache ---- */

/* All tokens of the sequences, in pieces; `step` 0: a prompt of half of them, then one after the other. */
static void check_attention(struct attention_shape whole, int step, double size) {
    int64_t heads = whole.heads + 2 * whole.kv_heads, T = whole.seq_len, D = whole.head_dim;
    int64_t in_row = heads * D, out_row = (int64_t)whole.heads * D;
    int64_t in_count = whole.batch * T * in_row, out_count = whole.batch * T * out_row;
    int capacity = whole.seq_len + 3;
    int64_t cached = (int64_t)whole.batch * 2 * whole.kv_heads * capacity * D;
    double *qkv = host_memory(in_count, 8), *expected = host_memory(out_count, 8),
           *lse = host_memory(whole.batch * T * whole.heads, 8);
    uint16_t *bits = host_memory(in_count, 2), *piece = host_memory(in_count, 2),
             *got = host_memory(out_count, 2), *again = host_memory(out_count, 2);
    void *in = device_memory(gpu, in_count, 2), *out = device_memory(gpu, out_count, 2),
         *cache = device_memory(gpu, cached, 2);
    uint16_t *nan = host_memory(cached, 2);
    memset(nan, 0xFF, (size_t)cached * 2);
    must(gpu->copy_to_device(gpu, cache, nan, (size_t)cached * 2)); /* what is not there must not be read */
    for (int64_t i = 0; i < in_count; i++) {
        bits[i] = float_to_bf16((float)(size * random_normal(seed, 0, draws++)));
        qkv[i] = bf16_to_float(bits[i]);
    }
    must(cpu->attention_forward(cpu, expected, lse, NULL, NULL, qkv, whole));
    double worst = 0, largest = 0;
    int different = 0;
    for (int past = 0, count; past < T; past += count) {
        struct attention_shape s = whole;
        s.seq_len = count = (int)min_i64(step > 0 ? step : past == 0 ? (T + 1) / 2 : 1, T - past);
        for (int64_t i = 0; i < whole.batch; i++) {
            memcpy(piece + i * count * in_row, bits + (i * T + past) * in_row, (size_t)(count * in_row) * 2);
        }
        int64_t results = whole.batch * count * out_row;
        must(gpu->copy_to_device(gpu, in, piece, (size_t)(whole.batch * count * in_row) * 2));
        for (int call = 0; call < 2; call++) {
            memset(nan, 0xFF, (size_t)min_i64(results, cached) * 2);
            must(gpu->copy_to_device(gpu, out, nan, (size_t)min_i64(results, cached) * 2));
            must(gpu->attention_cached(gpu, out, cache, in, s, past, capacity));
            must(gpu->copy_to_host(gpu, call == 0 ? got : again, out, (size_t)results * 2));
        }
        different += memcmp(got, again, (size_t)results * 2) != 0;
        for (int64_t i = 0; i < whole.batch; i++) {
            for (int64_t j = 0; j < count * out_row; j++) {
                double right = expected[(i * T + past) * out_row + j];
                double error = fabs(bf16_to_float(got[i * count * out_row + j]) - right);
                worst = error <= worst ? worst : error; /* a NaN stays */
                largest = fmax(largest, fabs(right));
            }
        }
    }
    EXPECT(different == 0);
    EXPECT_NEAR(worst, 0, largest * (1.0 / 256)); /* one rounding to bf16 of the largest */
    free(qkv), free(expected), free(lse), free(bits), free(piece), free(got), free(again), free(nan);
    gpu->memory_free(gpu, in), gpu->memory_free(gpu, out), gpu->memory_free(gpu, cache);
}

static void test_attention_with_a_cache_matches_the_cpu_in_fp64(void) {
    const struct attention_shape shapes[] = {{1, 130, 4, 4, 64}, {3, 70, 6, 2, 64}, {2, 300, 4, 1, 128},
        {1, 65, 2, 2, 80}, {2, 33, 4, 2, 16}, {1, 90, 2, 1, 256}, {1, 1100, 2, 2, 64}, {2, 40, 3, 3, 24}};
    const int steps[] = {0, 1, 48, 2000};
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 4; j++) {
            if (steps[j] != 1 || shapes[i].seq_len < (small ? 50 : 500)) { /* else it is too many calls */
                check_attention(shapes[i], steps[j], i % 2 == 0 ? 1.0 : 3.0);
            }
        }
    }
}

/* ---- the decoder ---- */

static struct model_config config = {12, 768, 12, 12, 1024, 50257}; /* 124M */
enum { PROMPT = 200, STEPS = 40 };

static struct model *make_model(void) {
    struct model_options o = {.config = config, .micro_batch = 1, .ranks = 1, .forward_only = true};
    struct model *m;
    must(model_create(&m, gpu, &o));
    must(model_initialize(m, model_parameters(m), 0, model_get_layout(m)->total, seed));
    return m;
}

static int32_t draw_token(void) {
    return (int32_t)(random_uniform(seed, 1, draws++) * config.vocab_size);
}

static void test_logits_with_a_cache_are_those_of_full_recomputation(void) {
    struct model *m = make_model();
    struct decoder *cached, *fresh;
    int vocab = config.vocab_size;
    int32_t tokens[PROMPT + STEPS + 1];
    double *losses = host_memory(PROMPT + STEPS, sizeof *losses), worst = 0, scale = 0, worst_loss = 0;
    float *with = host_memory(vocab, sizeof *with), *without = host_memory(vocab, sizeof *without);
    must(decoder_create(&cached, m, 1, 0));
    must(decoder_create(&fresh, m, 1, 0));
    int end = PROMPT + (small ? 4 : STEPS); /* each length has products to be timed */
    for (int i = 0; i <= PROMPT + STEPS; i++) {
        tokens[i] = draw_token();
    }
    must(model_token_losses(m, tokens, tokens + 1, 1, PROMPT + STEPS, losses, NULL));
    for (int n = PROMPT, last = 0; n < end; last = n, n++) {
        decoder_clear(fresh);
        must(decoder_next(cached, tokens + last, n - last, with));
        must(decoder_next(fresh, tokens, n, without));
        for (int i = 0; i < vocab; i++) {
            double error = fabs((double)with[i] - without[i]);
            worst = error <= worst ? worst : error;
            scale = fmax(scale, fabs((double)without[i]));
        }
        double error = fabs(loss_of(with, vocab, tokens[n]) - losses[n - 1]);
        worst_loss = error <= worst_loss ? worst_loss : error;
    }
    printf("    logits up to %.3f differ by up to %.4f, losses by %.4f\n", scale, worst, worst_loss);
    /* 24 branches are rounded to 8 bits on the way, and then the logit itself: a few units in its last place */
    EXPECT(scale > 0.1);
    EXPECT_NEAR(worst, 0, scale * (4.0 / 256));
    EXPECT_NEAR(worst_loss, 0, scale * (4.0 / 256));
    decoder_free(cached);
    decoder_free(fresh);
    model_free(m);
    free(losses), free(with), free(without);
}

int main(void) {
    const char *fixed = getenv("FLASHGPT_SEED");
    seed = fixed != NULL ? strtoull(fixed, NULL, 10) : (uint64_t)time(NULL);
    printf("  FLASHGPT_SEED=%llu\n", (unsigned long long)seed);
    small = getenv("FLASHGPT_SMALL") != NULL;
    if (small) {
        config = (struct model_config){2, 128, 2, 2, 256, 1000};
    }
    must(backend_cuda_create(&gpu, 0, "auto", true));
    must(backend_cpu_f64_create(&cpu, 0));
    RUN(test_attention_with_a_cache_matches_the_cpu_in_fp64);
    RUN(test_logits_with_a_cache_are_those_of_full_recomputation);
    cpu->free(cpu);
    gpu->free(gpu);
    return test_summary();
}
