/* Byte-pair encoding (Sennrich et al. 2016, on bytes as in GPT-2), inside the tokenizer: the tables, how they are
   built, and encoding. tokenizer.h is what other rooms use.

   A token is a string of bytes; every single byte is one. A merge joins two neighbouring tokens to a third. A word
   begins as its bytes, and the merge of the lowest rank that fits anywhere in it is made, leftmost first, until
   none fits. */
#ifndef LLMC_BPE_H
#define LLMC_BPE_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BPE_MAX_TOKENS = 1 << 20, BPE_MAX_TOKEN_BYTES = 1 << 16, BYTE_VALUES = 256 };

struct bpe_text {
    const char *text; /* NULL: there is none */
    uint32_t bytes;
};

struct bpe_merge {
    int32_t left, right, token; /* token = left + right; the rank is the place in the list */
};

/* Open addressing, a power of two of slots, at most half of them full. */
struct pair_slot {
    uint64_t pair;  /* left << 32 | right; BPE_NO_PAIR: empty */
    uint64_t merge; /* rank << 32 | token: a lower merge comes first */
};
struct word_slot {
    uint64_t start;  /* the word's first eight bytes, zeros after its end */
    uint32_t length; /* 0: empty */
    int32_t token;
};
/* In GPT-2's files a byte that is a printable character in Latin-1 stands for itself, and has a lower id than those
   that are not. */
static inline bool bpe_byte_is_printable(int byte) {
    return (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
}

#define BPE_NO_PAIR UINT64_MAX
#define BPE_NO_MERGE UINT64_MAX

struct tokenizer {
    int32_t vocab_size;
    int32_t end_of_text;
    char *bytes;       /* all tokens' */
    uint32_t *offsets; /* token t is bytes[offsets[t], offsets[t + 1]) */
    int32_t byte_tokens[BYTE_VALUES];
    struct bpe_merge *merges;
    int32_t merge_count, merge_capacity;
    struct pair_slot *pairs;
    struct word_slot *words; /* tokens that their own bytes merge to; while building: all */
    int pair_bits, word_bits;
};

/* Building: tokens, then merges in the order of their ranks, then finish. `name` is the file's, for messages. After a
   failure *out is NULL or to be freed. The token end_of_text gets no bytes, every other has some, every single byte has
   a token, and no two are the same. */
enum status bpe_create(struct tokenizer **out, const struct bpe_text *tokens, int32_t count,
    int32_t end_of_text, int32_t merge_capacity, const char *name);
/* Token of these bytes; -1 if there is none. */
int32_t bpe_find(const struct tokenizer *t, const uint8_t *bytes, size_t count);
enum status bpe_add_merge(struct tokenizer *t, int32_t left, int32_t right, const char *name);
enum status bpe_finish(struct tokenizer *t);
void bpe_free(struct tokenizer *t);

/* Tokens of a word of `length` bytes by its merges alone; room for `length` tokens. */
enum status bpe_merge_word(
    const struct tokenizer *t, const uint8_t *word, size_t length, int32_t *tokens, size_t *count);
/* Tokens of a text, word by word; room for `bytes` tokens. */
enum status bpe_encode(
    const struct tokenizer *t, const uint8_t *text, size_t bytes, int32_t *tokens, size_t *count);

#ifdef __cplusplus
}
#endif

#endif
