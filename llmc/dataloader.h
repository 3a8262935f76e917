/* Batches of token sequences from shards (shard.h), or random ones for throughput runs.

   A shard of n tokens gives ceil((n - 1) / T) windows of T + 1 tokens, T apart; the last one is moved back to end with
   the shard, so that every token is seen. All windows of all shards, in the order of the sorted names, are numbered;
   epoch e visits them in a pseudo-random order that depends on (seed, e) alone. A position counts sequences from
   the start of the run: position p is entry p % W of epoch p / W. Positions do not depend on ranks or micro-batch. */
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include "shard.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dataloader_options {
    const char *pattern; /* "synthetic", or a glob of shard files */
    const char *option;  /* the option's name for messages, "--train-data" */
    int seq_len;         /* T */
    int micro_batch;     /* B, sequences a call */
    int vocab_size;      /* a token at or over it is an error that names file and offset */
    int rank, ranks;
    uint64_t seed;
    bool shuffle; /* every epoch in an order of its own; false: in file order */
    /* Epoch after epoch, for training; false: one pass that counts every token once, for evaluation. */
    bool repeat;
    bool prefetch; /* a thread reads the next batch ahead */
};

#define DATALOADER_MAX_POSITION (INT64_C(1) << 62)
#define DATALOADER_ENDLESS (INT64_C(1) << 52) /* a number that JSON holds exactly */

struct dataloader;

/* Opens and checks every shard. With repeat, fewer windows than one call of all ranks takes is an error. The options'
   strings are not needed afterwards. */
enum status dataloader_open(struct dataloader **out, const struct dataloader_options *options);
void dataloader_close(struct dataloader *loader);
/* W, sequences an epoch; synthetic: DATALOADER_ENDLESS */
int64_t dataloader_windows(const struct dataloader *loader);
int64_t dataloader_tokens(const struct dataloader *loader); /* in all shards */
int dataloader_shards(const struct dataloader *loader);
/* Of the shards' names (without their folders) and sizes in their order: equal where the same data lies. */
uint64_t dataloader_fingerprint(const struct dataloader *loader);

/* Position of the next call's first sequence over all ranks; a checkpoint keeps it. */
int64_t dataloader_position(const struct dataloader *loader);
/* Any position from 0 to DATALOADER_MAX_POSITION, at any time. */
enum status dataloader_seek(struct dataloader *loader, int64_t position);

/* This rank's next micro-batch: positions position + rank * B ... + B - 1; then position += ranks * B.
   inputs and targets (B,T): targets are the tokens one later. wait_seconds (may be NULL) += time spent waiting.
   Without repeat, sequences past the end and target tokens already given by the previous window have
   target -1 (no loss), so that one pass counts every token once.
   What cannot be read is tried again for a good second before it is an error. After an error, the prefetch thread's
   too, the position is unchanged and the next call tries again. */
enum status dataloader_next(
    struct dataloader *loader, int32_t *inputs, int32_t *targets, double *wait_seconds);

#ifdef __cplusplus
}
#endif

#endif
