/* Text <-> tokens. "bytes": token = byte, 256 = end of text. Otherwise byte-level BPE as GPT-2 has it, from files that
   tokenizer_files.h describes: the same tokens as tiktoken's and Hugging Face's for the same files. Any bytes are a
   text; those that are not UTF-8 go with the word around them, and come back unchanged like all others. */
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

struct tokenizer;

/* name: "bytes", or a path: a folder with vocab.json and merges.txt (or encoder.json and vocab.bpe) or tokenizer.json;
   one of these .json files; or a tiktoken rank file. */
enum status tokenizer_open(struct tokenizer **out, const char *name);
void tokenizer_close(struct tokenizer *tokenizer);
/* Does the folder have files that tokenizer_open would read? */
bool tokenizer_is_in(const char *folder);
/* Writes vocab.json, merges.txt and tokenizer.json, which Hugging Face's GPT2Tokenizer reads. */
enum { TOKENIZER_FILES = 3 };
extern const char *const tokenizer_files[TOKENIZER_FILES];
enum status tokenizer_save(const struct tokenizer *tokenizer, const char *folder);

bool tokenizer_has_files(const struct tokenizer *tokenizer); /* "bytes" needs none */
int tokenizer_vocab_size(const struct tokenizer *tokenizer);
int32_t tokenizer_end_of_text(const struct tokenizer *tokenizer);
/* tokens: malloc'ed, caller frees. No end-of-text is added, and none is made of a text "<|endoftext|>". Several threads
   may encode with one tokenizer. */
enum status tokenizer_encode(
    const struct tokenizer *tokenizer, const char *text, size_t bytes, int32_t **tokens, size_t *count);
/* For text that comes in parts: the most bytes of text[0, bytes) whose tokens are the same whatever follows. 0: no such
   place is seen; more text is needed. */
size_t tokenizer_cut(const struct tokenizer *tokenizer, const char *text, size_t bytes);
/* The bytes of one token, not terminated; end of text gives 0 bytes. NULL with *bytes 0 for an id out of range. */
const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t token, size_t *bytes);
/* A checksum of all tokens' bytes, in the order of their ids. */
uint64_t tokenizer_fingerprint(const struct tokenizer *tokenizer);

#ifdef __cplusplus
}
#endif

#endif
