/* libFuzzer harness of the safetensors reader. A file that it accepts must be one of which every tensor can be read
   and whose tensors fill it. The input lies in a file in memory, which has a path. Seeds: test/seeds/safetensors. */
#include "llmc/safetensors.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static void check_tensors(const struct safetensors *file, size_t bytes) {
    uint64_t end = file->data_offset;
    uint8_t *buffer = malloc(bytes);
    for (size_t i = 0; i < file->count; i++) {
        const struct safetensors_entry *entry = &file->entries[i];
        uint64_t size = entry->end - entry->begin;
        if (file->data_offset + entry->begin != end || size > bytes - end ||
            safetensors_find(file, entry->name) != entry ||
            safetensors_read(file, entry, 0, buffer, size) != STATUS_OK ||
            safetensors_read(file, entry, 1, buffer, size) == STATUS_OK) {
            abort();
        }
        end += size;
    }
    if (end != bytes) {
        abort();
    }
    free(buffer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    int memory = memfd_create("fuzz", 0);
    if (memory < 0 || write(memory, data, bytes) != (ssize_t)bytes) {
        abort();
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
    struct safetensors *file;
    if (safetensors_open(&file, path) == STATUS_OK) {
        check_tensors(file, bytes);
        safetensors_close(file);
    }
    close(memory);
    return 0;
}
