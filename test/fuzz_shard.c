/* libFuzzer: any bytes as a shard file. The loader must refuse them with a message, or give tokens that lie within the
   vocabulary. Seeds: test/seeds/shard/. */
#include "llmc/dataloader.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SEQ_LEN = 7, MICRO_BATCH = 2, TOKENS = SEQ_LEN * MICRO_BATCH, VOCAB = 50257 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void require(bool condition) {
    if (!condition) {
        abort();
    }
}

static void read_epoch(const char *path, bool shuffle, bool prefetch) {
    struct dataloader_options options = {.pattern = path,
        .option = "--train-data",
        .seq_len = SEQ_LEN,
        .micro_batch = MICRO_BATCH,
        .vocab_size = VOCAB,
        .rank = 1,
        .ranks = 2,
        .seed = 1,
        .shuffle = shuffle,
        .repeat = shuffle,
        .prefetch = prefetch};
    struct dataloader *loader;
    if (dataloader_open(&loader, &options) != STATUS_OK) {
        require(error_message()[0] != 0);
        return;
    }
    while (dataloader_position(loader) < dataloader_windows(loader)) {
        int32_t inputs[TOKENS], targets[TOKENS];
        if (dataloader_next(loader, inputs, targets, NULL) != STATUS_OK) {
            require(error_message()[0] != 0);
            break;
        }
        for (int i = 0; i < TOKENS; i++) {
            require(inputs[i] >= 0 && inputs[i] < VOCAB);
            require(targets[i] >= (shuffle ? 0 : -1) && targets[i] < VOCAB);
        }
    }
    dataloader_close(loader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    int file = memfd_create("shard", 0); /* a file in memory, which /proc gives a path */
    require(file >= 0 && write(file, data, bytes) == (ssize_t)bytes);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    read_epoch(path, true, false);
    read_epoch(path, false, true);
    close(file);
    return 0;
}
