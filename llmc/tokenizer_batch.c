/* Threads take the next piece that nobody has taken until none is left; the calling thread is one of them. */
#include "tokenizer_batch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { MOST_THREADS = 256 };

struct batch {
    const struct tokenizer *tokenizer;
    struct tokenizer_piece *pieces;
    int count;
    atomic_int next;
    atomic_int status; /* of a piece that failed; its message stays with its thread */
};

static void *encode_pieces(void *argument) {
    struct batch *batch = (struct batch *)argument;
    for (int i; (i = atomic_fetch_add(&batch->next, 1)) < batch->count;) {
        struct tokenizer_piece *piece = &batch->pieces[i];
        piece->tokens = NULL;
        enum status status =
            tokenizer_encode(batch->tokenizer, piece->text, piece->bytes, &piece->tokens, &piece->count);
        if (status != STATUS_OK) {
            atomic_store(&batch->status, (int)status);
        }
    }
    return NULL;
}

enum status tokenizer_encode_pieces(
    const struct tokenizer *tokenizer, struct tokenizer_piece *pieces, int count, int threads) {
    struct batch batch = {.tokenizer = tokenizer, .pieces = pieces, .count = count};
    pthread_t helpers[MOST_THREADS];
    int helper_count = 0, wanted = threads < count ? threads : count;
    while (helper_count < wanted - 1 && helper_count < MOST_THREADS &&
           pthread_create(&helpers[helper_count], NULL, encode_pieces, &batch) == 0) {
        helper_count++; /* a machine that gives fewer threads only takes longer */
    }
    encode_pieces(&batch);
    for (int i = 0; i < helper_count; i++) {
        pthread_join(helpers[i], NULL);
    }
    enum status status = (enum status)atomic_load(&batch.status);
    return status == STATUS_OK ? STATUS_OK : fail_as(status, "out of host memory while text was encoded");
}
