/* Collectives between processes that met over TCP (rendezvous.c), rank 0 in the middle of a star. On the CPU they carry
   everything; beside NCCL only the ranks' small decisions, and the news of a loss.

   Every message is a frame: its kind and size, then so many bytes. In a collective the others send a piece of theirs,
   rank 0 puts the pieces together and sends each what it is to have; so the two ends of a connection never both wait to
   send. Large data goes piece by piece.

   Losses. A connection that ends without a farewell is a rank that died. Rank 0 tells all who was lost first, and every
   rank returns that from what it does next. A communicator beside this one (comm_nccl.cu) whose collective does not end
   reports it to rank 0 with the number of collectives it has come to; shortly after the first report rank 0 decides: who
   came to the fewest is late. Who hears no decision takes rank 0 itself for late.

   Two threads may be here, the rank's and that communicator's watchdog; the lock is theirs, and is not held while the
   rank waits. Frames are in the machines' own byte order, which is the same on all. */
#include "comm.h"
#include "rendezvous.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { EXCHANGE_BYTES = 1 << 20, LEAST_PIECE_BYTES = 4096, CONTROL_BYTES = 16, LOOK_MS = 50 };
static const double DECISION_SECONDS = 2; /* from the first report of a stall, for the others to come in */
static const double ANSWER_SECONDS = 3;   /* that the others give rank 0 to say who was lost */

enum frame_kind { FRAME_DATA, FRAME_LOST, FRAME_STALL, FRAME_FAREWELL };

struct frame {
    uint32_t kind;
    uint32_t rank;  /* LOST: who */
    uint64_t bytes; /* that follow; of all but DATA: CONTROL_BYTES */
};

/* What the bytes of a frame that is not DATA are. */
union control {
    struct {
        uint32_t kind;
        double seconds;
    } lost;
    struct {
        uint64_t collectives;
        double seconds;
    } stall;
    char bytes[CONTROL_BYTES];
};

/* The other end of a connection. */
struct peer {
    int rank, file;
    bool farewell; /* it has said so: its end is no loss */
    struct frame head;
    size_t head_done, body_done;
    union control control;
    char *into; /* where DATA of `bytes` bytes is to go; NULL: none is wanted now */
    size_t bytes;
    bool stalled;
    uint64_t collectives; /* when it stalled */
};

struct comm_state {
    int rank, ranks;
    double timeout_seconds, patience_seconds;
    double blocked_seconds;
    size_t piece_bytes;
    char *pieces; /* [ranks][piece_bytes] */
    int *sockets;
    pthread_mutex_t lock;
    /* under the lock */
    int peer_count;
    struct peer *peers; /* rank 0: all others, by rank; the others: rank 0 */
    struct comm_loss loss;
    uint64_t collectives; /* of the communicator beside this one */
    bool stalled;         /* this rank's own report */
    double stall_seconds; /* the timeout that was over */
    double decide_at;     /* rank 0: when; 0: no report yet */
};

/* ---- losses; all under the lock ---- */

/* Best effort: a frame this small goes at once, or its receiver is lost as well. */
static void send_control(struct peer *p, enum frame_kind kind, uint32_t rank, const union control *control) {
    struct {
        struct frame head;
        union control control;
    } whole = {{kind, rank, CONTROL_BYTES}, *control};
    size_t done = 0;
    if (p->file >= 0) {
        socket_move(p->file, &whole, sizeof whole, &done, true);
    }
}

/* The first loss stays. Rank 0 passes it on, and any other tells rank 0: that it fails itself, or that it has waited for
   rank 0 in vain, which learns so why the others are gone when it comes to. */
static void lose(struct comm_state *s, struct comm_loss loss) {
    if (s->loss.kind != COMM_LOSS_NONE) {
        return;
    }
    s->loss = loss;
    union control control;
    memset(&control, 0, sizeof control);
    control.lost.kind = loss.kind;
    control.lost.seconds = loss.seconds;
    for (int i = 0; i < s->peer_count; i++) {
        send_control(&s->peers[i], FRAME_LOST, (uint32_t)loss.rank, &control);
    }
}

