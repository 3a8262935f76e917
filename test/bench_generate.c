/* How fast a 124M GPT writes on the GPU that is there: milliseconds for a token of every text, and tokens a second, of the
   decoder alone (with logits on the host, without the choice of tokens). make bench-generate. */
#include "../llmc/decoder.h"
#include "../llmc/random.h"

#include <stdlib.h>

static const struct model_config gpt2_124m = {12, 768, 12, 12, 1024, 50257};
static struct backend *gpu;

static void must(enum status status) {
    if (status != STATUS_OK) {
        fprintf(stderr, "bench_generate: %s\n", error_message());
        exit(1);
    }
}

/* The mean of 100 tokens, after `length` earlier ones. */
static double seconds_a_token(struct model *m, int sequences, int length) {
    struct decoder *d;
    int32_t *tokens;
    float *logits;
    must(ALLOCATE(tokens, (int64_t)sequences * length));
    must(ALLOCATE(logits, (int64_t)sequences * gpt2_124m.vocab_size));
    for (int i = 0; i < sequences * length; i++) {
        tokens[i] = (int32_t)(random_uniform(1, 1, (uint64_t)i) * gpt2_124m.vocab_size);
    }
    must(decoder_create(&d, m, sequences, 0));
    must(decoder_next(d, tokens, length, logits));
    for (int i = 0; i < 3; i++) {
        must(decoder_next(d, tokens, 1, logits));
    }
    double start = time_seconds();
    for (int i = 0; i < 100; i++) {
        must(decoder_next(d, tokens, 1, logits));
    }
    double seconds = (time_seconds() - start) / 100;
    decoder_free(d);
    free(tokens);
    free(logits);
    return seconds;
}

int main(void) {
    static const int cases[][2] = {{1, 16}, {1, 900}, {8, 16}, {64, 16}};
    struct model_options o = {.config = gpt2_124m, .micro_batch = 1, .ranks = 1, .forward_only = true};
    struct model *m;
    must(backend_cuda_create(&gpu, 0, "auto", true));
    must(model_create(&m, gpu, &o));
    must(model_initialize(m, model_parameters(m), 0, model_get_layout(m)->total, 1));
    for (int i = 0; i < 4; i++) {
        double seconds = seconds_a_token(m, cases[i][0], cases[i][1]);
        printf("%2d texts, after %3d tokens: %.3f ms, %.0f tokens/s\n", cases[i][0], cases[i][1],
            1e3 * seconds, cases[i][0] / seconds);
    }
    model_free(m);
    gpu->free(gpu);
    return 0;
}
