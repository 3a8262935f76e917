/* The communicator of a run of one rank: every sum, gather and broadcast is the data itself. */
#include "comm.h"

#include <stdlib.h>

static enum status single_all_reduce(
    struct comm *c, struct tensor data, int64_t count, enum comm_op op, int slot) {
    (void)c, (void)data, (void)count, (void)op, (void)slot;
    return STATUS_OK;
}

static enum status single_move(struct comm *c, struct tensor data, int64_t count, int slot) {
    (void)c, (void)data, (void)count, (void)slot;
    return STATUS_OK;
}

static enum status single_broadcast(struct comm *c, struct tensor data, int64_t count, int root, int slot) {
    (void)c, (void)data, (void)count, (void)root, (void)slot;
    return STATUS_OK;
}

static enum status single_wait(struct comm *c, int slot) {
    (void)c, (void)slot;
    return STATUS_OK;
}

static enum status single_host_all_reduce(struct comm *c, double *values, int count, enum comm_op op) {
    (void)c, (void)values, (void)count, (void)op;
    return STATUS_OK;
}

static enum status single_host_all_gather(struct comm *c, void *out, const void *in, size_t bytes) {
    (void)c;
    memmove(out, in, bytes);
    return STATUS_OK;
}

static enum status single_barrier(struct comm *c) {
    (void)c;
    return STATUS_OK;
}

static void single_abort(struct comm *c) {
    (void)c;
}

static void single_free(struct comm *c) {
    free(c);
}

enum status comm_single_create(struct comm **out) {
    CHECK(ALLOCATE(*out, 1));
    **out = (struct comm){
        .rank = 0,
        .ranks = 1,
        .all_reduce = single_all_reduce,
        .reduce_scatter = single_move,
        .all_gather = single_move,
        .broadcast = single_broadcast,
        .wait = single_wait,
        .host_all_reduce = single_host_all_reduce,
        .host_all_gather = single_host_all_gather,
        .barrier = single_barrier,
        .abort = single_abort,
        .free = single_free,
    };
    return STATUS_OK;
}

void comm_abort(struct comm *c) {
    if (c != NULL) {
        c->abort(c);
    }
}
