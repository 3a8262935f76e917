/* Generation: attention with a cache against attention without, the decoder against the model's own losses and against
   itself without a cache, the sampler against what its options say, and whole texts. */
#include "loss.h"
#include "test.h"

#include <stdlib.h>

#include "llmc/generate.h"
#include "llmc/random.h"

static struct backend *f32, *f64;

/* The larger one; a NaN wins. */
static double larger(double a, double b) {
    return b > a || isnan(b) ? b : a;
}

static double normal(uint64_t stream, int64_t i) {
    return (double)random_normal(7, stream, (uint64_t)i);
}

/* ---- attention with a cache ---- */

/* `count` random values in the backend's dtype. */
static void *random_values(struct backend *b, int64_t count, uint64_t stream) {
    void *values;
    EXPECT_OK(b->memory_allocate(b, &values, (size_t)count * dtype_bytes(b->profile.activation_dtype)));
    for (int64_t i = 0; i < count; i++) {
        if (b == f64) {
            ((double *)values)[i] = normal(stream, i);
        } else {
            ((float *)values)[i] = (float)normal(stream, i);
        }
    }
    return values;
}

/* How far apart outputs may be, in units of their type's rounding. Own products sum in the same order whatever their size;
   OpenBLAS' do not. */
#ifdef WITH_OPENBLAS
static const double most_roundings = 64;
#else
static const double most_roundings = 0;
#endif

static double largest_difference(struct backend *b, const void *x, const void *y, int64_t count) {
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        double difference = b == f64 ? fabs(((const double *)x)[i] - ((const double *)y)[i])
                                     : fabs((double)((const float *)x)[i] - ((const float *)y)[i]);
        largest = larger(largest, difference);
    }
    return largest;
}

/* Feeds the same sequences in pieces of `step` tokens; every output must be attention_forward's. */
static void check_pieces(struct backend *b, struct attention_shape whole, int step, int capacity) {
    size_t element = dtype_bytes(b->profile.activation_dtype);
    int64_t heads = whole.heads + 2 * whole.kv_heads, T = whole.seq_len, D = whole.head_dim;
    int64_t in_row = heads * D, out_row = (int64_t)whole.heads * D;
    char *qkv = random_values(b, whole.batch * T * in_row, 1),
         *out = random_values(b, whole.batch * T * out_row, 2);
    char *lse = random_values(b, whole.batch * T * whole.heads, 3),
         *piece = random_values(b, whole.batch * T * in_row, 4);
    char *piece_out = random_values(b, whole.batch * T * out_row, 5);
    int64_t cached = (int64_t)whole.batch * 2 * whole.kv_heads * capacity * D;
    char *cache = random_values(b, cached, 6);
    memset(cache, 0xFF, (size_t)cached * element); /* NaN: what is not there must not be read */
    EXPECT_OK(b->attention_forward(b, out, lse, NULL, NULL, qkv, whole));
    double largest = 0, rounding = b == f64 ? 0x1p-53 : 0x1p-24; /* of values around 1 */
    for (int past = 0; past < T; past += step) {
        struct attention_shape s = whole;
        s.seq_len = (int)min_i64(step, T - past);
        for (int64_t i = 0; i < whole.batch; i++) {
            memcpy(piece + (size_t)(i * s.seq_len * in_row) * element,
                qkv + (size_t)((i * T + past) * in_row) * element, (size_t)(s.seq_len * in_row) * element);
        }
        EXPECT_OK(b->attention_cached(b, piece_out, cache, piece, s, past, capacity));
        for (int64_t i = 0; i < whole.batch; i++) {
            double difference = largest_difference(b, piece_out + (size_t)(i * s.seq_len * out_row) * element,
                out + (size_t)((i * T + past) * out_row) * element, s.seq_len * out_row);
            largest = larger(largest, difference);
        }
    }
    EXPECT_NEAR(largest, 0, most_roundings * rounding);
    char *all[] = {qkv, out, lse, piece, piece_out, cache};
    for (int i = 0; i < 6; i++) {
        b->memory_free(b, all[i]);
    }
}

static void test_attention_with_a_cache_is_attention_without(void) {
    const struct attention_shape shapes[] = {{1, 450, 2, 2, 16}, {3, 77, 6, 2, 8}, {2, 200, 4, 1, 33}};
    const int steps[] = {1, 7, 64, 450};
    struct backend *backends[] = {f32, f64};
    for (int i = 0; i < 3 * 4 * 2; i++) {
        struct attention_shape s = shapes[i % 3];
        check_pieces(backends[i / 12], s, steps[i / 3 % 4], s.seq_len + i % 5);
    }
}