static void lose_connection(struct comm_state *s, struct peer *p) {
    close(p->file);
    p->file = -1;
    if (!p->farewell) {
        struct comm_loss died = {COMM_LOSS_DIED, p->rank, 0};
        lose(s, died);
    }
}

/* ---- receiving; all under the lock ---- */

static void heed(struct comm_state *s, struct peer *p) {
    struct comm_loss loss = {COMM_LOSS_FAILED, (int)p->head.rank, p->control.lost.seconds};
    switch (p->head.kind) {
    case FRAME_LOST:
        loss.kind = (enum comm_loss_kind)p->control.lost.kind;
        lose(s, loss);
        break;
    case FRAME_STALL:
        p->stalled = true;
        p->collectives = p->control.stall.collectives;
        s->stall_seconds = p->control.stall.seconds;
        s->decide_at = s->decide_at > 0 ? s->decide_at : time_seconds() + DECISION_SECONDS;
        break;
    default:
        p->farewell = true;
    }
}

/* Takes in what has come from the peer: frames of control in any case, data if it is wanted. */
static void hear(struct comm_state *s, struct peer *p) {
    while (p->file >= 0) {
        if (!socket_move(p->file, &p->head, sizeof p->head, &p->head_done, false)) {
            lose_connection(s, p);
            return;
        }
        bool data = p->head.kind == FRAME_DATA;
        if (p->head_done < sizeof p->head || (data && p->into == NULL)) {
            return;
        }
        size_t bytes = data ? p->bytes : CONTROL_BYTES;
        if (p->head.bytes != bytes || p->head.kind > FRAME_FAREWELL) {
            struct comm_loss failed = {COMM_LOSS_FAILED, p->rank, 0}; /* it is in another collective */
            lose(s, failed);
            return;
        }
        if (!socket_move(p->file, data ? p->into : p->control.bytes, bytes, &p->body_done, false)) {
            lose_connection(s, p);
            return;
        }
        if (p->body_done < bytes) {
            return;
        }
        p->head_done = 0;
        p->body_done = 0;
        if (data) {
            p->into = NULL;
            return;
        }
        heed(s, p);
    }
}

/* Rank 0, when all reports had time to come: who has come to the fewest collectives? */
static void decide(struct comm_state *s) {
    struct comm_loss loss = {COMM_LOSS_STUCK, 0, s->stall_seconds};
    uint64_t most = s->collectives, fewest = s->collectives;
    if (s->decide_at == 0 || time_seconds() < s->decide_at) {
        return;
    }
    for (int i = 0; i < s->peer_count; i++) {
        uint64_t started = s->peers[i].stalled ? s->peers[i].collectives : 0;
        most = started > most ? started : most;
        if (started < fewest) {
            fewest = started;
            loss.rank = s->peers[i].rank;
        }
    }
    if (fewest < most) {
        loss.kind = COMM_LOSS_LATE;
    }
    lose(s, loss);
}

static void hear_all(struct comm_state *s) {
    for (int i = 0; i < s->peer_count; i++) {
        struct peer *p = &s->peers[i];
        hear(s, p);
        if (p->file < 0 && p->into != NULL) { /* it said farewell, but was to come to this collective */
            struct comm_loss died = {COMM_LOSS_DIED, p->rank, 0};
            lose(s, died);
        }
    }
    decide(s);
}

static enum status lost_status(const struct comm *c, const char *collective) {
    return c->state->loss.kind == COMM_LOSS_NONE ? STATUS_OK : comm_fail_lost(c, c->state->loss, collective);
}

/* ---- waiting ---- */

static bool data_missing(const struct peer *p) {
    return p->into != NULL;
}

static int missing_rank(const struct comm_state *s) {
    for (int i = 0; i < s->peer_count; i++) {
        if (data_missing(&s->peers[i])) {
            return s->peers[i].rank;
        }
    }
    return -1;
}

