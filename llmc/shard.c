/* Reads and writes token shards. Reading is pread, not a mapping: a file that another process cuts short is then
   an error message and not SIGBUS, and windows of a few kilobytes cost one system call each. Hosts are
   little-endian like the files (x86-64, AArch64). */
#include "shard.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static enum status check_header(struct shard *shard) {
    struct stat info;
    if (fstat(shard->file, &info) != 0) {
        return fail("%s: cannot stat: %s", shard->path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return fail("%s: is not a file; give shard files, such as 'folder/train_*.bin'", shard->path);
    }
    if (info.st_size < SHARD_HEADER_BYTES) {
        return fail("%s: %" PRId64 " bytes are less than a shard's header of %d; prepare it again with "
                    "build/prepare",
            shard->path, (int64_t)info.st_size, SHARD_HEADER_BYTES);
    }
    int32_t header[SHARD_HEADER_INTS];
    CHECK(file_read_at(shard->file, shard->path, header, SHARD_HEADER_BYTES, 0));
    if (header[0] != SHARD_MAGIC) {
        return fail("%s: is no token shard (magic number %" PRId32
                    ", not %d); make shards with build/prepare",
            shard->path, header[0], SHARD_MAGIC);
    }
    if (header[1] != SHARD_VERSION) {
        return fail("%s: shard version %" PRId32 " is not %d; make shards with build/prepare", shard->path,
            header[1], SHARD_VERSION);
    }
    int64_t count = header[2], body_bytes = info.st_size - SHARD_HEADER_BYTES;
    if (count < 0 || 2 * count > body_bytes) {
        return fail("%s: the header says %" PRId64 " tokens, the file holds %" PRId64
                    "; it is truncated: copy or prepare it again",
            shard->path, count, body_bytes / 2);
    }
    if (2 * count < body_bytes) {
        return fail("%s: %" PRId64 " bytes follow the %" PRId64
                    " tokens of the header; the file is damaged or unfinished: copy or prepare it again",
            shard->path, body_bytes - 2 * count, count);
    }
    shard->tokens = count;
    return STATUS_OK;
}

enum status shard_open(struct shard *shard, const char *path) {
    shard->path = path;
    shard->tokens = 0;
    shard->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a named pipe must not block */
    if (shard->file < 0) {
        return fail("%s: cannot open: %s", path, strerror(errno));
    }
    enum status status = check_header(shard);
    if (status != STATUS_OK) {
        shard_close(shard);
    }
    return status;
}

void shard_close(struct shard *shard) {
    if (shard->file >= 0) {
        close(shard->file);
        shard->file = -1;
    }
}

enum status shard_read(const struct shard *shard, int64_t first, uint16_t *tokens, int64_t count) {
    return file_read_at(
        shard->file, shard->path, tokens, 2 * (size_t)count, SHARD_HEADER_BYTES + 2 * (uint64_t)first);
}

struct shard_writer {
    FILE *file;
    char *path;
    int64_t tokens;
};

static enum status fail_writing(const struct shard_writer *writer) {
    return fail("%s: cannot write: %s", writer->path, strerror(errno));
}

static enum status write_header(struct shard_writer *writer) {
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)writer->tokens};
    if (fseeko(writer->file, 0, SEEK_SET) != 0 || fwrite(header, sizeof header, 1, writer->file) != 1) {
        return fail_writing(writer);
    }
    return STATUS_OK;
}

/* Closes and frees whatever there is. */
static enum status close_writer(struct shard_writer *writer, enum status status) {
    if (writer->file != NULL && fclose(writer->file) != 0 && status == STATUS_OK) {
        status = fail_writing(writer);
    }
    free(writer->path);
    free(writer);
    return status;
}

/* `mode` as fopen has it. */
static enum status open_writer(struct shard_writer **out, const char *path, const char *mode) {
    struct shard_writer *writer;
    CHECK(ALLOCATE(writer, 1));
    writer->path = string_copy(path);
    if (writer->path == NULL) {
        return close_writer(writer, STATUS_OUT_OF_MEMORY);
    }
    writer->file = fopen(path, mode);
    if (writer->file == NULL) {
        return close_writer(writer, fail_writing(writer));
    }
    *out = writer;
    return STATUS_OK;
}

enum status shard_create(struct shard_writer **out, const char *path) {
    struct shard_writer *writer = NULL;
    CHECK(open_writer(&writer, path, "wbe"));
    enum status status = write_header(writer); /* a count of 0: not valid before shard_finish */
    if (status != STATUS_OK) {
        return close_writer(writer, status);
    }
    *out = writer;
    return STATUS_OK;
}

static enum status cut_after(struct shard_writer *writer, int64_t tokens) {
    off_t end = (off_t)(SHARD_HEADER_BYTES + 2 * tokens);
    struct stat info;
    if (fstat(fileno(writer->file), &info) != 0 || info.st_size < end) {
        return fail("%s: is shorter than the %" PRId64 " tokens that were written", writer->path, tokens);
    }
    if (ftruncate(fileno(writer->file), end) != 0 || fseeko(writer->file, end, SEEK_SET) != 0) {
        return fail_writing(writer);
    }
    writer->tokens = tokens;
    return STATUS_OK;
}

enum status shard_continue(struct shard_writer **out, const char *path, int64_t tokens) {
    struct shard_writer *writer = NULL;
    CHECK(open_writer(&writer, path, "r+be"));
    enum status status = cut_after(writer, tokens);
    if (status != STATUS_OK) {
        return close_writer(writer, status);
    }
    *out = writer;
    return STATUS_OK;
}

enum status shard_sync(struct shard_writer *writer) {
    return fflush(writer->file) == 0 && fsync(fileno(writer->file)) == 0 ? STATUS_OK : fail_writing(writer);
}

enum status shard_append(struct shard_writer *writer, const uint16_t *tokens, int64_t count) {
    if (count > SHARD_MAX_TOKENS - writer->tokens) {
        return fail(
            "%s: a shard holds at most %" PRId64 " tokens; make several", writer->path, SHARD_MAX_TOKENS);
    }
    if (fwrite(tokens, sizeof *tokens, (size_t)count, writer->file) != (size_t)count) {
        return fail_writing(writer);
    }
    writer->tokens += count;
    return STATUS_OK;
}

enum status shard_finish(struct shard_writer *writer) {
    if (writer == NULL) {
        return STATUS_OK;
    }
    enum status status = write_header(writer);
    if (status == STATUS_OK && (fflush(writer->file) != 0 || fsync(fileno(writer->file)) != 0)) {
        status = fail_writing(writer);
    }
    return close_writer(writer, status);
}

enum status shard_write(const char *path, const uint16_t *tokens, int64_t count) {
    struct shard_writer *writer;
    CHECK(shard_create(&writer, path));
    enum status appended = shard_append(writer, tokens, count);
    enum status finished = shard_finish(writer);
    return appended != STATUS_OK ? appended : finished;
}
