/* A trained model at use: the weights of a folder on a device, forward only, with its tokenizer. */
#ifndef LLMC_INFERENCE_H
#define LLMC_INFERENCE_H

#include "model.h"
#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct inference {
    struct model *model;
    struct tokenizer *tokenizer; /* NULL: none */
};

/* folder: a checkpoint, or a Hugging Face folder; `config` is what its config.json says. tokenizer: a name for
   tokenizer_open, or "none". The model takes micro-batches of `batch` sequences of `seq_len` tokens. */
enum status inference_open(struct inference *out, struct backend *backend, const char *folder,
    const struct model_config *config, const char *tokenizer, int batch, int seq_len, int64_t logits_bytes);
/* Writes the model as Hugging Face's GPT2LMHeadModel reads it: model.safetensors in fp32, config.json, and the files of a
   tokenizer that has some. The folder is made; one with a model in it is refused. *bytes: of the weights' file. */
enum status inference_export(const struct inference *inference, const char *folder, uint64_t *bytes);
void inference_close(struct inference *inference);

#ifdef __cplusplus
}
#endif

#endif
