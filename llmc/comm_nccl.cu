/* Collectives over NCCL, one GPU a rank, on a stream of their own.

     compute stream   ... backward of layer l | ready ................... | wait(slot): done | ...
     comm stream                                 ready | collective | done

   "ready" and "done" are events of the collective's slot; the host waits for neither. The stream has the highest
   priority, so that a collective's few thread blocks find room between those of a product.

   The host may sit in a wait for the GPU, which never ends if a peer is gone. So a watchdog thread looks a few times
   a second: has the host's communicator lost a rank, has NCCL met an error, is a collective that this rank has come
   to ("ready" is past) not done within the timeout? On any of these it keeps the message, then aborts the NCCL
   communicator, which ends its kernels: the host comes free, and its next call here returns the message. Should even
   that not free the host, an alarm signal ends the process. The watchdog also says how far this rank has come, so that
   the rank is named that did not come to a collective, be it that its host does not get there or that its GPU does not.

   The NCCL communicator is nonblocking: calls return at once, and what is still in progress is polled. It is used by
   one thread at a time, under the lock. */
#ifdef WITH_NCCL

#include "comm.h"
#include "cuda/cuda.cuh"

#include <nccl.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum {
    MESSAGE_BYTES = 1024,
    LOOK_MS = 50,       /* between two looks of the watchdog */
    FREE_SECONDS = 10,  /* for the host to come free after an abort, before the process ends */
    FINISH_SECONDS = 10 /* for a communicator to end in peace */
};

struct slot {
    cudaEvent_t ready, begin, done; /* made when first used */
    bool timed;                     /* its last collective is not in running_ms yet */
    bool waited_for;                /* the compute stream has waited for it, or nothing was started */
    /* under the lock, of its last collective: */
    uint64_t number;       /* counted over all slots from 1 */
    bool running, reached; /* started, and not seen done by the watchdog; has the compute stream come to it */
    double running_seconds; /* since that was seen */
};

struct comm_state {
    struct comm *host;
    struct backend *backend;
    cudaStream_t stream;
    double timeout_seconds, patience_seconds; /* the second under the lock */
    uint64_t started, reached; /* collectives; by the compute stream, as the host knows; under the lock */
    bool timing;               /* the profiler asks */
    double running_ms;
    int slots_used; /* slots at and above it were never used; under the lock */
    struct slot slots[COMM_SLOTS];

    pthread_mutex_t lock;
    pthread_cond_t wake; /* the watchdog's: stop is set; by a clock that nobody sets back */
    bool watched, stop;  /* is there a watchdog; shall it end */
    ncclComm_t nccl;     /* NULL before it is made and after an abort */
    bool lost;
    char lost_message[MESSAGE_BYTES];
    pthread_t watchdog;
};

/* ---- failures ---- */

/* A network, a GPU or a peer that fails is a loss, and another try may do; a wrong call is not. */
static enum status nccl_failed(struct comm_state *s, ncclResult_t result, const char *what) {
    const char *more = ncclGetLastError(s->nccl);
    bool wrong_call = result == ncclInvalidArgument || result == ncclInvalidUsage;
    return fail_as(wrong_call ? STATUS_ERROR : STATUS_PEER_LOST, "NCCL: %s: %s%s%s", what,
        ncclGetErrorString(result), more != NULL && more[0] != '\0' ? ": " : "", more != NULL ? more : "");
}

/* Under the lock. The message is the calling thread's last. */
static void give_up(struct comm_state *s) {
    if (!s->lost) {
        s->lost = true;
        snprintf(s->lost_message, sizeof s->lost_message, "%s", error_message());
    }
    if (s->nccl != NULL) {
        alarm(FREE_SECONDS);
        ncclCommAbort(s->nccl);
        s->nccl = NULL;
    }
}

/* Under the lock. */
static enum status check_lost(const struct comm_state *s) {
    return s->lost ? fail_as(STATUS_PEER_LOST, "%s", s->lost_message) : STATUS_OK;
}

