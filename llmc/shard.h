/* Token shards in llm.c's format: a header of 256 int32 (magic 20240520, version 1, token count, zeros), then the
   tokens as uint16, all little-endian. data/README.md is the format's page. */
#ifndef LLMC_SHARD_H
#define LLMC_SHARD_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SHARD_MAGIC = 20240520, SHARD_VERSION = 1, SHARD_HEADER_INTS = 256, SHARD_HEADER_BYTES = 1024 };
#define SHARD_MAX_TOKENS INT64_C(2147483647) /* what the header's count can say */

struct shard {
    const char *path; /* the caller's */
    int64_t tokens;
    int file; /* descriptor; -1: closed */
};

/* Opens and checks the header against the file's size. On failure shard->file is -1. */
enum status shard_open(struct shard *shard, const char *path);
void shard_close(struct shard *shard); /* closing twice is no error */
/* Tokens [first, first + count), which the caller knows to lie within the shard. A file that was cut since it was
   opened is an error. */
enum status shard_read(const struct shard *shard, int64_t first, uint16_t *tokens, int64_t count);

/* Writing: until shard_finish the file is no valid shard. shard_finish puts the count into the header, syncs, closes
   and frees the writer, whatever it returns; NULL is no error. */
struct shard_writer;
enum status shard_create(struct shard_writer **out, const char *path);
/* Goes on with a file that was not finished, after its first `tokens` tokens; what follows them is cut off. */
enum status shard_continue(struct shard_writer **out, const char *path, int64_t tokens);
/* What was appended so far is on disk when this returns. */
enum status shard_sync(struct shard_writer *writer);
enum status shard_append(struct shard_writer *writer, const uint16_t *tokens, int64_t count);
enum status shard_finish(struct shard_writer *writer);
/* A whole shard at once. */
enum status shard_write(const char *path, const uint16_t *tokens, int64_t count);

#ifdef __cplusplus
}
#endif

#endif
