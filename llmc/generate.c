/* All texts have one length at every moment, so they go through the decoder as one batch. One that has ended goes on to
   be computed, and is not listened to. */
#include "generate.h"

#include "random.h"

#include <stdlib.h>

enum { NEVER_SO_LONG = 40 }; /* no text has 2^40 tokens */

struct generation {
    struct decoder *decoder;
    const struct tokenizer *tokenizer;
    const struct generate_options *options;
    struct sampler *sampler;
    int texts, vocab_size, running; /* texts that have not ended */
    int64_t length;                 /* tokens of each text */
    int64_t capacity;               /* of the arrays below */
    int32_t *tokens;                /* (texts, capacity) */
    int32_t *next;                  /* (texts, decoder's capacity): what the decoder takes */
    float *logits;                  /* (texts, vocab_size) */
    bool *seen;                     /* (texts, vocab_size): tokens that are in the text */
    bool *ended;
};

static enum status create(struct generation *g, int64_t prompt_count) {
    g->texts = g->running = decoder_sequences(g->decoder);
    g->vocab_size = decoder_config(g->decoder)->vocab_size;
    g->capacity = 1 + prompt_count + g->options->tokens;
    CHECK(sampler_create(&g->sampler, &g->options->sampling, g->vocab_size));
    CHECK(ALLOCATE(g->tokens, g->texts * g->capacity));
    CHECK(ALLOCATE(g->next, (int64_t)g->texts * decoder_capacity(g->decoder)));
    CHECK(ALLOCATE(g->logits, (int64_t)g->texts * g->vocab_size));
    CHECK(ALLOCATE(g->seen, (int64_t)g->texts * g->vocab_size));
    return ALLOCATE(g->ended, g->texts);
}

static void destroy(struct generation *g) {
    sampler_free(g->sampler);
    free(g->tokens);
    free(g->next);
    free(g->logits);
    free(g->seen);
    free(g->ended);
}

static void add_token(struct generation *g, int text, int32_t token) {
    g->tokens[text * g->capacity + g->length] = token;
    g->seen[(int64_t)text * g->vocab_size + token] = true;
}

static enum status set_prompt(struct generation *g, const int32_t *prompt, int64_t count) {
    for (int64_t i = 0; i <= count; i++, g->length++) {
        int32_t token = i == 0 ? tokenizer_end_of_text(g->tokenizer) : prompt[i - 1];
        if (token < 0 || token >= g->vocab_size) {
            return fail("the tokenizer's token %d is none of the model's %d: take the tokenizer that the "
                        "model was trained with",
                (int)token, g->vocab_size);
        }
        for (int text = 0; text < g->texts; text++) {
            add_token(g, text, token);
            g->seen[(int64_t)text * g->vocab_size + token] = i > 0; /* a text's own end is no repetition */
        }
    }
    return STATUS_OK;
}

/* Brings the decoder to the end of the texts. */
static enum status catch_up(struct generation *g) {
    struct decoder *d = g->decoder;
    int64_t capacity = decoder_capacity(d), count = 1;
    if (decoder_length(d) == 0) {
        count = min_i64(g->length, capacity);
    } else if (decoder_length(d) == capacity) {
        decoder_clear(d);
        count = min_i64(g->length, max_i64(capacity / 2, 1));
    }
    for (int64_t text = 0; text < g->texts; text++) {
        memcpy(g->next + text * count, g->tokens + text * g->capacity + g->length - count,
            (size_t)count * sizeof *g->next);
    }
    return decoder_next(d, g->next, (int)count, g->logits);
}

static enum status go_on(
    struct generation *g, int text, generate_sink sink, void *context, int64_t *generated) {
    int32_t end_of_text = tokenizer_end_of_text(g->tokenizer), token = end_of_text;
    if (!g->ended[text]) {
        int64_t row = (int64_t)text * g->vocab_size;
        double uniform = random_uniform(g->options->sampling.seed, RANDOM_STREAM_SAMPLE,
            ((uint64_t)text << NEVER_SO_LONG) + (uint64_t)g->length);
        token = sampler_draw(g->sampler, g->logits + row, g->seen + row, uniform);
        g->ended[text] = token == end_of_text;
        g->running -= g->ended[text];
    }
    add_token(g, text, token);
    if (g->ended[text]) {
        return STATUS_OK;
    }
    ++*generated;
    size_t bytes;
    const char *piece = tokenizer_token_bytes(g->tokenizer, token, &bytes);
    return piece != NULL && bytes > 0 ? sink(context, text, piece, bytes) : STATUS_OK;
}

static enum status generate_all(struct generation *g, generate_sink sink, void *context, int64_t *generated) {
    decoder_clear(g->decoder);
    while (g->length < g->capacity && g->running > 0) {
        CHECK(catch_up(g));
        for (int text = 0; text < g->texts; text++) {
            CHECK(go_on(g, text, sink, context, generated));
        }
        g->length++;
    }
    return STATUS_OK;
}

enum status generate(struct decoder *decoder, const struct tokenizer *tokenizer, const char *prompt,
    size_t prompt_bytes, const struct generate_options *options, generate_sink sink, void *context,
    int64_t *generated) {
    struct generation g = {.decoder = decoder, .tokenizer = tokenizer, .options = options};
    int32_t *tokens = NULL;
    size_t count = 0;
    *generated = 0;
    CHECK(tokenizer_encode(tokenizer, prompt, prompt_bytes, &tokens, &count));
    enum status status = create(&g, (int64_t)count);
    if (status == STATUS_OK) {
        status = set_prompt(&g, tokens, (int64_t)count);
    }
    if (status == STATUS_OK) {
        status = generate_all(&g, sink, context, generated);
    }
    destroy(&g);
    free(tokens);
    return status;
}
