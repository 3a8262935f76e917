/* Collectives between processes of one machine that share a piece of memory, mapped before they were
   forked.

   The memory: a barrier, the first loss, a seat per rank, and a window per rank that holds two pieces of
   its data.

     write own piece into own window | barrier | read the others' windows | next piece into the other half | ...

   Alternating halves save a second barrier: a half is written again two pieces later, and the barrier in
   between proves that every rank has finished reading it. All-reduce has two barriers a piece, since every
   rank first sums its share of the piece for all. A sum starts with rank 0's values and adds rank 1's, rank
   2's, ..., whatever the collective and the size of its pieces, so that equal sums have equal bits.

   Memory ordering. Windows are plain memory; all order comes from the barrier. A rank arrives by an
   acquire-release increment of `arrived`, so the last to arrive has seen everything that the others wrote
   before; it stores `generation` with release, and who loads the new generation with acquire sees all that
   too. Lock-free atomics work between processes (C11 7.17.5), and so does a futex on shared memory.

   A rank waits by looking a few times, then sleeps in the kernel until the generation changes: ranks may
   outnumber cores. It wakes every now and then to see whether a loss was marked, whether the process that
   started it is gone, and whether its patience is over. */
#include "comm.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

enum { CACHE_LINE = 64, LOOKS_BEFORE_SLEEP = 20 };
static const double SLEEP_SECONDS = 0.05;

/* One a rank, written by it alone. */
struct seat {
    _Alignas(CACHE_LINE) _Atomic uint64_t
        arrivals;                 /* barriers it has come to: who is behind when one waits in vain */
    _Atomic uint64_t collectives; /* the same of a communicator beside this one, as tell_progress says */
    _Atomic int64_t step;
    _Atomic bool left; /* it comes to no further barrier or collective */
    uint64_t pieces;   /* pieces it has exchanged: the lowest bit picks the half */
};

struct comm_shared_memory {
    int ranks;
    size_t window_bytes, mapped_bytes;
    char *windows;         /* [ranks][2][window_bytes] */
    _Atomic uint64_t loss; /* packed, 0: none */
    _Alignas(CACHE_LINE) _Atomic uint32_t arrived;
    _Alignas(CACHE_LINE) _Atomic uint32_t generation;
    struct seat seats[];
};

struct comm_state {
    struct comm_shared_memory *memory;
    struct seat *seat;
    double timeout_seconds, patience_seconds;
    double blocked_seconds;
    pid_t parent;
};

enum status comm_shared_memory_create(struct comm_shared_memory **out, int ranks, size_t window_bytes) {
    *out = NULL;
    if (ranks < 1 || ranks > COMM_MAX_RANKS) {
        return fail("%d ranks: must be 1 to %d", ranks, COMM_MAX_RANKS);
    }
    /* reduce-scatter wants room for an element of every rank's part */
    size_t smallest = (size_t)ranks * CACHE_LINE;
    size_t window =
        (size_t)round_up((int64_t)(window_bytes > smallest ? window_bytes : smallest), CACHE_LINE);
    struct comm_shared_memory *memory;
    size_t head = (size_t)round_up((int64_t)(sizeof *memory + (size_t)ranks * sizeof(struct seat)), 4096);
    size_t bytes = head + (size_t)ranks * 2 * window;
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return fail_as(STATUS_OUT_OF_MEMORY, "%zu bytes of memory shared by %d ranks: %s", bytes, ranks,
            strerror(errno));
    }
    memory = mapped; /* zeroed: nobody has arrived, nobody is lost */
    memory->ranks = ranks;
    memory->window_bytes = window;
    memory->mapped_bytes = bytes;
    memory->windows = (char *)mapped + head;
    *out = memory;
    return STATUS_OK;
}

void comm_shared_memory_free(struct comm_shared_memory *memory) {
    if (memory != NULL) {
        munmap(memory, memory->mapped_bytes);
    }
}

/* ---- sleeping until a word changes ---- */

