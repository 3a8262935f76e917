/* Texts from a model: a prompt, and what the model makes of it, token by token. */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "decoder.h"
#include "sampling.h"
#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct generate_options {
    struct sampling sampling;
    int64_t tokens; /* most that a text gets */
};

/* Takes the bytes of each new token of text number `sample`, as they come; a character may be torn between tokens. */
typedef enum status (*generate_sink)(void *context, int sample, const char *text, size_t bytes);

/* Goes on with the prompt, once for each of the decoder's sequences. Every text begins with an end-of-text, as documents
   do in training, and ends with one, or after options->tokens. A text longer than the decoder's capacity goes on with
   the newer half of it. The prompt itself does not come through the sink. `generated`: tokens of all texts, without
   their ends. Sample i is the same whatever the number of samples, up to rounding. */
enum status generate(struct decoder *decoder, const struct tokenizer *tokenizer, const char *prompt,
    size_t prompt_bytes, const struct generate_options *options, generate_sink sink, void *context,
    int64_t *generated);

#ifdef __cplusplus
}
#endif

#endif
