/* Collectives between ranks. One interface; behind it, on the CPU, shared memory between the processes that one
   machine's launcher forked (comm_shared.c) or TCP between those that the environment brought together
   (comm_tcp.c). On GPUs NCCL moves the data (comm_nccl.cu), and one of those two stays beside it: it brings the
   ranks together, passes their small decisions on without waiting for the GPU, and knows who was lost.

   Data collectives work on the backend's memory. Each starts when everything enqueued on the compute stream
   so far is done, runs beside what is enqueued later, and is complete for the compute stream after
   wait(slot). Every rank calls the same collectives in the same order. Sums on the CPU add the ranks in rank
   order: all-reduce and reduce-scatter of the same data give the same bits; NCCL's order is its algorithm's,
   the same for every rank. The maximum or minimum of values with a NaN is NaN.

   Errors: STATUS_PEER_LOST names the rank that died or did not answer within the timeout. After one, the
   communicator is of no more use than to be freed. */
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { COMM_MAX_RANKS = 4096, COMM_SLOTS = 4096 };
enum comm_op { COMM_SUM, COMM_MAX, COMM_MIN };

struct comm {
    int rank, ranks;
    struct comm_state *state;

    /* in place over `count` elements */
    enum status (*all_reduce)(struct comm *c, struct tensor data, int64_t count, enum comm_op op, int slot);
    /* data holds ranks * count elements; afterwards elements [rank * count, (rank + 1) * count) are summed
       over ranks, the others are undefined */
    enum status (*reduce_scatter)(struct comm *c, struct tensor data, int64_t count, int slot);
    /* data holds ranks * count elements; every rank's own part is filled; afterwards all parts are */
    enum status (*all_gather)(struct comm *c, struct tensor data, int64_t count, int slot);
    /* from rank `root`, in place */
    enum status (*broadcast)(struct comm *c, struct tensor data, int64_t count, int root, int slot);
    /* Makes the compute stream wait for the collective last started in `slot`; none is no error. */
    enum status (*wait)(struct comm *c, int slot);

    /* Small host values, complete on return: for decisions that all ranks must take together. */
    enum status (*host_all_reduce)(struct comm *c, double *values, int count, enum comm_op op);
    /* every rank's `bytes` bytes at in, to out[ranks * bytes] in rank order */
    enum status (*host_all_gather)(struct comm *c, void *out, const void *in, size_t bytes);
    enum status (*barrier)(struct comm *c);

    /* For the communicator that works beside this one, and safe from its thread: how many collectives this rank
       has come to; STATUS_PEER_LOST once a rank is lost; and this rank's word that a collective has not ended
       within `seconds`: who came to the fewest is lost, which the status says. */
    void (*tell_progress)(struct comm *c, uint64_t collectives);
    enum status (*check_peers)(struct comm *c);
    enum status (*report_stall)(struct comm *c, double seconds);

    /* Milliseconds that this rank has waited for others inside collectives, since it last asked; 0 where collectives run
       beside the compute stream. */
    double (*blocked_ms)(struct comm *c);
    /* For the profiler: milliseconds that data collectives ran beside the compute stream since it last asked, as far as
       they have ended; those before the first call are not counted. */
    double (*running_ms)(struct comm *c);

    /* From now on a rank may be so many seconds later than the timeout says: while all read or write files, which takes
       as long as it takes. 0: as before. */
    void (*be_patient)(struct comm *c, double seconds);
    void (*abort)(struct comm *c); /* see comm_abort */
    void (*free)(struct comm *c);
};

/* One rank, no communication. */
enum status comm_single_create(struct comm **out);

/* Memory that `ranks` processes on this machine meet in. Made before the fork, inherited by it. window_bytes:
   the largest piece of a rank's data exchanged at once (larger data goes in several pieces); the memory takes
   2 * ranks * window_bytes. */
struct comm_shared_memory;
enum status comm_shared_memory_create(struct comm_shared_memory **out, int ranks, size_t window_bytes);
void comm_shared_memory_free(struct comm_shared_memory *memory);

