/* The file: magic number, version, struct progress, the two buffers' tokens, XXH64 of all that. It is for the machine
   that wrote it, and for the same version of the program. */
#include "progress.h"

#include "llmc/checksum.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static const char file_name[] = "prepare.progress";

struct header {
    uint32_t magic, version;
    struct progress progress;
};
enum { MAGIC = 0x50504c46, VERSION = 2, MOST_BYTES = sizeof(struct header) + 2 * BUFFER_TOKENS * 2 + 8 };

enum status progress_save(
    const char *folder, const struct progress *progress, const struct output *const outputs[2]) {
    char path[PATH_MAX], temporary[PATH_MAX];
    struct header header = {MAGIC, VERSION, *progress};
    CHECK(path_join(path, sizeof path, folder, file_name));
    CHECK(path_join(temporary, sizeof temporary, folder, "prepare.progress.tmp"));
    char *data;
    CHECK(ALLOCATE(data, MOST_BYTES));
    size_t bytes = sizeof header;
    for (int i = 0; i < 2; i++) {
        header.progress.outputs[i] = outputs[i]->state;
        size_t buffer_bytes = (size_t)outputs[i]->state.buffered * sizeof(uint16_t);
        memcpy(data + bytes, outputs[i]->buffer, buffer_bytes);
        bytes += buffer_bytes;
    }
    memcpy(data, &header, sizeof header);
    uint64_t digest = xxh64_of(data, bytes);
    memcpy(data + bytes, &digest, sizeof digest);
    enum status status = file_write_all(temporary, data, bytes + sizeof digest);
    free(data);
    CHECK(status);
    CHECK(file_sync(temporary));
    return rename(temporary, path) == 0
               ? STATUS_OK
               : fail("%s: cannot rename to %s: %s", temporary, path, strerror(errno));
}

static bool state_is_sound(const struct output_state *s) {
    return s->shards >= 0 && s->shards < 1000000 && s->shard_tokens >= 0 &&
           s->shard_tokens <= SHARD_MAX_TOKENS && s->buffered >= 0 && s->buffered <= BUFFER_TOKENS &&
           s->files >= 0 && s->documents >= 0 && s->bytes >= 0 && s->tokens >= s->buffered;
}

static enum status parse(const uint8_t *data, size_t bytes, const char *path, struct progress *progress,
    struct output *const outputs[2]) {
    struct header header;
    uint64_t digest;
    const char *remedy = "begin anew with --overwrite";
    if (bytes < sizeof header + sizeof digest) {
        return fail("%s: is cut short; %s", path, remedy);
    }
    memcpy(&header, data, sizeof header);
    memcpy(&digest, data + bytes - sizeof digest, sizeof digest);
    if (header.magic != MAGIC || header.version != VERSION) {
        return fail("%s: not of this version of the program; %s", path, remedy);
    }
    const struct progress *p = &header.progress;
    bool sound = state_is_sound(&p->outputs[0]) && state_is_sound(&p->outputs[1]) && p->input >= 0 &&
                 (p->side == 0 || p->side == 1) && p->cut >= 0 && p->offset >= 0 && p->line >= 0 &&
                 p->skipped >= 0;
    size_t buffers = sound ? 2 * (size_t)(p->outputs[0].buffered + p->outputs[1].buffered) : 0;
    if (!sound || bytes != sizeof header + buffers + sizeof digest ||
        digest != xxh64_of(data, bytes - sizeof digest)) {
        return fail("%s: is damaged; %s", path, remedy);
    }
    const uint8_t *at = data + sizeof header;
    for (int i = 0; i < 2; i++) {
        outputs[i]->state = p->outputs[i];
        memcpy(outputs[i]->buffer, at, 2 * (size_t)p->outputs[i].buffered);
        at += 2 * p->outputs[i].buffered;
    }
    *progress = *p;
    return STATUS_OK;
}

enum status progress_load(
    const char *folder, struct progress *progress, struct output *const outputs[2], bool *there) {
    char path[PATH_MAX];
    struct stat info;
    uint8_t *data;
    size_t bytes;
    CHECK(path_join(path, sizeof path, folder, file_name));
    *there = stat(path, &info) == 0;
    if (!*there) {
        return STATUS_OK;
    }
    if (info.st_size > MOST_BYTES) {
        return fail("%s: is damaged; begin anew with --overwrite", path);
    }
    CHECK(file_read_text(path, &data, &bytes));
    enum status status = parse(data, bytes, path, progress, outputs);
    free(data);
    return status;
}

enum status progress_remove(const char *folder) {
    char path[PATH_MAX];
    CHECK(path_join(path, sizeof path, folder, file_name));
    return unlink(path) == 0 || errno == ENOENT ? STATUS_OK
                                                : fail("%s: cannot remove: %s", path, strerror(errno));
}
