/* libFuzzer: what build/prepare reads besides text: a file of JSON lines ('j' first), whose documents come out as they
   are cut by any capacity; and prepare.progress ('p'), with a right checksum put at its end so that what is behind it is
   reached, or as it is ('P'). Seeds: test/seeds/prepare. */
#include "data/progress.h"
#include "data/source.h"
#include "llmc/checksum.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static char folder[] = "/tmp/fuzz_prepare.XXXXXX";

static void require(bool condition) {
    if (!condition) {
        abort();
    }
}

static void require_one_line(enum status status) {
    require(status == STATUS_OK || (error_message()[0] != '\0' && strchr(error_message(), '\n') == NULL));
}

/* The sum of all documents' bytes, read in parts of at most `capacity`. */
static enum status read_documents(const char *path, size_t capacity, uint64_t *digest, int64_t *documents) {
    struct source source = {.path = path, .field = "text", .end = INT64_MAX};
    struct xxh64 sum;
    char part[64];
    bool there = false;
    xxh64_init(&sum);
    *documents = 0;
    enum status status = source_open(&source);
    while (status == STATUS_OK && (status = source_next(&source, &there)) == STATUS_OK && there) {
        ++*documents;
        for (bool ended = false; !ended && status == STATUS_OK;) {
            size_t got;
            status = source_read(&source, part, capacity, &got, &ended);
            require(got <= capacity && (got > 0 || ended));
            xxh64_update(&sum, part, got);
        }
    }
    source_close(&source);
    *digest = xxh64_digest(&sum);
    return status;
}

static void try_lines(const uint8_t *data, size_t bytes) {
    char path[64];
    uint64_t digests[2];
    int64_t documents[2];
    int file = memfd_create("lines", 0); /* a file in memory, which /proc gives a path */
    require(file >= 0 && write(file, data, bytes) == (ssize_t)bytes);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    enum status status = read_documents(path, 1, &digests[0], &documents[0]);
    require_one_line(status);
    require(read_documents(path, 64, &digests[1], &documents[1]) == status);
    require(digests[0] == digests[1] && documents[0] == documents[1]);
    close(file);
}

static void remove_folder(void) {
    remove_tree(folder);
}

static void try_progress(const uint8_t *data, size_t bytes, bool mend) {
    static struct output outputs[2];
    struct output *const both[2] = {&outputs[0], &outputs[1]};
    struct progress progress;
    char path[100], *copy;
    bool there;
    if (outputs[0].buffer == NULL) {
        require(mkdtemp(folder) != NULL);
        atexit(remove_folder);
        require(output_create(both[0], folder, "train", 100) == STATUS_OK);
        require(output_create(both[1], folder, "val", 100) == STATUS_OK);
    }
    require(ALLOCATE(copy, bytes) == STATUS_OK);
    memcpy(copy, data, bytes);
    if (mend && bytes >= sizeof(uint64_t)) {
        uint64_t digest = xxh64_of(copy, bytes - sizeof(uint64_t));
        memcpy(copy + bytes - sizeof digest, &digest, sizeof digest);
    }
    snprintf(path, sizeof path, "%s/prepare.progress", folder);
    require(file_write_all(path, copy, bytes) == STATUS_OK);
    free(copy);
    enum status status = progress_load(folder, &progress, both, &there);
    require(there);
    require_one_line(status);
    for (int i = 0; i < 2 && status == STATUS_OK; i++) {
        require(outputs[i].state.buffered >= 0 && outputs[i].state.buffered <= BUFFER_TOKENS);
        require_one_line(output_continue(both[i])); /* there are no shards */
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes > 0 && data[0] == 'j') {
        try_lines(data + 1, bytes - 1);
    } else if (bytes > 0 && (data[0] == 'p' || data[0] == 'P')) {
        try_progress(data + 1, bytes - 1, data[0] == 'p');
    } else {
        return -1;
    }
    return 0;
}