static enum status check_lost_locking(struct comm_state *s) {
    pthread_mutex_lock(&s->lock);
    enum status status = check_lost(s);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static void sleep_ms(double milliseconds) {
    struct timespec time = {0, (long)(milliseconds * 1e6)};
    nanosleep(&time, NULL);
}

/* ---- the watchdog ---- */

/* Under the lock. Has the compute stream come to the slot's collective? Before that nobody keeps this rank waiting. */
static enum status look_for_ready(struct comm_state *s, struct slot *slot) {
    if (slot->running && !slot->reached) {
        cudaError_t ready = cudaEventQuery(slot->ready);
        if (ready == cudaErrorNotReady) {
            return STATUS_OK;
        }
        CUDA_CHECK(ready);
        slot->reached = true;
        s->reached = slot->number > s->reached ? slot->number : s->reached;
    }
    return STATUS_OK;
}

/* Under the lock. How long the slot's collective has kept this rank waiting; `slept`: since the last look. */
static enum status look_for_done(struct comm_state *s, struct slot *slot, double slept) {
    if (!slot->running || !slot->reached) {
        return STATUS_OK;
    }
    cudaError_t done = cudaEventQuery(slot->done);
    if (done == cudaSuccess) {
        slot->running = false;
        return STATUS_OK;
    }
    if (done != cudaErrorNotReady) {
        return cuda_failed(done, "a collective");
    }
    slot->running_seconds += slept;
    if (slot->running_seconds >= s->timeout_seconds + s->patience_seconds) {
        return s->host->report_stall(s->host, s->timeout_seconds + s->patience_seconds);
    }
    return STATUS_OK;
}

/* Under the lock. */
static enum status look(struct comm_state *s, double slept) {
    CHECK(s->host->check_peers(s->host));
    ncclResult_t result = ncclSuccess;
    ncclResult_t asked = ncclCommGetAsyncError(s->nccl, &result);
    if (asked != ncclSuccess || (result != ncclSuccess && result != ncclInProgress)) {
        return nccl_failed(s, asked != ncclSuccess ? asked : result, "the connection to the other ranks");
    }
    uint64_t before = s->reached;
    for (int i = 0; i < s->slots_used; i++) {
        CHECK(look_for_ready(s, &s->slots[i]));
    }
    if (s->reached > before) {
        s->host->tell_progress(s->host, s->reached);
    }
    for (int i = 0; i < s->slots_used; i++) {
        CHECK(look_for_done(s, &s->slots[i], slept));
    }
    return STATUS_OK;
}

static void *watch(void *context) {
    struct comm_state *s = (struct comm_state *)context;
    cudaSetDevice(s->backend->state->device);
    double before = time_seconds();
    pthread_mutex_lock(&s->lock);
    while (!s->stop && !s->lost) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += LOOK_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(&s->wake, &s->lock, &until);
        double slept = comm_seconds_waited(&before);
        if (!s->stop && !s->lost && s->nccl != NULL && look(s, slept) != STATUS_OK) {
            give_up(s);
        }
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- calls of NCCL ---- */

/* Until what was begun is in progress no more. */
static enum status finish_call(struct comm_state *s, ncclResult_t result, const char *what, double seconds) {
    double before = time_seconds(), waited = 0.0;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        enum status status = check_lost(s);
        if (status == STATUS_OK && result == ncclInProgress) {
            ncclResult_t asked = ncclCommGetAsyncError(s->nccl, &result);
            result = asked != ncclSuccess ? asked : result;
        }
        if (status == STATUS_OK && result != ncclSuccess && result != ncclInProgress) {
            status = nccl_failed(s, result, what);
        }
        pthread_mutex_unlock(&s->lock);
        if (status != STATUS_OK || result == ncclSuccess) {
            return status;
        }
        waited += comm_seconds_waited(&before);
        if (waited > seconds) {
            return fail_as(STATUS_PEER_LOST, "NCCL: %s did not end within %g s; NCCL_DEBUG=INFO says more",
                what, seconds);
        }
        sleep_ms(0.02);
    }
}

static enum status wire_type(ncclDataType_t *out, enum dtype dtype) {
    switch (dtype) {
    case DTYPE_F32:
        *out = ncclFloat32;
        return STATUS_OK;
    case DTYPE_F64:
        *out = ncclFloat64;
        return STATUS_OK;
    case DTYPE_BF16:
        *out = ncclBfloat16;
        return STATUS_OK;
    default:
        return fail("ranks on GPUs exchange F32, F64 and BF16, not %s", dtype_name(dtype));
    }
}

enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

struct collective {
    enum kind kind;
    struct tensor data;
    int64_t count;
    ncclRedOp_t op;
    int root;
};

/* Under the lock. In place, as comm.h lays the data out. */
static ncclResult_t call(struct comm *c, const struct collective *x, ncclDataType_t type) {
    struct comm_state *s = c->state;
    void *data = x->data.data, *own = tensor_at(x->data, c->rank * x->count).data;
    size_t count = (size_t)x->count;
    switch (x->kind) {
    case ALL_REDUCE:
        return ncclAllReduce(data, data, count, type, x->op, s->nccl, s->stream);
    case REDUCE_SCATTER:
        return ncclReduceScatter(data, own, count, type, ncclSum, s->nccl, s->stream);
    case ALL_GATHER:
        return ncclAllGather(own, data, count, type, s->nccl, s->stream);
    default:
        return ncclBroadcast(data, data, count, type, x->root, s->nccl, s->stream);
    }
}

/* Of the slot's last collective, if it has ended. */
static void add_running_time(struct comm_state *s, struct slot *slot) {
    float milliseconds;
    if (!slot->timed) {
        return;
    }
    if (cudaEventElapsedTime(&milliseconds, slot->begin, slot->done) == cudaSuccess) {
        s->running_ms += milliseconds;
        slot->timed = false;
    } else {
        cudaGetLastError(); /* not there yet, which is not the next kernel's failure */
    }
}

static enum status start(struct comm *c, struct collective x, int number) {
    static const char *const names[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast"};
    struct comm_state *s = c->state;
    struct slot *slot = &s->slots[number];
    ncclDataType_t type = ncclFloat32;
    CHECK(wire_type(&type, x.data.dtype));
    if (slot->ready == NULL) {
        CUDA_CHECK(cudaEventCreate(&slot->done));
        CUDA_CHECK(cudaEventCreate(&slot->begin));
        CUDA_CHECK(cudaEventCreateWithFlags(&slot->ready, cudaEventDisableTiming));
    }
    add_running_time(s, slot);
    CUDA_CHECK(cudaEventRecord(slot->ready, s->backend->state->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s->stream, slot->ready, 0));
    CUDA_CHECK(cudaEventRecord(slot->begin, s->stream));
    pthread_mutex_lock(&s->lock);
    enum status status = check_lost(s);
    ncclResult_t result = status == STATUS_OK ? call(c, &x, type) : ncclSuccess;
    pthread_mutex_unlock(&s->lock);
    CHECK(status);
    CHECK(finish_call(s, result, names[x.kind], s->timeout_seconds));
    CUDA_CHECK(cudaEventRecord(slot->done, s->stream));
    slot->waited_for = false;
    slot->timed = s->timing;
    pthread_mutex_lock(&s->lock);
    slot->number = ++s->started;
    slot->running = true;
    slot->reached = false;
    slot->running_seconds = 0;
    s->slots_used = (int)max_i64(s->slots_used, number + 1);
    pthread_mutex_unlock(&s->lock);
    return STATUS_OK;
}

/* ---- the collectives ---- */

static enum status all_reduce(struct comm *c, struct tensor data, int64_t count, enum comm_op op, int slot) {
    ncclRedOp_t nccl_op = op == COMM_SUM ? ncclSum : op == COMM_MAX ? ncclMax : ncclMin;
    struct collective x = {ALL_REDUCE, data, count, nccl_op, 0};
    return start(c, x, slot);
}

static enum status reduce_scatter(struct comm *c, struct tensor data, int64_t count, int slot) {
    struct collective x = {REDUCE_SCATTER, data, count, ncclSum, 0};
    return start(c, x, slot);
}

static enum status all_gather(struct comm *c, struct tensor data, int64_t count, int slot) {
    struct collective x = {ALL_GATHER, data, count, ncclSum, 0};
    return start(c, x, slot);
}

static enum status broadcast(struct comm *c, struct tensor data, int64_t count, int root, int slot) {
    struct collective x = {BROADCAST, data, count, ncclSum, root};
    return start(c, x, slot);
}

static enum status wait(struct comm *c, int number) {
    struct comm_state *s = c->state;
    struct slot *slot = &s->slots[number];
    CHECK(check_lost_locking(s));
    if (!slot->waited_for) {
        CUDA_CHECK(cudaStreamWaitEvent(s->backend->state->stream, slot->done, 0));
        slot->waited_for = true;
    }
    return STATUS_OK;
}

/* ---- what the host's communicator does ---- */

static enum status host_all_reduce(struct comm *c, double *values, int count, enum comm_op op) {
    CHECK(check_lost_locking(c->state));
    return c->state->host->host_all_reduce(c->state->host, values, count, op);
}

static enum status host_all_gather(struct comm *c, void *out, const void *in, size_t bytes) {
    CHECK(check_lost_locking(c->state));
    return c->state->host->host_all_gather(c->state->host, out, in, bytes);
}

static enum status barrier(struct comm *c) {
    CHECK(check_lost_locking(c->state));
    return c->state->host->barrier(c->state->host);
}

static void tell_progress(struct comm *c, uint64_t collectives) {
    c->state->host->tell_progress(c->state->host, collectives);
}

static enum status check_peers(struct comm *c) {
    return c->state->host->check_peers(c->state->host);
}

static enum status report_stall(struct comm *c, double seconds) {
    return c->state->host->report_stall(c->state->host, seconds);
}

static double running_ms(struct comm *c) {
    struct comm_state *s = c->state;
    for (int i = 0; s->timing && i < s->slots_used; i++) {
        add_running_time(s, &s->slots[i]);
    }
    double milliseconds = s->running_ms;
    s->running_ms = 0;
    s->timing = true;
    return milliseconds;
}

/* ---- life ---- */

static void be_patient(struct comm *c, double seconds) {
    struct comm_state *s = c->state;
    s->host->be_patient(s->host, seconds);
    pthread_mutex_lock(&s->lock);
    s->patience_seconds = seconds;
    pthread_mutex_unlock(&s->lock);
}

static void abort_all(struct comm *c) {
    struct comm_state *s = c->state;
    s->host->abort(s->host);
    pthread_mutex_lock(&s->lock);
    give_up(s);
    pthread_mutex_unlock(&s->lock);
}

static void stop_watchdog(struct comm_state *s) {
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    if (s->watched) {
        pthread_join(s->watchdog, NULL);
    }
}

/* Everything but the host's communicator. */
static void free_state(struct comm_state *s) {
    stop_watchdog(s);
    if (s->nccl != NULL) {
        ncclResult_t result = ncclCommFinalize(s->nccl);
        if (finish_call(s, result, "the end", FINISH_SECONDS) == STATUS_OK) {
            ncclCommDestroy(s->nccl);
        } else {
            ncclCommAbort(s->nccl);
        }
    }
    alarm(0);
    for (int i = 0; i < COMM_SLOTS; i++) {
        if (s->slots[i].ready != NULL) {
            cudaEventDestroy(s->slots[i].ready);
            cudaEventDestroy(s->slots[i].begin);
            cudaEventDestroy(s->slots[i].done);
        }
    }
    if (s->stream != NULL) {
        cudaStreamDestroy(s->stream);
    }
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void comm_free(struct comm *c) {
    struct comm *host = c->state->host;
    uint64_t started = c->state->started;
    free_state(c->state);
    host->tell_progress(host, started);
    host->free(host);
    free(c);
}

/* Names of machines may be alike, as "localhost" is, or several on one, as in containers: the number of its last start is
   each one's own. */
static void name_machine(char *out, size_t size) {
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file == NULL || fgets(out, (int)size, file) == NULL) {
        gethostname(out, size - 1);
    }
    if (file != NULL) {
        fclose(file);
    }
}

/* Two ranks on one GPU deadlock NCCL at worst; it is told which they are. */
static enum status check_distinct_gpus(struct comm *host, int device) {
    struct place {
        char machine[64], bus[32];
    } own, *all = NULL;
    memset(&own, 0, sizeof own);
    name_machine(own.machine, sizeof own.machine);
    CUDA_CHECK(cudaDeviceGetPCIBusId(own.bus, sizeof own.bus, device));
    CHECK(ALLOCATE(all, host->ranks));
    enum status status = host->host_all_gather(host, all, &own, sizeof own);
    for (int b = 1; b < host->ranks && status == STATUS_OK; b++) {
        for (int a = 0; a < b && status == STATUS_OK; a++) {
            if (memcmp(&all[a], &all[b], sizeof own) == 0) {
                status =
                    fail("ranks %d and %d are both on GPU %s of a machine: start as many ranks on it as it "
                         "has GPUs, each with a local rank of its own",
                        a, b, all[a].bus);
            }
        }
    }
    free(all);
    return status;
}

/* NCCL reads these when it is first used; what the user has set stays. */
static void set_environment(const struct comm_nccl_options *options) {
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    if (options->deterministic) {
        setenv("NCCL_ALGO", "Ring", 0);
        setenv("NCCL_PROTO", "Simple", 0);
    }
}

static enum status meet(struct comm_state *s, const struct comm_nccl_options *options) {
    struct comm *host = s->host;
    ncclUniqueId own, *all = NULL;
    memset(&own, 0, sizeof own);
    enum status status = STATUS_OK;
    if (host->rank == 0) {
        ncclResult_t result = ncclGetUniqueId(&own);
        status = result == ncclSuccess ? STATUS_OK : nccl_failed(s, result, "a new communicator");
    }
    CHECK(comm_agree(host, status));
    CHECK(ALLOCATE(all, host->ranks));
    status = host->host_all_gather(host, all, &own, sizeof own);
    own = all[0];
    free(all);
    CHECK(status);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (options->ctas > 0) {
        config.minCTAs = options->ctas;
        config.maxCTAs = options->ctas;
    }
    pthread_mutex_lock(&s->lock);
    ncclResult_t result = ncclCommInitRankConfig(&s->nccl, host->ranks, own, host->rank, &config);
    pthread_mutex_unlock(&s->lock);
    return finish_call(s, result, "the meeting of the ranks", s->timeout_seconds);
}

static enum status prepare(struct comm_state *s, const struct comm_nccl_options *options) {
    int least, greatest;
    set_environment(options);
    CHECK(comm_agree(s->host, check_distinct_gpus(s->host, s->backend->state->device)));
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking, greatest));
    if (pthread_create(&s->watchdog, NULL, watch, s) != 0) {
        return fail("no thread to watch over the other ranks: the system's limit of threads is reached");
    }
    s->watched = true;
    return meet(s, options);
}

