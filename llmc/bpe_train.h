/* Learns a byte-level BPE vocabulary from text: the pair of neighbouring tokens that is most frequent becomes a token,
   again and again (Sennrich et al. 2016). Of equally frequent pairs the one with the lower ids is taken, left before
   right, so the same text gives the same vocabulary, which is also that of Hugging Face's BpeTrainer. */
#ifndef LLMC_BPE_TRAIN_H
#define LLMC_BPE_TRAIN_H

#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct bpe_trainer;

/* most_words: how many different words are kept at once, 0: 2 million. When there are more, the rarest are forgotten,
   so memory stays bounded; words of more than 256 bytes never count. */
enum status bpe_trainer_create(struct bpe_trainer **out, size_t most_words);
/* Counts the words of a text. One that comes in parts is to be parted at tokenizer_cut. */
enum status bpe_trainer_add(struct bpe_trainer *trainer, const char *text, size_t bytes);
/* A tokenizer of vocab_size tokens, 257 or more: the bytes, one for each merge, and the end of text as the last. Fewer,
   when no pair of tokens is there twice any more. */
enum status bpe_trainer_finish(struct bpe_trainer *trainer, int vocab_size, struct tokenizer **out);
void bpe_trainer_free(struct bpe_trainer *trainer);

/* Where a text that goes to bpe_trainer_add may be parted, as tokenizer_cut. */
size_t bpe_trainer_cut(const char *text, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