/* Under the lock: the connections to wait for. */
static void list_missing(const struct comm_state *s, struct pollfd *files) {
    for (int i = 0; i < s->peer_count; i++) {
        int file = data_missing(&s->peers[i]) ? s->peers[i].file : -1;
        files[i] = (struct pollfd){.fd = file, .events = POLLIN};
    }
}

/* Until all data that is wanted has come. */
static enum status receive(struct comm *c, const char *collective) {
    struct comm_state *s = c->state;
    struct pollfd *files = NULL;
    double waited = 0, before = time_seconds();
    double timeout = s->timeout_seconds + s->patience_seconds;
    double patience = timeout + (c->rank == 0 ? 0 : ANSWER_SECONDS);
    CHECK(ALLOCATE(files, s->peer_count));
    for (;;) {
        pthread_mutex_lock(&s->lock);
        hear_all(s);
        int missing = missing_rank(s);
        if (missing >= 0 && waited >= patience) {
            struct comm_loss late = {COMM_LOSS_LATE, missing, timeout};
            lose(s, late);
        }
        enum status status = lost_status(c, collective);
        list_missing(s, files);
        pthread_mutex_unlock(&s->lock);
        if (status != STATUS_OK || missing < 0) {
            free(files);
            return status;
        }
        poll(files, (nfds_t)s->peer_count, LOOK_MS);
        s->blocked_seconds += time_seconds() - before;
        waited += comm_seconds_waited(&before);
    }
}

static void want(struct peer *p, void *into, size_t bytes) {
    p->into = into;
    p->bytes = bytes;
}

/* A whole frame of data; holds the lock, so that no other frame comes between. */
static enum status send_data(
    struct comm *c, struct peer *p, const void *data, size_t bytes, const char *collective) {
    struct comm_state *s = c->state;
    struct frame head = {FRAME_DATA, (uint32_t)c->rank, bytes};
    size_t head_done = 0, body_done = 0;
    double waited = 0, before = time_seconds();
    pthread_mutex_lock(&s->lock);
    while (s->loss.kind == COMM_LOSS_NONE && body_done < bytes + (bytes == 0)) {
        if (p->file < 0 || !socket_move(p->file, &head, sizeof head, &head_done, true) ||
            (head_done == sizeof head && !socket_move(p->file, (void *)data, bytes, &body_done, true))) {
            struct comm_loss died = {COMM_LOSS_DIED, p->rank, 0};
            hear(s, p); /* it may have told why */
            lose(s, died);
        } else if (head_done == sizeof head && body_done == bytes) {
            break;
        } else {
            struct pollfd file = {.fd = p->file, .events = POLLOUT};
            poll(&file, 1, LOOK_MS);
            waited += comm_seconds_waited(&before);
            if (waited >= s->timeout_seconds + s->patience_seconds) {
                struct comm_loss late = {COMM_LOSS_LATE, p->rank, s->timeout_seconds + s->patience_seconds};
                lose(s, late);
            }
        }
    }
    enum status status = lost_status(c, collective);
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* ---- the two halves of every collective ---- */

/* Rank 0 gets every rank's `bytes` bytes into pieces[ranks][bytes]. */
static enum status bring(struct comm *c, const void *own, size_t bytes, const char *collective) {
    struct comm_state *s = c->state;
    if (c->rank != 0) {
        return send_data(c, &s->peers[0], own, bytes, collective);
    }
    memmove(s->pieces, own, bytes);
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < s->peer_count; i++) {
        want(&s->peers[i], s->pieces + (size_t)s->peers[i].rank * bytes, bytes);
    }
    pthread_mutex_unlock(&s->lock);
    return receive(c, collective);
}

