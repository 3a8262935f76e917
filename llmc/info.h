/* What a file or folder is, in a few lines: a run, a checkpoint, a model of Hugging Face, a token shard, a safetensors
   file, a tokenizer, shards that build/prepare made. */
#ifndef LLMC_INFO_H
#define LLMC_INFO_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What it is not made for, or is damaged, is an error that says so. */
enum status info_print(FILE *out, const char *path);

#ifdef __cplusplus
}
#endif

#endif
