/* One side of the split, training or validation: tokens into shards. They are written under temporary names and get
   their own when all is done, so older shards stay as they are until then. */
#ifndef DATA_OUTPUT_H
#define DATA_OUTPUT_H

#include "llmc/shard.h"

#include <limits.h>

enum { BUFFER_TOKENS = 1 << 16 /* written at once */ };

/* What an interrupted run must know to go on. */
struct output_state {
    int64_t shards;
    int64_t shard_tokens; /* in the newest shard */
    int64_t buffered;     /* tokens that no shard has yet */
    int64_t files, documents, bytes, tokens;
};

struct output {
    const char *folder, *name;   /* the caller's; "train", "val" */
    int64_t most_tokens;         /* in a shard, but for the rest that the last one takes */
    struct shard_writer *writer; /* of the newest shard */
    uint16_t *buffer;            /* tokens not yet in a shard */
    struct output_state state;
};

enum status output_create(struct output *output, const char *folder, const char *name, int64_t most_tokens);
/* Goes on with the state and the buffer of an interrupted run, whose shards lie there under their temporary names. */
enum status output_continue(struct output *output);
enum status output_tokens(struct output *output, const int32_t *tokens, size_t count);
/* What was written is on disk when this returns. */
enum status output_sync(struct output *output);
/* All tokens are given. */
enum status output_finish(struct output *output);
/* Gives the finished shards their names and removes those of an earlier run that are left over. */
enum status output_publish(const struct output *output);
/* Removes what lies there under temporary names. */
void output_discard(struct output *output);
void output_free(struct output *output);

enum status output_shard_path(
    const struct output *output, int64_t number, const char *suffix, char path[PATH_MAX]);

#endif