/* Every rank gets rank 0's `bytes` bytes into data. */
static enum status hand_out(struct comm *c, void *data, size_t bytes, const char *collective) {
    struct comm_state *s = c->state;
    if (c->rank != 0) {
        pthread_mutex_lock(&s->lock);
        want(&s->peers[0], data, bytes);
        pthread_mutex_unlock(&s->lock);
        return receive(c, collective);
    }
    for (int i = 0; i < s->peer_count; i++) {
        CHECK(send_data(c, &s->peers[i], data, bytes, collective));
    }
    return STATUS_OK;
}

/* Rank 0: pieces[0] becomes the sum of all. */
static void combine_pieces(struct comm *c, int64_t count, enum dtype dtype, enum comm_op op) {
    size_t bytes = (size_t)count * dtype_bytes(dtype);
    for (int rank = 1; rank < c->ranks && c->rank == 0; rank++) {
        comm_combine(c->state->pieces, c->state->pieces + (size_t)rank * bytes, count, dtype, op);
    }
}

/* ---- collectives ---- */

static int64_t most_elements(const struct comm *c, enum dtype dtype) {
    return (int64_t)(c->state->piece_bytes / dtype_bytes(dtype));
}

static enum status reduce_everywhere(
    struct comm *c, struct tensor data, int64_t count, enum comm_op op, const char *collective) {
    CHECK(comm_check_summable(data.dtype));
    int64_t most = most_elements(c, data.dtype);
    for (int64_t first = 0; first < count; first += most) {
        int64_t n = min_i64(most, count - first);
        void *values = tensor_at(data, first).data;
        size_t bytes = (size_t)n * dtype_bytes(data.dtype);
        CHECK(bring(c, values, bytes, collective));
        combine_pieces(c, n, data.dtype, op);
        if (c->rank == 0) {
            memcpy(values, c->state->pieces, bytes);
        }
        CHECK(hand_out(c, values, bytes, collective));
    }
    return STATUS_OK;
}

static enum status tcp_all_reduce(
    struct comm *c, struct tensor data, int64_t count, enum comm_op op, int slot) {
    (void)slot;
    return reduce_everywhere(c, data, count, op, "all-reduce");
}

/* The sum in rank 0's pieces[0] goes to its owner alone. */
static enum status deliver(struct comm *c, int owner, void *to, size_t bytes) {
    struct comm_state *s = c->state;
    if (c->rank == 0 && owner == 0) {
        memcpy(to, s->pieces, bytes);
        return STATUS_OK;
    }
    if (c->rank == 0) {
        return send_data(c, &s->peers[owner - 1], s->pieces, bytes, "reduce-scatter");
    }
    return c->rank == owner ? hand_out(c, to, bytes, "reduce-scatter") : STATUS_OK;
}

static enum status tcp_reduce_scatter(struct comm *c, struct tensor data, int64_t count, int slot) {
    (void)slot;
    CHECK(comm_check_summable(data.dtype));
    int64_t most = most_elements(c, data.dtype);
    for (int part = 0; part < c->ranks; part++) {
        for (int64_t first = 0; first < count; first += most) {
            int64_t n = min_i64(most, count - first);
            void *values = tensor_at(data, part * count + first).data;
            size_t bytes = (size_t)n * dtype_bytes(data.dtype);
            CHECK(bring(c, values, bytes, "reduce-scatter"));
            combine_pieces(c, n, data.dtype, COMM_SUM);
            CHECK(deliver(c, part, values, bytes));
        }
    }
    return STATUS_OK;
}

/* Every rank's `bytes` bytes at parts + rank * bytes, to all. */
static enum status gather_parts(struct comm *c, char *parts, size_t bytes, const char *collective) {
    struct comm_state *s = c->state;
    for (size_t first = 0; first < bytes; first += s->piece_bytes) {
        size_t n = bytes - first < s->piece_bytes ? bytes - first : s->piece_bytes;
        CHECK(bring(c, parts + (size_t)c->rank * bytes + first, n, collective));
        CHECK(hand_out(c, s->pieces, (size_t)c->ranks * n, collective));
        for (int rank = 0; rank < c->ranks; rank++) {
            memcpy(parts + (size_t)rank * bytes + first, s->pieces + (size_t)rank * n, n);
        }
    }
    return STATUS_OK;
}

