/* A model's weights and shape in the files that Hugging Face's GPT2LMHeadModel reads. Names and orientation come
   from the parameter table: Conv1D weights are stored (in, out), the vocabulary without padding, the head not at all,
   since it is tied to the token embedding. Grouped-query models use the same names, with c_attn of
   (C, (Hq + 2 Hkv) D) and n_kv_head in config.json. */
#ifndef LLMC_HUGGING_FACE_H
#define LLMC_HUGGING_FACE_H

#include "model.h"
#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives a bucket's values, laid out as in the model's flat buffer: bucket->count floats; values NULL: they are not wanted,
   but others may be waiting for this call. */
typedef enum status (*hugging_face_source)(void *context, int bucket, float *values);
/* model.safetensors in fp32. Every rank calls, and stays with the others whatever fails; the one that is `writing` (the
   first) writes, and there alone are the checksum and the size, where they are not NULL. */
enum status hugging_face_write_weights(const char *path, const struct model_config *config,
    const struct layout *layout, bool writing, hugging_face_source source, void *context, uint64_t *xxh64,
    uint64_t *bytes);

/* Gets the values of a bucket, laid out as in the model's flat buffer: bucket->count floats. */
typedef enum status (*hugging_face_sink)(void *context, int bucket, const float *values);
/* The weights in a folder, bucket by bucket: model.safetensors, or the files that model.safetensors.index.json names; of
   F64, F32, BF16 or F16; with the prefix "transformer." or without. Tensors that are missing or of another shape are
   named. A head that is stored must be the token embedding. */
enum status hugging_face_read_weights(const char *folder, const struct model_config *config,
    const struct layout *layout, hugging_face_sink sink, void *context);

/* config.json. The end of text is the tokenizer's, or where that is NULL the last token. The caller frees the text. */
enum status hugging_face_config_text(
    const struct model_config *config, const struct tokenizer *tokenizer, char **text, size_t *bytes);
/* Values that the model does not have (another activation, another epsilon, ...) are errors that name them. Whether a
   head is tied is left to the weights. */
enum status hugging_face_read_config(const char *path, struct model_config *config);

#ifdef __cplusplus
}
#endif

#endif
