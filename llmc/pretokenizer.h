/* GPT-2's pre-tokenisation: text is cut into words, and byte-pair encoding never joins across a cut. The words are the
   successive matches of
       '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
   A byte that belongs to no well-formed UTF-8 character is no space and goes with the word around it, so that a part of
   a word's bytes is still one word: tokens are such parts. */
#ifndef LLMC_PRETOKENIZER_H
#define LLMC_PRETOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of the word at the start of text[0, bytes), bytes > 0, which ends where the whole text does. */
size_t pretokenizer_next(const uint8_t *text, size_t bytes);

/* For text that comes in parts: the most bytes of text[0, bytes) whose words are the same whatever follows, and that
   what follows does not need for its own. 0: no such place is seen. */
size_t pretokenizer_cut(const uint8_t *text, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