static enum status tcp_all_gather(struct comm *c, struct tensor data, int64_t count, int slot) {
    (void)slot;
    return gather_parts(c, data.data, (size_t)count * dtype_bytes(data.dtype), "all-gather");
}

/* Through rank 0, as everything. */
static enum status tcp_broadcast(struct comm *c, struct tensor data, int64_t count, int root, int slot) {
    (void)slot;
    struct comm_state *s = c->state;
    size_t bytes = (size_t)count * dtype_bytes(data.dtype);
    if (root < 0 || root >= c->ranks) {
        return fail("broadcast from rank %d of %d", root, c->ranks);
    }
    if (root != 0 && c->rank == root) {
        CHECK(send_data(c, &s->peers[0], data.data, bytes, "broadcast"));
    } else if (root != 0 && c->rank == 0) {
        pthread_mutex_lock(&s->lock);
        want(&s->peers[root - 1], data.data, bytes);
        pthread_mutex_unlock(&s->lock);
        CHECK(receive(c, "broadcast"));
    }
    return hand_out(c, data.data, bytes, "broadcast");
}

static enum status tcp_host_all_reduce(struct comm *c, double *values, int count, enum comm_op op) {
    struct tensor data = {values, DTYPE_F64};
    return reduce_everywhere(c, data, count, op, "host all-reduce");
}

static enum status tcp_host_all_gather(struct comm *c, void *out, const void *in, size_t bytes) {
    memmove((char *)out + (size_t)c->rank * bytes, in, bytes);
    return gather_parts(c, out, bytes, "host all-gather");
}

static enum status tcp_barrier(struct comm *c) {
    double nothing = 0;
    struct tensor data = {&nothing, DTYPE_F64};
    return reduce_everywhere(c, data, 1, COMM_MAX, "barrier");
}

/* ---- for the communicator beside this one ---- */

static const char BESIDE[] = "a collective of the GPUs";

static void tcp_tell_progress(struct comm *c, uint64_t collectives) {
    pthread_mutex_lock(&c->state->lock);
    c->state->collectives = collectives;
    pthread_mutex_unlock(&c->state->lock);
}

static enum status tcp_check_peers(struct comm *c) {
    struct comm_state *s = c->state;
    if (pthread_mutex_trylock(&s->lock) != 0) {
        return STATUS_OK; /* the rank is sending; it will notice itself */
    }
    hear_all(s);
    enum status status = lost_status(c, BESIDE);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static enum status tcp_report_stall(struct comm *c, double seconds) {
    struct comm_state *s = c->state;
    double end = time_seconds() + ANSWER_SECONDS;
    pthread_mutex_lock(&s->lock);
    s->stall_seconds = seconds;
    if (c->rank == 0) {
        s->decide_at = s->decide_at > 0 ? s->decide_at : time_seconds() + DECISION_SECONDS;
    } else {
        union control control;
        memset(&control, 0, sizeof control);
        control.stall.collectives = s->collectives;
        control.stall.seconds = seconds;
        send_control(&s->peers[0], FRAME_STALL, (uint32_t)c->rank, &control);
    }
    while (s->loss.kind == COMM_LOSS_NONE && time_seconds() < end) {
        hear_all(s);
        pthread_mutex_unlock(&s->lock);
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000L}, NULL);
        pthread_mutex_lock(&s->lock);
    }
    struct comm_loss silent = {COMM_LOSS_LATE, 0, seconds};
    lose(s, silent);
    enum status status = lost_status(c, BESIDE);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static double tcp_blocked_ms(struct comm *c) {
    double milliseconds = c->state->blocked_seconds * 1e3;
    c->state->blocked_seconds = 0;
    return milliseconds;
}

/* ---- life ---- */

