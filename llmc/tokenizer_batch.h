/* Many texts encoded at once by several threads. */
#ifndef LLMC_TOKENIZER_BATCH_H
#define LLMC_TOKENIZER_BATCH_H

#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct tokenizer_piece {
    const char *text;
    size_t bytes;
    int32_t *tokens; /* malloc'ed, the caller frees; NULL after a failure */
    size_t count;
};

/* Fills in tokens and count of each piece, the same for any number of threads. */
enum status tokenizer_encode_pieces(
    const struct tokenizer *tokenizer, struct tokenizer_piece *pieces, int count, int threads);

#ifdef __cplusplus
}
#endif

#endif