#ifdef __linux__
static void sleep_while_equal(_Atomic uint32_t *word, uint32_t value) {
    struct timespec time = {.tv_nsec = (long)(SLEEP_SECONDS * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &time, NULL, 0);
}

static void wake_sleepers(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
#else
static void sleep_while_equal(_Atomic uint32_t *word, uint32_t value) {
    (void)word, (void)value;
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static void wake_sleepers(_Atomic uint32_t *word) {
    (void)word;
}
#endif

/* ---- losses ---- */

/* kind in bits 0..7, rank in bits 8..23, milliseconds above: one word, so that one process is the first */
bool comm_shared_memory_mark_lost(struct comm_shared_memory *memory, struct comm_loss loss) {
    uint64_t packed = (uint64_t)loss.kind | (uint64_t)loss.rank << 8 | (uint64_t)(loss.seconds * 1e3) << 24;
    uint64_t none = 0;
    bool first = atomic_compare_exchange_strong(&memory->loss, &none, packed);
    /* Who goes to sleep just now may miss this call; it looks again within SLEEP_SECONDS. */
    wake_sleepers(&memory->generation);
    return first;
}

struct comm_loss comm_shared_memory_loss(const struct comm_shared_memory *memory) {
    uint64_t packed = atomic_load(&memory->loss);
    struct comm_loss loss = {
        (enum comm_loss_kind)(packed & 0xff), (int)(packed >> 8 & 0xffff), (double)(packed >> 24) / 1e3};
    return loss;
}

static enum status fail_lost(const struct comm *c, const char *collective) {
    return comm_fail_lost(c, comm_shared_memory_loss(c->state->memory), collective);
}

void comm_shared_memory_set_step(struct comm_shared_memory *memory, int rank, int64_t step) {
    atomic_store(&memory->seats[rank].step, step);
}

int64_t comm_shared_memory_step(const struct comm_shared_memory *memory, int rank) {
    return atomic_load(&memory->seats[rank].step);
}

/* ---- the barrier: sense-reversing (Mellor-Crummey and Scott, TOCS 1991), the sense a counter ---- */

/* A rank that has been to fewer barriers than this one: somebody it waits for. */
static int rank_behind(const struct comm *c) {
    const struct comm_shared_memory *memory = c->state->memory;
    uint64_t own = atomic_load(&c->state->seat->arrivals);
    int rank = 0;
    while (rank < memory->ranks - 1 && atomic_load(&memory->seats[rank].arrivals) >= own) {
        rank++;
    }
    return rank;
}

/* Whoever has left counts no more arrivals, so they are looked at after that. */
static bool will_never_come(const struct comm *c, int rank) {
    const struct seat *seat = &c->state->memory->seats[rank];
    return atomic_load(&seat->left) && atomic_load(&seat->arrivals) < atomic_load(&c->state->seat->arrivals);
}

static enum status check_parent(const struct comm *c, const char *collective) {
    if (getppid() != c->state->parent) {
        return fail_as(
            STATUS_PEER_LOST, "the process that started rank %d is gone; stopped in %s", c->rank, collective);
    }
    return STATUS_OK;
}

static enum status wait_for_others(struct comm *c, uint32_t generation, const char *collective) {
    struct comm_shared_memory *memory = c->state->memory;
    double waited = 0;
    for (;;) {
        bool lost = atomic_load(&memory->loss) != 0;
        /* Looked at after the loss: who has come through before it was marked goes on to the next
           collective. */
        if (atomic_load_explicit(&memory->generation, memory_order_acquire) != generation) {
            return STATUS_OK;
        }
        if (lost) {
            return fail_lost(c, collective);
        }
        CHECK(check_parent(c, collective));
        int behind = rank_behind(c);
        if (will_never_come(c, behind)) {
            struct comm_loss died = {COMM_LOSS_DIED, behind, 0};
            comm_shared_memory_mark_lost(memory, died);
            continue;
        }
        double patience = c->state->timeout_seconds + c->state->patience_seconds;
        if (waited >= patience) {
            struct comm_loss late = {COMM_LOSS_LATE, behind, patience};
            comm_shared_memory_mark_lost(memory, late);
            continue;
        }
        double start = time_seconds();
        sleep_while_equal(&memory->generation, generation);
        double slept = time_seconds() - start;
        /* Longer than asked for: this process was stopped itself (Ctrl-Z), which is not the others' delay. */
        waited += slept < 2 * SLEEP_SECONDS ? slept : SLEEP_SECONDS;
        c->state->blocked_seconds += slept;
    }
}

static enum status meet(struct comm *c, const char *collective) {
    struct comm_shared_memory *memory = c->state->memory;
    if (atomic_load(&memory->loss) != 0) {
        return fail_lost(c, collective);
    }
    /* cannot change before this rank arrives */
    uint32_t generation = atomic_load_explicit(&memory->generation, memory_order_relaxed);
    bool last =
        atomic_fetch_add_explicit(&memory->arrived, 1, memory_order_acq_rel) + 1 == (uint32_t)memory->ranks;
    if (last) {
        /* relaxed: nobody arrives again before having seen the generation stored below */
        atomic_store_explicit(&memory->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&memory->generation, generation + 1, memory_order_release);
        wake_sleepers(&memory->generation);
    }
    /* Counted after the deed: a rank that stops between the two is behind, and is the one named. */
    atomic_fetch_add(&c->state->seat->arrivals, 1);
    if (last) {
        return STATUS_OK;
    }
    for (int look = 0; look < LOOKS_BEFORE_SLEEP; look++) {
        if (atomic_load_explicit(&memory->generation, memory_order_acquire) != generation) {
            return STATUS_OK;
        }
        sched_yield();
    }
    return wait_for_others(c, generation, collective);
}

/* ---- collectives ---- */

/* Where `rank` has the current piece. */
static char *window_of(const struct comm *c, int rank) {
    const struct comm_shared_memory *memory = c->state->memory;
    size_t half = c->state->seat->pieces % 2;
    return memory->windows + ((size_t)rank * 2 + half) * memory->window_bytes;
}

static void next_piece(struct comm *c) {
    c->state->seat->pieces++;
}

static enum status reduce_everywhere(
    struct comm *c, struct tensor data, int64_t count, enum comm_op op, const char *collective) {
    CHECK(comm_check_summable(data.dtype));
    int64_t size = (int64_t)dtype_bytes(data.dtype);
    int64_t most = (int64_t)c->state->memory->window_bytes / size;
    for (int64_t first = 0; first < count; first += most, next_piece(c)) {
        int64_t piece = min_i64(most, count - first);
        char *values = tensor_at(data, first).data;
        memcpy(window_of(c, c->rank), values, (size_t)(piece * size));
        CHECK(meet(c, collective));
        /* every rank reduces its share (whole cache lines) into rank 0's window */
        int64_t share = round_up(ceil_div(piece, c->ranks), CACHE_LINE / size);
        int64_t begin = min_i64(share * c->rank, piece), end = min_i64(begin + share, piece);
        for (int rank = 1; rank < c->ranks; rank++) {
            comm_combine(window_of(c, 0) + begin * size, window_of(c, rank) + begin * size, end - begin,
                data.dtype, op);
        }
        CHECK(meet(c, collective));
        memcpy(values, window_of(c, 0), (size_t)(piece * size));
    }
    return STATUS_OK;
}

static enum status shared_all_reduce(
    struct comm *c, struct tensor data, int64_t count, enum comm_op op, int slot) {
    (void)slot;
    return reduce_everywhere(c, data, count, op, "all-reduce");
}

static enum status shared_reduce_scatter(struct comm *c, struct tensor data, int64_t count, int slot) {
    (void)slot;
    CHECK(comm_check_summable(data.dtype));
    int64_t size = (int64_t)dtype_bytes(data.dtype);
    int64_t most = (int64_t)c->state->memory->window_bytes / c->ranks / size;
    for (int64_t first = 0; first < count; first += most, next_piece(c)) {
        int64_t piece = min_i64(most, count - first);
        for (int part = 0; part < c->ranks; part++) {
            memcpy(window_of(c, c->rank) + part * piece * size, tensor_at(data, part * count + first).data,
                (size_t)(piece * size));
        }
        CHECK(meet(c, "reduce-scatter"));
        char *sum = tensor_at(data, c->rank * count + first).data;
        memcpy(sum, window_of(c, 0) + c->rank * piece * size, (size_t)(piece * size));
        for (int rank = 1; rank < c->ranks; rank++) {
            comm_combine(sum, window_of(c, rank) + c->rank * piece * size, piece, data.dtype, COMM_SUM);
        }
    }
    return STATUS_OK;
}

/* Every rank's `bytes` bytes at parts + rank * bytes, to all. */
static enum status gather_parts(struct comm *c, char *parts, size_t bytes, const char *collective) {
    size_t most = c->state->memory->window_bytes;
    for (size_t first = 0; first < bytes; first += most, next_piece(c)) {
        size_t piece = bytes - first < most ? bytes - first : most;
        memcpy(window_of(c, c->rank), parts + (size_t)c->rank * bytes + first, piece);
        CHECK(meet(c, collective));
        for (int rank = 0; rank < c->ranks; rank++) {
            if (rank != c->rank) {
                memcpy(parts + (size_t)rank * bytes + first, window_of(c, rank), piece);
            }
        }
    }
    return STATUS_OK;
}

static enum status shared_all_gather(struct comm *c, struct tensor data, int64_t count, int slot) {
    (void)slot;
    return gather_parts(c, data.data, (size_t)count * dtype_bytes(data.dtype), "all-gather");
}

static enum status shared_broadcast(struct comm *c, struct tensor data, int64_t count, int root, int slot) {
    (void)slot;
    if (root < 0 || root >= c->ranks) {
        return fail("broadcast from rank %d of %d", root, c->ranks);
    }
    size_t bytes = (size_t)count * dtype_bytes(data.dtype);
    size_t most = c->state->memory->window_bytes;
    for (size_t first = 0; first < bytes; first += most, next_piece(c)) {
        size_t piece = bytes - first < most ? bytes - first : most;
        char *values = (char *)data.data + first;
        if (c->rank == root) {
            memcpy(window_of(c, root), values, piece);
        }
        CHECK(meet(c, "broadcast"));
        if (c->rank != root) {
            memcpy(values, window_of(c, root), piece);
        }
    }
    return STATUS_OK;
}

static enum status shared_host_all_reduce(struct comm *c, double *values, int count, enum comm_op op) {
    struct tensor data = {values, DTYPE_F64};
    return reduce_everywhere(c, data, count, op, "host all-reduce");
}

static enum status shared_host_all_gather(struct comm *c, void *out, const void *in, size_t bytes) {
    memmove((char *)out + (size_t)c->rank * bytes, in, bytes);
    return gather_parts(c, out, bytes, "host all-gather");
}

static enum status shared_barrier(struct comm *c) {
    return meet(c, "barrier");
}

static void shared_tell_progress(struct comm *c, uint64_t collectives) {
    atomic_store(&c->state->seat->collectives, collectives);
}

static enum status shared_check_peers(struct comm *c) {
    struct comm_shared_memory *memory = c->state->memory;
    uint64_t started = atomic_load(&c->state->seat->collectives);
    for (int rank = 0; rank < memory->ranks; rank++) {
        const struct seat *seat = &memory->seats[rank];
        if (atomic_load(&seat->left) && atomic_load(&seat->collectives) < started) {
            struct comm_loss died = {COMM_LOSS_DIED, rank, 0};
            comm_shared_memory_mark_lost(memory, died);
        }
    }
    if (atomic_load(&memory->loss) != 0) {
        return fail_lost(c, "a collective of the GPUs");
    }
    return check_parent(c, "a collective of the GPUs");
}

static enum status shared_report_stall(struct comm *c, double seconds) {
    struct comm_shared_memory *memory = c->state->memory;
    struct comm_loss loss = {COMM_LOSS_STUCK, c->rank, seconds};
    uint64_t fewest = atomic_load(&c->state->seat->collectives);
    for (int rank = 0; rank < memory->ranks; rank++) {
        uint64_t started = atomic_load(&memory->seats[rank].collectives);
        if (started < fewest) {
            fewest = started;
            loss.kind = COMM_LOSS_LATE;
            loss.rank = rank;
        }
    }
    comm_shared_memory_mark_lost(memory, loss);
    return fail_lost(c, "a collective of the GPUs");
}

static double shared_blocked_ms(struct comm *c) {
    double milliseconds = c->state->blocked_seconds * 1e3;
    c->state->blocked_seconds = 0;
    return milliseconds;
}

static void shared_be_patient(struct comm *c, double seconds) {
    c->state->patience_seconds = seconds;
}

static void shared_abort(struct comm *c) {
    struct comm_loss failed = {COMM_LOSS_FAILED, c->rank, 0};
    comm_shared_memory_mark_lost(c->state->memory, failed);
}

static void shared_free(struct comm *c) {
    atomic_store(&c->state->seat->left, true);
    free(c->state);
    free(c);
}

enum status comm_shared_create(
    struct comm **out, struct comm_shared_memory *memory, int rank, double timeout_seconds) {
    *out = NULL;
    if (rank < 0 || rank >= memory->ranks) {
        return fail("rank %d of %d: must be 0 to %d", rank, memory->ranks, memory->ranks - 1);
    }
    struct comm_state *state;
    CHECK(ALLOCATE(state, 1));
    enum status status = ALLOCATE(*out, 1);
    if (status != STATUS_OK) {
        free(state);
        return status;
    }
    *state = (struct comm_state){
        .memory = memory,
        .seat = &memory->seats[rank],
        .timeout_seconds = timeout_seconds,
        .parent = getppid(),
    };
    **out = (struct comm){
        .rank = rank,
        .ranks = memory->ranks,
        .state = state,
        .all_reduce = shared_all_reduce,
        .reduce_scatter = shared_reduce_scatter,
        .all_gather = shared_all_gather,
        .broadcast = shared_broadcast,
        .wait = comm_no_wait,
        .host_all_reduce = shared_host_all_reduce,
        .host_all_gather = shared_host_all_gather,
        .barrier = shared_barrier,
        .tell_progress = shared_tell_progress,
        .check_peers = shared_check_peers,
        .report_stall = shared_report_stall,
        .blocked_ms = shared_blocked_ms,
        .running_ms = comm_no_ms,
        .be_patient = shared_be_patient,
        .abort = shared_abort,
        .free = shared_free,
    };
    return STATUS_OK;
}