static void tcp_be_patient(struct comm *c, double seconds) {
    c->state->patience_seconds = seconds;
}

static void tcp_abort(struct comm *c) {
    struct comm_loss failed = {COMM_LOSS_FAILED, c->rank, 0};
    pthread_mutex_lock(&c->state->lock);
    lose(c->state, failed);
    pthread_mutex_unlock(&c->state->lock);
}

static void free_state(struct comm_state *s) {
    union control nothing;
    memset(&nothing, 0, sizeof nothing);
    for (int i = 0; i < s->peer_count; i++) {
        if (s->loss.kind == COMM_LOSS_NONE) {
            send_control(&s->peers[i], FRAME_FAREWELL, (uint32_t)s->rank, &nothing);
        }
        if (s->peers[i].file >= 0) {
            close(s->peers[i].file);
        }
    }
    pthread_mutex_destroy(&s->lock);
    free(s->peers);
    free(s->sockets);
    free(s->pieces);
    free(s);
}

static void tcp_free(struct comm *c) {
    free_state(c->state);
    free(c);
}

/* The sockets become the peers', also after a failure. */
static enum status meet(struct comm_state *s, const struct rendezvous_options *meeting) {
    CHECK(ALLOCATE(s->sockets, s->ranks));
    CHECK(ALLOCATE(s->peers, s->ranks));
    size_t piece = (size_t)(EXCHANGE_BYTES / s->ranks) / LEAST_PIECE_BYTES * LEAST_PIECE_BYTES;
    s->piece_bytes = piece > LEAST_PIECE_BYTES ? piece : LEAST_PIECE_BYTES;
    CHECK(ALLOCATE(s->pieces, (size_t)s->ranks * s->piece_bytes));
    for (int rank = 0; rank < s->ranks; rank++) {
        s->sockets[rank] = -1;
    }
    enum status status = rendezvous_meet(s->sockets, meeting);
    for (int rank = 0; rank < s->ranks; rank++) {
        if (s->rank == 0 ? rank > 0 : rank == 0) {
            s->peers[s->peer_count++] = (struct peer){.rank = rank, .file = s->sockets[rank]};
        }
    }
    return status;
}

enum status comm_tcp_create(struct comm **out, const struct rendezvous_options *meeting) {
    struct comm *c;
    struct comm_state *s;
    *out = NULL;
    if (meeting->ranks < 2 || meeting->ranks > COMM_MAX_RANKS || meeting->rank < 0 ||
        meeting->rank >= meeting->ranks) {
        return fail("rank %d of %d: there must be 2 to %d, counted from 0", meeting->rank, meeting->ranks,
            COMM_MAX_RANKS);
    }
    CHECK(ALLOCATE(s, 1));
    s->rank = meeting->rank;
    s->ranks = meeting->ranks;
    s->timeout_seconds = meeting->timeout_seconds;
    pthread_mutex_init(&s->lock, NULL);
    enum status status = meet(s, meeting);
    if (status == STATUS_OK) {
        status = ALLOCATE(c, 1);
    }
    if (status != STATUS_OK) {
        free_state(s);
        return status;
    }
    *c = (struct comm){
        .rank = s->rank,
        .ranks = s->ranks,
        .state = s,
        .all_reduce = tcp_all_reduce,
        .reduce_scatter = tcp_reduce_scatter,
        .all_gather = tcp_all_gather,
        .broadcast = tcp_broadcast,
        .wait = comm_no_wait,
        .host_all_reduce = tcp_host_all_reduce,
        .host_all_gather = tcp_host_all_gather,
        .barrier = tcp_barrier,
        .tell_progress = tcp_tell_progress,
        .check_peers = tcp_check_peers,
        .report_stall = tcp_report_stall,
        .blocked_ms = tcp_blocked_ms,
        .running_ms = comm_no_ms,
        .be_patient = tcp_be_patient,
        .abort = tcp_abort,
        .free = tcp_free,
    };
    *out = c;
    return STATUS_OK;
}
