/* libFuzzer harness of the vocabulary readers and of encoding. The input's first byte says what it is: v, a vocab.json
   and, after a zero, its merges; j, a tokenizer.json; r, a rank file; t, a text for the vocabulary in test/golden, of which
   the prefix up to a cut must encode as it does in the whole. A vocabulary that is read encodes its own file. Every
   text must come back from its tokens. Seeds: test/seeds/tokenizer. */
#include "llmc/tokenizer.h"
#include "llmc/tokenizer_files.h"

#include <stdlib.h>

static void check(bool condition) {
    if (!condition) {
        abort();
    }
}

static void check_encoding(const struct tokenizer *tokenizer, const char *text, size_t bytes) {
    int32_t *tokens, *first, *second;
    size_t count, first_count, second_count, at = 0, token_bytes;
    size_t cut = tokenizer_cut(tokenizer, text, bytes);
    check(tokenizer_encode(tokenizer, text, bytes, &tokens, &count) == STATUS_OK);
    check(tokenizer_encode(tokenizer, text, cut, &first, &first_count) == STATUS_OK);
    check(tokenizer_encode(tokenizer, text + cut, bytes - cut, &second, &second_count) == STATUS_OK);
    check(count == first_count + second_count);
    for (size_t i = 0; i < count; i++) {
        check(tokens[i] == (i < first_count ? first[i] : second[i - first_count]));
        const char *token = tokenizer_token_bytes(tokenizer, tokens[i], &token_bytes);
        check(token != NULL && token_bytes <= bytes - at && memcmp(token, text + at, token_bytes) == 0);
        at += token_bytes;
    }
    check(at == bytes);
    free(tokens);
    free(first);
    free(second);
}

static enum status read_vocabulary(struct tokenizer **out, char kind, char *text, size_t bytes) {
    struct json *root;
    if (kind == 'r') {
        return tokenizer_from_ranks(out, text, bytes, "fuzz");
    }
    size_t json_bytes = kind == 'v' ? strnlen(text, bytes) : bytes;
    CHECK(json_parse(&root, text, json_bytes, "fuzz"));
    size_t merges_at = json_bytes < bytes ? json_bytes + 1 : bytes;
    enum status status =
        kind == 'v' ? tokenizer_from_vocab(out, root, "fuzz", text + merges_at, bytes - merges_at, "fuzz")
                    : tokenizer_from_json(out, root, "fuzz");
    json_free(root);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static struct tokenizer *golden; /* read once: a text is a thousand times shorter work */
    struct tokenizer *tokenizer = NULL;
    if (bytes == 0) {
        return 0;
    }
    const char *input = (const char *)data + 1;
    if (golden == NULL) {
        check(tokenizer_open(&golden, "test/golden/tokenizer") == STATUS_OK);
    }
    if (data[0] == 't') {
        check_encoding(golden, input, bytes - 1);
        return 0;
    }
    char *text = malloc(
        bytes - 1 > 0 ? bytes - 1
                      : 1); /* exactly as large as what is in it, so that a sanitizer sees reads beyond */
    check(text != NULL);
    memcpy(text, input, bytes - 1);
    if (read_vocabulary(&tokenizer, (char)data[0], text, bytes - 1) == STATUS_OK) {
        check_encoding(tokenizer, input, bytes - 1);
    }
    tokenizer_close(tokenizer);
    free(text);
    return 0;
}
