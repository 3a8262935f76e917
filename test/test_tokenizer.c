/* The tokenizer "bytes", and what all have in common; byte-pair encoding is test_bpe.c's. */
#include "llmc/tokenizer.h"
#include "test.h"

#include <stdlib.h>

static void test_an_unknown_tokenizer_is_refused_with_the_known_ones(void) {
    struct tokenizer *tokenizer = NULL;
    EXPECT(tokenizer_open(&tokenizer, "words") == STATUS_ERROR);
    EXPECT_STRING(error_message(),
        "--tokenizer: 'words' is not known; use bytes, or the path of vocab.json and merges.txt, of "
        "tokenizer.json or of a tiktoken rank file");
    EXPECT(tokenizer == NULL);
}

static void test_bytes_has_257_tokens_and_the_last_is_end_of_text(void) {
    struct tokenizer *tokenizer;
    EXPECT(tokenizer_open(&tokenizer, "bytes") == STATUS_OK);
    EXPECT(tokenizer_vocab_size(tokenizer) == 257);
    EXPECT(tokenizer_end_of_text(tokenizer) == 256);
    tokenizer_close(tokenizer);
}

static void test_bytes_encodes_every_byte_as_its_value(void) {
    struct tokenizer *tokenizer;
    EXPECT(tokenizer_open(&tokenizer, "bytes") == STATUS_OK);
    const char text[] = "a\0\xff\xc3\xa9\n"; /* a zero, bad UTF-8 and good */
    const int32_t expected[] = {97, 0, 255, 195, 169, 10};
    int32_t *tokens;
    size_t count;
    EXPECT(tokenizer_encode(tokenizer, text, 6, &tokens, &count) == STATUS_OK);
    EXPECT(count == 6 && memcmp(tokens, expected, sizeof expected) == 0);
    free(tokens);
    EXPECT(tokenizer_encode(tokenizer, "", 0, &tokens, &count) == STATUS_OK);
    EXPECT(count == 0);
    free(tokens);
    tokenizer_close(tokenizer);
}

static void test_bytes_decodes_every_token_to_its_byte_and_end_of_text_to_nothing(void) {
    struct tokenizer *tokenizer;
    EXPECT(tokenizer_open(&tokenizer, "bytes") == STATUS_OK);
    for (int32_t token = 0; token < 256; token++) {
        size_t bytes = 0;
        const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
        EXPECT(bytes == 1 && text != NULL && (unsigned char)*text == token);
    }
    size_t bytes = 1;
    EXPECT(tokenizer_token_bytes(tokenizer, 256, &bytes) != NULL && bytes == 0);
    tokenizer_close(tokenizer);
}

static void test_bytes_can_be_cut_anywhere(void) {
    struct tokenizer *tokenizer;
    EXPECT(tokenizer_open(&tokenizer, "bytes") == STATUS_OK);
    EXPECT(tokenizer_cut(tokenizer, "it's", 4) == 4);
    EXPECT(tokenizer_cut(tokenizer, "", 0) == 0);
    tokenizer_close(tokenizer);
}

static void test_bytes_has_no_text_for_ids_out_of_range(void) {
    struct tokenizer *tokenizer;
    EXPECT(tokenizer_open(&tokenizer, "bytes") == STATUS_OK);
    const int32_t ids[] = {-1, 257, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        size_t bytes = 1;
        EXPECT(tokenizer_token_bytes(tokenizer, ids[i], &bytes) == NULL && bytes == 0);
    }
    tokenizer_close(tokenizer);
}

int main(void) {
    RUN(test_an_unknown_tokenizer_is_refused_with_the_known_ones);
    RUN(test_bytes_has_257_tokens_and_the_last_is_end_of_text);
    RUN(test_bytes_encodes_every_byte_as_its_value);
    RUN(test_bytes_decodes_every_token_to_its_byte_and_end_of_text_to_nothing);
    RUN(test_bytes_can_be_cut_anywhere);
    RUN(test_bytes_has_no_text_for_ids_out_of_range);
    return test_summary();
}