/* ---- the decoder ---- */

/* Values larger than a fresh model's, so that its choices are not near to each other; positions that tell, and no bias
   towards some token, so that they are not always the same. */
static struct model *make_model(struct backend *b, const struct model_config *c, int batch) {
    struct model_options o = {.config = *c, .micro_batch = batch, .ranks = 1, .forward_only = true};
    struct model *m = NULL;
    EXPECT_OK(model_create(&m, b, &o));
    struct tensor parameters = model_parameters(m);
    struct tensor positions =
        tensor_at(parameters, layout_offset(model_get_layout(m), c, POSITION_EMBEDDING, 0));
    struct tensor bias = tensor_at(parameters, layout_offset(model_get_layout(m), c, FINAL_NORM_BIAS, 0));
    EXPECT_OK(b->random_normal(b, parameters, model_get_layout(m)->total, 11, 99, 0, 0.15));
    EXPECT_OK(b->random_normal(b, positions, (int64_t)c->seq_len * c->channels, 11, 98, 0, 1.0));
    EXPECT_OK(b->fill(b, bias, 0.0, c->channels));
    return m;
}

static int32_t draw(uint64_t stream, int64_t i, int vocab_size) {
    return (int32_t)(random_uniform(3, stream, (uint64_t)i) * vocab_size);
}

static void test_logits_of_the_decoder_are_those_behind_the_models_losses(void) {
    const struct model_config shapes[] = {{2, 24, 3, 3, 40, 61}, {3, 32, 4, 1, 25, 130}};
    enum { BATCH = 3 };
    for (int i = 0; i < 4; i++) {
        const struct model_config *c = &shapes[i % 2];
        struct backend *b = i < 2 ? f32 : f64;
        struct model *m = make_model(b, c, BATCH);
        struct decoder *d = NULL;
        int32_t tokens[BATCH * 40], targets[BATCH * 40], next[BATCH * 40];
        double losses[BATCH * 40];
        float logits[BATCH * 130];
        int T = c->seq_len;
        for (int t = 0; t < BATCH * T; t++) {
            tokens[t] = draw(1, t, c->vocab_size);
            targets[t] = draw(2, t, c->vocab_size);
        }
        EXPECT_OK(model_token_losses(m, tokens, targets, BATCH, T, losses, NULL));
        EXPECT_OK(decoder_create(&d, m, BATCH, 0));
        double worst = 0;
        for (int at = 0, count = 5; at < T; at += count, count = 1 + at % 3) {
            count = (int)min_i64(count, T - at);
            for (int s = 0; s < BATCH; s++) {
                memcpy(next + s * count, tokens + s * T + at, (size_t)count * sizeof *next);
            }
            EXPECT_OK(decoder_next(d, next, count, logits));
            for (int s = 0; s < BATCH; s++) {
                int row = s * T + at + count - 1;
                double loss = loss_of(logits + s * c->vocab_size, c->vocab_size, targets[row]);
                worst = larger(worst, fabs(loss - losses[row]));
            }
        }
        EXPECT(decoder_length(d) == T);
        EXPECT_NEAR(worst, 0, b == f32 ? 2e-5 : 2e-6); /* logits come as floats of up to 20 */
        EXPECT(decoder_next(d, tokens, 1, logits) == STATUS_ERROR);
        EXPECT_CONTAINS(error_message(), "do not fit");
        decoder_free(d);
        model_free(m);
    }
}

