/* Text <-> tokens. "bytes": token = byte, 256 = end of text. */
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

struct tokenizer;

/* name: "bytes". */
enum status tokenizer_open(struct tokenizer **out, const char *name);
void tokenizer_close(struct tokenizer *tokenizer);
int tokenizer_vocab_size(const struct tokenizer *tokenizer);
int32_t tokenizer_end_of_text(const struct tokenizer *tokenizer);
/* tokens: malloc'ed, caller frees. No end-of-text is added. */
enum status tokenizer_encode(
    const struct tokenizer *tokenizer, const char *text, size_t bytes, int32_t **tokens, size_t *count);
/* The bytes of one token, not terminated; end of text gives 0 bytes. NULL with *bytes 0 for an id out of range. */
const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t token, size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
