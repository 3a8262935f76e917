/* How the next token is chosen from a model's logits. In this order, as Hugging Face's generate does it: repetition
   penalty, temperature, top-k, top-p, and a draw from what is left. */
#ifndef LLMC_SAMPLING_H
#define LLMC_SAMPLING_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sampling {
    double temperature; /* 0: always the likeliest token, the lowest of equals */
    int64_t top_k;      /* only the so many likeliest; 0: all */
    double top_p;       /* only the likeliest that have this share of the probability together; 1: all */
    /* Logits of tokens that the text has already are divided by it where they are above 0, else multiplied (Keskar et
       al., "CTRL", 2019); 1: none. */
    double repetition_penalty;
    uint64_t seed;
};

struct sampler;

enum status sampler_create(struct sampler **out, const struct sampling *options, int vocab_size);
void sampler_free(struct sampler *sampler);
/* A token by logits (vocab_size), which are changed on the way. seen (vocab_size): tokens that the text has. uniform: a
   random number in [0, 1). A NaN is never chosen unless there is nothing else. */
int32_t sampler_draw(struct sampler *sampler, float *logits, const bool *seen, double uniform);

#ifdef __cplusplus
}
#endif

#endif
