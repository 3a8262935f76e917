/* No shard is smaller than a full buffer unless it is the only one: a shard smaller than a sequence is of no use. */
#include "output.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

static const char temporary_suffix[] = ".tmp";

enum status output_shard_path(
    const struct output *output, int64_t number, const char *suffix, char path[PATH_MAX]) {
    char name[64];
    snprintf(name, sizeof name, "%s_%06" PRId64 ".bin%s", output->name, number, suffix);
    return path_join(path, PATH_MAX, output->folder, name);
}

enum status output_create(struct output *output, const char *folder, const char *name, int64_t most_tokens) {
    output->folder = folder;
    output->name = name;
    output->most_tokens = most_tokens;
    return ALLOCATE(output->buffer, BUFFER_TOKENS);
}

static int64_t buffer_capacity(const struct output *output) {
    return min_i64(BUFFER_TOKENS, output->most_tokens);
}

/* A run that was killed while it gave the shards their names has some of them under the final one. */
static enum status take_back(const struct output *output, int64_t number, char temporary[PATH_MAX]) {
    char final[PATH_MAX];
    CHECK(output_shard_path(output, number, temporary_suffix, temporary));
    CHECK(output_shard_path(output, number, "", final));
    if (access(temporary, F_OK) != 0 && access(final, F_OK) == 0 && rename(final, temporary) != 0) {
        return fail("%s: cannot rename to %s: %s", final, temporary, strerror(errno));
    }
    return STATUS_OK;
}

enum status output_continue(struct output *output) {
    const struct output_state *state = &output->state;
    char path[PATH_MAX];
    for (int64_t i = 0; i + 1 < state->shards; i++) {
        struct shard shard;
        CHECK(take_back(output, i, path));
        CHECK(shard_open(&shard, path));
        shard_close(&shard);
    }
    if (state->shards == 0) {
        return STATUS_OK;
    }
    CHECK(take_back(output, state->shards - 1, path));
    return shard_continue(&output->writer, path, state->shard_tokens);
}

/* Puts the buffer into the newest shard, or into a new one if the newest is full and the buffer too. */
static enum status flush(struct output *output) {
    struct output_state *state = &output->state;
    bool buffer_full = state->buffered == buffer_capacity(output);
    bool shard_full = state->shard_tokens + state->buffered > output->most_tokens;
    if (output->writer == NULL || (shard_full && buffer_full)) {
        struct shard_writer *finished = output->writer;
        output->writer = NULL;
        CHECK(shard_finish(finished));
        char path[PATH_MAX];
        CHECK(output_shard_path(output, state->shards, temporary_suffix, path));
        CHECK(shard_create(&output->writer, path));
        state->shards++;
        state->shard_tokens = 0;
    }
    CHECK(shard_append(output->writer, output->buffer, state->buffered));
    state->shard_tokens += state->buffered;
    state->buffered = 0;
    return STATUS_OK;
}

enum status output_tokens(struct output *output, const int32_t *tokens, size_t count) {
    int64_t capacity = buffer_capacity(output);
    for (size_t i = 0; i < count; i++) {
        if (output->state.buffered == capacity) {
            CHECK(flush(output));
        }
        output->buffer[output->state.buffered++] = (uint16_t)tokens[i];
    }
    output->state.tokens += (int64_t)count;
    return STATUS_OK;
}

enum status output_sync(struct output *output) {
    return output->writer != NULL ? shard_sync(output->writer) : STATUS_OK;
}

enum status output_finish(struct output *output) {
    if (output->state.buffered > 0) {
        CHECK(flush(output));
    }
    struct shard_writer *writer = output->writer;
    output->writer = NULL;
    return shard_finish(writer);
}

enum status output_publish(const struct output *output) {
    char temporary[PATH_MAX], final[PATH_MAX];
    for (int64_t i = 0; i < output->state.shards; i++) {
        CHECK(output_shard_path(output, i, temporary_suffix, temporary));
        CHECK(output_shard_path(output, i, "", final));
        if (rename(temporary, final) != 0) {
            return fail("%s: cannot rename to %s: %s", temporary, final, strerror(errno));
        }
    }
    for (int64_t i = output->state.shards;; i++) {
        CHECK(output_shard_path(output, i, "", final));
        if (unlink(final) != 0) {
            return errno == ENOENT ? STATUS_OK : fail("%s: cannot remove: %s", final, strerror(errno));
        }
    }
}

void output_discard(struct output *output) {
    char path[PATH_MAX];
    shard_finish(output->writer);
    output->writer = NULL;
    for (int64_t i = 0;
         output_shard_path(output, i, temporary_suffix, path) == STATUS_OK && unlink(path) == 0;) {
        i++;
    }
}

void output_free(struct output *output) {
    shard_finish(output->writer);
    output->writer = NULL;
    free(output->buffer);
    output->buffer = NULL;
}