static int likeliest(const float *logits, int count) {
    int best = 0;
    for (int i = 1; i < count; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

static void test_greedy_tokens_with_a_cache_are_those_without_for_512_steps(void) {
    enum { STEPS = 512, PROMPT = 5, VOCABULARY = 211 };
    const struct model_config c = {2, 32, 4, 2, STEPS + PROMPT, VOCABULARY};
    struct model *m = make_model(f32, &c, 1);
    struct decoder *cached = NULL, *fresh = NULL;
    int32_t tokens[PROMPT + STEPS];
    float with[VOCABULARY], without[VOCABULARY];
    bool appeared[VOCABULARY] = {false};
    int different = 0, distinct = 0;
    EXPECT_OK(decoder_create(&cached, m, 1, 0));
    EXPECT_OK(decoder_create(&fresh, m, 1, 0));
    for (int t = 0; t < PROMPT; t++) {
        tokens[t] = draw(4, t, VOCABULARY);
    }
    for (int n = PROMPT, last = 0; n < PROMPT + STEPS; last = n, n++) {
        decoder_clear(fresh);
        EXPECT_OK(decoder_next(cached, tokens + last, n - last, with));
        EXPECT_OK(decoder_next(fresh, tokens, n, without));
        tokens[n] = likeliest(with, VOCABULARY);
        different += tokens[n] != likeliest(without, VOCABULARY);
        distinct += !appeared[tokens[n]];
        appeared[tokens[n]] = true;
    }
    EXPECT(different == 0);
    EXPECT(distinct > 50); /* not one token for ever, which would agree by itself */
    decoder_free(cached);
    decoder_free(fresh);
    model_free(m);
}

/* ---- the sampler ---- */

enum { VOCAB = 6 };
static const float six_logits[VOCAB] = {1.0f, 3.0f, -2.0f, 2.0f, 3.0f, 0.5f};

static void count_draws(struct sampling options, const bool *seen, int draws, int counts[VOCAB]) {
    struct sampler *s = NULL;
    static const bool none[VOCAB];
    EXPECT_OK(sampler_create(&s, &options, VOCAB));
    memset(counts, 0, VOCAB * sizeof *counts);
    for (int i = 0; i < draws; i++) {
        float logits[VOCAB];
        memcpy(logits, six_logits, sizeof logits);
        counts[sampler_draw(s, logits, seen != NULL ? seen : none, (i + 0.5) / draws)]++;
    }
    sampler_free(s);
}

/* Draws are spread evenly over [0, 1), so counts are probabilities to within a draw. */
static void expect_shares(struct sampling options, const bool *seen, const double expected[VOCAB]) {
    enum { DRAWS = 10000 };
    int counts[VOCAB];
    double sum = 0;
    count_draws(options, seen, DRAWS, counts);
    for (int i = 0; i < VOCAB; i++) {
        sum += expected[i];
    }
    for (int i = 0; i < VOCAB; i++) {
        EXPECT_NEAR(counts[i], DRAWS * expected[i] / sum, 1.5);
    }
}

static void test_draws_follow_the_softmax_at_the_temperature(void) {
    const double temperatures[] = {1.0, 0.5, 2.5};
    for (int t = 0; t < 3; t++) {
        double expected[VOCAB];
        for (int i = 0; i < VOCAB; i++) {
            expected[i] = exp(six_logits[i] / temperatures[t]);
        }
        expect_shares((struct sampling){.temperature = temperatures[t], .top_p = 1, .repetition_penalty = 1},
            NULL, expected);
    }
}

static void test_temperature_0_takes_the_first_of_the_likeliest(void) {
    expect_shares((struct sampling){.temperature = 0, .top_p = 1, .repetition_penalty = 1}, NULL,
        (double[VOCAB]){0, 1, 0, 0, 0, 0});
}

static void test_top_k_leaves_the_k_likeliest(void) {
    expect_shares((struct sampling){.temperature = 1, .top_k = 3, .top_p = 1, .repetition_penalty = 1}, NULL,
        (double[VOCAB]){0, exp(3), 0, exp(2), exp(3), 0});
    expect_shares((struct sampling){.temperature = 1, .top_k = 1, .top_p = 1, .repetition_penalty = 1}, NULL,
        (double[VOCAB]){0, 1, 0, 0, 0, 0});
}

/* The softmax of the six: 0.0522 0.3858 0.0026 0.1419 0.3858 0.0317; the likeliest together: 0.386 0.772 0.914 0.966 */
static void test_top_p_leaves_the_fewest_that_reach_the_share(void) {
    const struct {
        double top_p;
        double expected[VOCAB];
    } cases[] = {{0.38, {0, 1, 0, 0, 0, 0}}, {0.39, {0, exp(3), 0, 0, exp(3), 0}},
        {0.90, {0, exp(3), 0, exp(2), exp(3), 0}}, {0.92, {exp(1), exp(3), 0, exp(2), exp(3), 0}}};
    for (int i = 0; i < 4; i++) {
        expect_shares((struct sampling){.temperature = 1, .top_p = cases[i].top_p, .repetition_penalty = 1},
            NULL, cases[i].expected);
    }
    /* the share is of what top-k left: of the two likeliest, 0.5 needs one */
    expect_shares((struct sampling){.temperature = 1, .top_k = 2, .top_p = 0.5, .repetition_penalty = 1},
        NULL, (double[VOCAB]){0, 1, 0, 0, 0, 0});
}

static void test_the_repetition_penalty_makes_tokens_of_the_text_less_likely(void) {
    const bool seen[VOCAB] = {false, true, true, false, false, false};
    expect_shares((struct sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 2}, seen,
        (double[VOCAB]){exp(1), exp(1.5), exp(-4), exp(2), exp(3), exp(0.5)});
    expect_shares((struct sampling){.temperature = 0, .top_p = 1, .repetition_penalty = 2}, seen,
        (double[VOCAB]){0, 0, 0, 0, 1, 0});
}

static void test_a_nan_is_not_drawn(void) {
    const double top_ps[] = {1.0, 0.9};
    for (int i = 0; i < 2; i++) {
        struct sampler *s = NULL;
        struct sampling options = {.temperature = 1, .top_p = top_ps[i], .repetition_penalty = 1};
        bool none[3] = {false};
        EXPECT_OK(sampler_create(&s, &options, 3));
        for (int n = 0; n < 100; n++) {
            float logits[3] = {NAN, 1.0f, NAN};
            EXPECT(sampler_draw(s, logits, none, n / 100.0) == 1);
        }
        sampler_free(s);
    }
}

/* ---- texts ---- */

struct text {
    char bytes[4][2000];
    size_t count[4];
};

static enum status take(void *context, int sample, const char *piece, size_t bytes) {
    struct text *t = context;
    memcpy(t->bytes[sample] + t->count[sample], piece, bytes);
    t->count[sample] += bytes;
    return STATUS_OK;
}

static int64_t make_texts(struct model *m, int samples, int capacity, const char *prompt,
    const struct generate_options *options, struct text *text) {
    struct decoder *d = NULL;
    struct tokenizer *bytes = NULL;
    int64_t generated = 0;
    memset(text, 0, sizeof *text);
    EXPECT_OK(decoder_create(&d, m, samples, capacity));
    EXPECT_OK(tokenizer_open(&bytes, "bytes"));
    EXPECT_OK(generate(d, bytes, prompt, strlen(prompt), options, take, text, &generated));
    tokenizer_close(bytes);
    decoder_free(d);
    return generated;
}

static const struct model_config byte_model = {2, 32, 4, 4, 48, 257};

static void test_samples_are_the_same_alone_and_together_and_differ_from_each_other(void) {
    struct model *m = make_model(f64, &byte_model, 1);
    struct generate_options o = {{.temperature = 2, .top_p = 1, .repetition_penalty = 1, .seed = 5}, 40};
    struct text alone, again, together;
    make_texts(m, 1, 0, "ab", &o, &alone);
    make_texts(m, 1, 0, "ab", &o, &again);
    make_texts(m, 4, 0, "ab", &o, &together);
    EXPECT(alone.count[0] > 0 && alone.count[0] <= 40);
    EXPECT(memcmp(&alone, &again, sizeof alone) == 0);
    EXPECT(together.count[0] == alone.count[0] &&
           memcmp(alone.bytes[0], together.bytes[0], alone.count[0]) == 0);
    for (int i = 1; i < 4; i++) {
        EXPECT(memcmp(together.bytes[0], together.bytes[i], sizeof together.bytes[0]) != 0);
    }
    o.sampling.seed = 6;
    make_texts(m, 1, 0, "ab", &o, &again);
    EXPECT(memcmp(&alone, &again, sizeof alone) != 0);
    model_free(m);
}

/* With the window full, the newer half of the text is all that the next tokens depend on. */
static void test_a_text_longer_than_the_positions_goes_on_with_its_newer_half(void) {
    struct model *m = make_model(f64, &byte_model, 1);
    struct generate_options o = {{.temperature = 0, .top_p = 1, .repetition_penalty = 1}, 200};
    struct text text;
    struct decoder *d = NULL;
    float logits[257];
    int32_t tokens[260] = {256};
    EXPECT(make_texts(m, 1, 16, "", &o, &text) == (int64_t)text.count[0]);
    EXPECT(text.count[0] == 200);
    for (int i = 0; i < 200; i++) {
        tokens[i + 1] = (unsigned char)text.bytes[0][i];
    }
    EXPECT_OK(decoder_create(&d, m, 1, 16));
    for (int n = 1, begin = 0; n <= 200; n++) {
        if (n - begin > 16) {
            begin = n - 8;
        }
        decoder_clear(d);
        EXPECT_OK(decoder_next(d, tokens + begin, n - begin, logits));
        EXPECT(likeliest(logits, 257) == tokens[n]);
    }
    decoder_free(d);
    model_free(m);
}

static void test_prompts_of_any_length_are_taken(void) {
    struct model *m = make_model(f32, &byte_model, 1);
    struct generate_options o = {{.temperature = 1, .top_p = 1, .repetition_penalty = 1}, 3};
    char prompt[300];
    memset(prompt, 'x', sizeof prompt);
    for (int length = 0; length < 300; length += length < 60 ? 1 : 97) {
        struct text text;
        prompt[length] = '\0';
        EXPECT(make_texts(m, 2, 0, prompt, &o, &text) >= 0);
        prompt[length] = 'x';
    }
    model_free(m);
}

static void test_a_text_ends_with_the_end_of_text(void) {
    struct model *m = make_model(f32, &byte_model, 1);
    const struct model_config *c = &byte_model;
    /* the final norm's output is the bias alone, and the end of text is what lies along it */
    struct tensor p = model_parameters(m);
    const struct layout *l = model_get_layout(m);
    float *weight = tensor_at(p, layout_offset(l, c, FINAL_NORM_WEIGHT, 0)).data;
    float *bias = tensor_at(p, layout_offset(l, c, FINAL_NORM_BIAS, 0)).data;
    float *embedding = tensor_at(p, layout_offset(l, c, TOKEN_EMBEDDING, 0)).data;
    for (int i = 0; i < c->channels; i++) {
        weight[i] = 0;
        bias[i] = 10.0f * embedding[256 * c->channels + i];
        embedding[256 * c->channels + i] *= 10.0f;
    }
    struct generate_options o = {{.temperature = 1, .top_p = 1, .repetition_penalty = 1}, 40};
    struct text text;
    EXPECT(make_texts(m, 3, 0, "abc", &o, &text) == 0);
    EXPECT(text.count[0] == 0 && text.count[2] == 0);
    model_free(m);
}

static void test_a_tokenizer_larger_than_the_model_is_refused(void) {
    const struct model_config small = {1, 16, 2, 2, 16, 200};
    struct model *m = make_model(f32, &small, 1);
    struct generate_options o = {{.temperature = 1, .top_p = 1, .repetition_penalty = 1}, 3};
    struct decoder *d = NULL;
    struct tokenizer *bytes = NULL;
    struct text text;
    int64_t generated;
    EXPECT_OK(decoder_create(&d, m, 1, 0));
    EXPECT_OK(tokenizer_open(&bytes, "bytes"));
    EXPECT(generate(d, bytes, "a", 1, &o, take, &text, &generated) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "none of the model's 200");
    tokenizer_close(bytes);
    decoder_free(d);
    model_free(m);
}

int main(void) {
    if (!succeeded(backend_cpu_create(&f32, 2)) || !succeeded(backend_cpu_f64_create(&f64, 2))) {
        return 1;
    }
    RUN(test_attention_with_a_cache_is_attention_without);
    RUN(test_logits_of_the_decoder_are_those_behind_the_models_losses);
    RUN(test_greedy_tokens_with_a_cache_are_those_without_for_512_steps);
    RUN(test_draws_follow_the_softmax_at_the_temperature);
    RUN(test_temperature_0_takes_the_first_of_the_likeliest);
    RUN(test_top_k_leaves_the_k_likeliest);
    RUN(test_top_p_leaves_the_fewest_that_reach_the_share);
    RUN(test_the_repetition_penalty_makes_tokens_of_the_text_less_likely);
    RUN(test_a_nan_is_not_drawn);
    RUN(test_samples_are_the_same_alone_and_together_and_differ_from_each_other);
    RUN(test_a_text_longer_than_the_positions_goes_on_with_its_newer_half);
    RUN(test_prompts_of_any_length_are_taken);
    RUN(test_a_text_ends_with_the_end_of_text);
    RUN(test_a_tokenizer_larger_than_the_model_is_refused);
    f32->free(f32);
    f64->free(f64);
    return test_summary();
}
