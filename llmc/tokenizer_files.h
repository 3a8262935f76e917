/* The files that byte-level BPE vocabularies come in, read from memory and written. tokenizer_open of tokenizer.h finds
   them and tells which is which.

     vocab.json + merges.txt   GPT-2: token -> id; and the merges, one a line, in the order of their ranks. Bytes are
                               written as the characters that GPT-2's byte alphabet gives them
     tokenizer.json            Hugging Face tokenizers: both of the above and more in one file
     rank file                 tiktoken: a line for each token, its bytes in base64, a space, its rank, which is its id

   The vocabulary's ids are 0, 1, ... without gaps. The token <|endoftext|> ends a text; where a file has none, it is
   added as the last. Text is always cut into words by GPT-2's pattern: a tokenizer.json that says otherwise is
   refused; the other files cannot say. */
#ifndef LLMC_TOKENIZER_FILES_H
#define LLMC_TOKENIZER_FILES_H

#include "bpe.h"
#include "json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each works in the texts it is given and leaves them changed. After a failure *out is NULL. */
enum status tokenizer_from_vocab(struct tokenizer **out, struct json *vocab, const char *vocab_name,
    char *merges, size_t merges_bytes, const char *merges_name);
enum status tokenizer_from_json(struct tokenizer **out, struct json *root, const char *name);
enum status tokenizer_from_ranks(struct tokenizer **out, char *text, size_t bytes, const char *name);

#ifdef __cplusplus
}
#endif

#endif
