/* A model that goes on with texts: the keys and values of all tokens so far are kept, so that a token costs one pass of
   its own through the weights, and not one of the whole text. It reads the parameters of a model, at work or in
   training, and has all other memory for itself. */
#ifndef LLMC_DECODER_H
#define LLMC_DECODER_H

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

struct decoder;

/* For `sequences` texts of one length at once, of up to `capacity` tokens each (0: the model's positions). */
enum status decoder_create(struct decoder **out, struct model *model, int sequences, int capacity);
void decoder_free(struct decoder *decoder);
/* What a decoder allocates on a device. */
uint64_t decoder_bytes(
    const struct model_config *config, const struct backend_profile *device, int sequences, int capacity);

const struct model_config *decoder_config(const struct decoder *decoder);
int decoder_sequences(const struct decoder *decoder);
int decoder_capacity(const struct decoder *decoder);
int decoder_length(const struct decoder *decoder); /* tokens of each text so far */
void decoder_clear(struct decoder *decoder);       /* the texts begin anew */

/* `count` more tokens of each text, (sequences, count) on the host. logits (sequences, vocab_size), host: of the token
   that follows the last. */
enum status decoder_next(struct decoder *decoder, const int32_t *tokens, int count, float *logits);

#ifdef __cplusplus
}
#endif

#endif
