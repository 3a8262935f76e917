/* print_logits FOLDER TOKEN...   the logits after each token, with the model of a checkpoint or Hugging Face folder, on
   the CPU: raw floats, (tokens, vocabulary), to standard output. For scripts that compare them. */
#include <stdlib.h>

#include "../llmc/checkpoint.h"
#include "../llmc/decoder.h"
#include "../llmc/inference.h"

static enum status print_logits(struct decoder *d, int count, char **tokens) {
    int vocab_size = decoder_config(d)->vocab_size;
    float *logits;
    CHECK(ALLOCATE(logits, vocab_size));
    enum status status = STATUS_OK;
    for (int i = 0; i < count && status == STATUS_OK; i++) {
        int32_t token = (int32_t)strtol(tokens[i], NULL, 10);
        status = token >= 0 && token < vocab_size ? decoder_next(d, &token, 1, logits)
                                                  : fail("token %s is none of the model's", tokens[i]);
        if (status == STATUS_OK &&
            fwrite(logits, sizeof *logits, (size_t)vocab_size, stdout) != (size_t)vocab_size) {
            status = fail("cannot write");
        }
    }
    free(logits);
    return status;
}

static enum status run(struct backend *b, int argc, char **argv) {
    struct model_config config;
    struct inference it;
    struct decoder *d = NULL;
    CHECK(checkpoint_read_config(argv[1], &config));
    CHECK(inference_open(&it, b, argv[1], &config, "none", 1, 1, 0));
    enum status status = decoder_create(&d, it.model, 1, 0);
    if (status == STATUS_OK) {
        status = print_logits(d, argc - 2, argv + 2);
    }
    decoder_free(d);
    inference_close(&it);
    return status;
}

int main(int argc, char **argv) {
    struct backend *b = NULL;
    enum status status = argc > 2 ? backend_cpu_create(&b, 0) : fail("usage: print_logits FOLDER TOKEN...");
    if (status == STATUS_OK) {
        status = run(b, argc, argv);
        b->free(b);
    }
    if (status != STATUS_OK) {
        fprintf(stderr, "print_logits: %s\n", error_message());
    }
    return status == STATUS_OK ? 0 : 1;
}