enum status comm_nccl_create(
    struct comm **out, struct comm *host, struct backend *backend, const struct comm_nccl_options *options) {
    struct comm *c = NULL;
    struct comm_state *s = NULL;
    CHECK(ALLOCATE(s, 1));
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->wake, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&s->lock, NULL);
    s->host = host;
    s->backend = backend;
    s->timeout_seconds = options->timeout_seconds;
    for (int i = 0; i < COMM_SLOTS; i++) {
        s->slots[i].waited_for = true;
    }
    enum status status = ALLOCATE(c, 1);
    if (status == STATUS_OK) {
        status = prepare(s, options);
    }
    if (status != STATUS_OK) {
        pthread_mutex_lock(&s->lock);
        give_up(s);
        pthread_mutex_unlock(&s->lock);
        free_state(s);
        free(c);
        return status;
    }
    c->rank = host->rank;
    c->ranks = host->ranks;
    c->state = s;
    c->all_reduce = all_reduce;
    c->reduce_scatter = reduce_scatter;
    c->all_gather = all_gather;
    c->broadcast = broadcast;
    c->wait = wait;
    c->host_all_reduce = host_all_reduce;
    c->host_all_gather = host_all_gather;
    c->barrier = barrier;
    c->tell_progress = tell_progress;
    c->check_peers = check_peers;
    c->report_stall = report_stall;
    c->blocked_ms = comm_no_ms;
    c->running_ms = running_ms;
    c->be_patient = be_patient;
    c->abort = abort_all;
    c->free = comm_free;
    *out = c;
    return STATUS_OK;
}

#endif