/* Why a run cannot go on. The memory keeps the first loss alone: it is the cause, what follows are effects. */
enum comm_loss_kind {
    COMM_LOSS_NONE,
    COMM_LOSS_FAILED, /* the rank itself says that it met an error */
    COMM_LOSS_DIED,   /* its process ended without its work done */
    COMM_LOSS_LATE,   /* it did not come to a collective within the timeout */
    COMM_LOSS_STUCK   /* all came to a collective that did not end within the timeout; `rank` noticed it */
};
struct comm_loss {
    enum comm_loss_kind kind;
    int rank;
    double seconds; /* LATE and STUCK: the timeout */
};
/* Any process that sees a rank lost tells the others so: they return STATUS_PEER_LOST at once from the
   collective they wait in, or from their next. True if this loss is the first. */
bool comm_shared_memory_mark_lost(struct comm_shared_memory *memory, struct comm_loss loss);
struct comm_loss comm_shared_memory_loss(const struct comm_shared_memory *memory);

/* The step that a rank is in, for the message about its end; 0: before the first. */
void comm_shared_memory_set_step(struct comm_shared_memory *memory, int rank, int64_t step);
int64_t comm_shared_memory_step(const struct comm_shared_memory *memory, int rank);

/* The rank's end of it. Sums, maxima and minima of F32, F64 and BF16; the moving collectives take any dtype.
   Collectives are complete on return. timeout_seconds: how long a rank may be behind. */
enum status comm_shared_create(
    struct comm **out, struct comm_shared_memory *memory, int rank, double timeout_seconds);

/* Ranks that meet over TCP, wherever they run (rendezvous.h): rank 0 stands in the middle of a star. Everything
   comm_shared_create says holds. */
struct rendezvous_options;
enum status comm_tcp_create(struct comm **out, const struct rendezvous_options *meeting);

/* NCCL for the data of a CUDA backend, one GPU a rank, beside `host`, which has brought the same ranks together
   and now belongs to the new communicator (on failure it stays the caller's). Fails in a build without NCCL.
   NVLink multicast stays off unless NCCL_NVLS_ENABLE is set. */
bool comm_nccl_built(void); /* is it in this build? */
struct comm_nccl_options {
    double timeout_seconds; /* how long a collective may take once this rank has come to it */
    int ctas;               /* thread blocks, so SMs, that NCCL takes; 0: its choice */
    bool deterministic; /* one algorithm and protocol for all sizes: NCCL_ALGO and NCCL_PROTO, unless set */
};
enum status comm_nccl_create(
    struct comm **out, struct comm *host, struct backend *backend, const struct comm_nccl_options *options);

/* STATUS_OK if every rank says so; else, on every rank, the status and the message of the first that does not. */
enum status comm_agree(struct comm *c, enum status own_status);

/* *other: the first rank whose `bytes` bytes at own are not rank 0's, or 0. Then pair[2 * bytes] has rank 0's and that
   rank's, unless it is NULL. */
enum status comm_find_other(struct comm *c, const void *own, size_t bytes, int *other, void *pair);

/* What communicators on the CPU compute with: into[i] = into[i] op from[i]; F32, F64, BF16 (sums are rounded each). */
enum status comm_check_summable(enum dtype dtype);
void comm_combine(void *into, const void *from, int64_t count, enum dtype dtype, enum comm_op op);
/* wait and running_ms of those whose collectives are complete on return */
enum status comm_no_wait(struct comm *c, int slot);
double comm_no_ms(struct comm *c);
/* For those that look at peers every 50 ms or more often: since *before, which becomes now. Half a second and more between
   two looks: this process was stopped itself, which is not the others' delay, and counts as one look. */
double comm_seconds_waited(double *before);
/* The message of a loss, as the rank tells it that stopped in `collective`. */
enum status comm_fail_lost(const struct comm *c, struct comm_loss loss, const char *collective);

/* A rank that failed tells the others before it ends, so that they do not take its silence for slowness.
   NULL is allowed. */
void comm_abort(struct comm *c);

#ifdef __cplusplus
}
#endif

#endif
