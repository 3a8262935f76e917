/* The "bytes" tokenizer: every byte is a token, and one more ends a text. */
#include "tokenizer.h"

#include <stdlib.h>

enum { BYTE_VALUES = 256 };

struct tokenizer {
    char bytes[BYTE_VALUES]; /* what the tokens stand for */
};

enum status tokenizer_open(struct tokenizer **out, const char *name) {
    if (strcmp(name, "bytes") != 0) {
        return fail("--tokenizer: '%s' is not known; use bytes", name);
    }
    struct tokenizer *tokenizer;
    CHECK(ALLOCATE(tokenizer, 1));
    for (int i = 0; i < BYTE_VALUES; i++) {
        tokenizer->bytes[i] = (char)i;
    }
    *out = tokenizer;
    return STATUS_OK;
}

void tokenizer_close(struct tokenizer *tokenizer) {
    free(tokenizer);
}

int tokenizer_vocab_size(const struct tokenizer *tokenizer) {
    (void)tokenizer;
    return BYTE_VALUES + 1;
}

int32_t tokenizer_end_of_text(const struct tokenizer *tokenizer) {
    (void)tokenizer;
    return BYTE_VALUES;
}

enum status tokenizer_encode(
    const struct tokenizer *tokenizer, const char *text, size_t bytes, int32_t **tokens, size_t *count) {
    (void)tokenizer;
    int32_t *encoded;
    CHECK(ALLOCATE(encoded, bytes));
    for (size_t i = 0; i < bytes; i++) {
        encoded[i] = (unsigned char)text[i];
    }
    *tokens = encoded;
    *count = bytes;
    return STATUS_OK;
}

const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t token, size_t *bytes) {
    *bytes = 0;
    if (token < 0 || token > BYTE_VALUES) {
        return NULL;
    }
    if (token == BYTE_VALUES) {
        return "";
    }
    *bytes = 1;
    return &tokenizer->bytes[token];
}
