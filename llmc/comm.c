/* What all communicators share, and the one of a run of one rank, where every sum, gather and broadcast is the
   data itself. */
#include "comm.h"

#include <stdlib.h>

/* ---- sums ---- */

/* into[i] = into[i] op from[i]. A NaN stays: comparisons with it are false, and `!=` finds it on the left. */
#define DEFINE_COMBINE(name, real)                                                                           \
    static void name(real *restrict into, const real *restrict from, int64_t count, enum comm_op op) {       \
        switch (op) {                                                                                        \
        case COMM_SUM:                                                                                       \
            for (int64_t i = 0; i < count; i++) {                                                            \
                into[i] += from[i];                                                                          \
            }                                                                                                \
            break;                                                                                           \
        case COMM_MAX:                                                                                       \
            for (int64_t i = 0; i < count; i++) {                                                            \
                into[i] = into[i] > from[i] || into[i] != into[i] ? into[i] : from[i];                       \
            }                                                                                                \
            break;                                                                                           \
        case COMM_MIN:                                                                                       \
            for (int64_t i = 0; i < count; i++) {                                                            \
                into[i] = into[i] < from[i] || into[i] != into[i] ? into[i] : from[i];                       \
            }                                                                                                \
            break;                                                                                           \
        }                                                                                                    \
    }
DEFINE_COMBINE(combine_f32, float)
DEFINE_COMBINE(combine_f64, double)

static void combine_bf16(uint16_t *into, const uint16_t *from, int64_t count, enum comm_op op) {
    for (int64_t i = 0; i < count; i++) {
        float value = bf16_to_float(into[i]), other = bf16_to_float(from[i]);
        combine_f32(&value, &other, 1, op);
        into[i] = float_to_bf16(value);
    }
}

enum status comm_check_summable(enum dtype dtype) {
    if (dtype != DTYPE_F32 && dtype != DTYPE_F64 && dtype != DTYPE_BF16) {
        return fail("ranks reduce F32, F64 and BF16, not %s", dtype_name(dtype));
    }
    return STATUS_OK;
}

void comm_combine(void *into, const void *from, int64_t count, enum dtype dtype, enum comm_op op) {
    switch (dtype) {
    case DTYPE_F32:
        combine_f32(into, from, count, op);
        break;
    case DTYPE_F64:
        combine_f64(into, from, count, op);
        break;
    default:
        combine_bf16(into, from, count, op);
        break;
    }
}

/* ---- failures ---- */

enum status comm_fail_lost(const struct comm *c, struct comm_loss loss, const char *collective) {
    switch (loss.kind) {
    case COMM_LOSS_FAILED:
        return fail_as(
            STATUS_PEER_LOST, "rank %d failed; rank %d stopped in %s", loss.rank, c->rank, collective);
    case COMM_LOSS_LATE:
        return fail_as(STATUS_PEER_LOST,
            "rank %d did not arrive within %g s; rank %d stopped in %s: look at rank %d's machine, or raise "
            "--comm-timeout",
            loss.rank, loss.seconds, c->rank, collective, loss.rank);
    case COMM_LOSS_STUCK:
        return fail_as(STATUS_PEER_LOST,
            "all ranks came to a collective that did not end within %g s: the connection between GPUs is at "
            "fault, NCCL_DEBUG=INFO says more; rank %d stopped in %s",
            loss.seconds, c->rank, collective);
    default:
        return fail_as(
            STATUS_PEER_LOST, "rank %d died; rank %d stopped in %s", loss.rank, c->rank, collective);
    }
}

enum { AGREED_MESSAGE_BYTES = 1024 };

enum status comm_agree(struct comm *c, enum status own_status) {
    struct verdict {
        int32_t status;
        char message[AGREED_MESSAGE_BYTES];
    } own, *all = NULL;
    double worst = own_status;
    CHECK(c->host_all_reduce(c, &worst, 1, COMM_MAX));
    if (worst == STATUS_OK) {
        return STATUS_OK;
    }
    memset(&own, 0, sizeof own);
    own.status = own_status;
    snprintf(own.message, sizeof own.message, "%s", error_message());
    CHECK(ALLOCATE(all, c->ranks));
    enum status status = c->host_all_gather(c, all, &own, sizeof own);
    for (int rank = 0; rank < c->ranks && status == STATUS_OK; rank++) {
        if (all[rank].status != STATUS_OK) {
            status = fail_as((enum status)all[rank].status, "%s", all[rank].message);
        }
    }
    free(all);
    return status;
}

enum status comm_find_other(struct comm *c, const void *own, size_t bytes, int *other, void *pair) {
    char *all = NULL;
    *other = 0;
    CHECK(ALLOCATE(all, (size_t)c->ranks * bytes));
    enum status status = c->host_all_gather(c, all, own, bytes);
    for (int rank = 1; rank < c->ranks && status == STATUS_OK && *other == 0; rank++) {
        *other = memcmp(all + (size_t)rank * bytes, all, bytes) != 0 ? rank : 0;
    }
    if (*other > 0 && pair != NULL) {
        memcpy(pair, all, bytes);
        memcpy((char *)pair + bytes, all + (size_t)*other * bytes, bytes);
    }
    free(all);
    return status;
}

void comm_abort(struct comm *c) {
    if (c != NULL) {
        c->abort(c);
    }
}

/* ---- one rank ---- */

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

enum status comm_no_wait(struct comm *c, int slot) {
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

static void single_tell_progress(struct comm *c, uint64_t collectives) {
    (void)c, (void)collectives;
}

static enum status single_check_peers(struct comm *c) {
    (void)c;
    return STATUS_OK;
}

static enum status single_report_stall(struct comm *c, double seconds) {
    struct comm_loss stuck = {COMM_LOSS_STUCK, 0, seconds};
    return comm_fail_lost(c, stuck, "a collective of one rank");
}

double comm_no_ms(struct comm *c) {
    (void)c;
    return 0.0;
}

double comm_seconds_waited(double *before) {
    static const double LOOK_SECONDS = 0.05, STOPPED_SECONDS = 0.5;
    double now = time_seconds(), seconds = now - *before;
    *before = now;
    return seconds < STOPPED_SECONDS ? seconds : LOOK_SECONDS;
}

static void single_be_patient(struct comm *c, double seconds) {
    (void)c, (void)seconds;
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
        .wait = comm_no_wait,
        .host_all_reduce = single_host_all_reduce,
        .host_all_gather = single_host_all_gather,
        .barrier = single_barrier,
        .tell_progress = single_tell_progress,
        .check_peers = single_check_peers,
        .report_stall = single_report_stall,
        .blocked_ms = comm_no_ms,
        .running_ms = comm_no_ms,
        .be_patient = single_be_patient,
        .abort = single_abort,
        .free = single_free,
    };
    return STATUS_OK;
}

/* ---- builds without NCCL ---- */

bool comm_nccl_built(void) {
#ifdef WITH_NCCL
    return true;
#else
    return false;
#endif
}

#ifndef WITH_NCCL

enum status comm_nccl_create(
    struct comm **out, struct comm *host, struct backend *backend, const struct comm_nccl_options *options) {
    (void)out, (void)backend, (void)options;
    return fail("%d ranks on GPUs: this program was built without NCCL; use --ranks 1, or install NCCL and "
                "build again (see `make config`)",
        host->ranks);
}

#endif
