/* Collectives over shared memory and over TCP, by real processes: results against sums worked out here in double
   precision, bits across collectives and piece sizes, and what the ranks are told when one of them dies,
   stops or gives up. test_comm_nccl.sh builds it with NCCL as nccl_on_cpu.h has it, and then it tests what is beside
   shared memory there. */
#include "llmc/comm.h"
#include "llmc/random.h"
#include "llmc/rendezvous.h"
#include "port.h"
#include "test.h"
#ifdef NCCL_ON_CPU
#include "nccl_on_cpu.h"
#endif

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 4 };

static enum { SHARED_MEMORY, TCP, NCCL } transport; /* every test is run with each that is there */

/* ---- ranks as child processes ---- */

/* What a rank leaves behind for the test to look at; in shared memory. */
struct report {
    enum status status;
    char message[256];
    double seconds;
    int failed_expectations;
    int rounds;
};

struct team {
    int ranks;
    double timeout_seconds;
    struct comm_shared_memory *memory;
    struct report *reports; /* [MAX_RANKS] */
    pid_t process[MAX_RANKS];
    int ending[MAX_RANKS];
    int port_holder;
};

#ifdef NCCL_ON_CPU
static bool gpu_in_background; /* else what it is given has ended when the call returns */
static struct backend *gpu;    /* the rank's own */

static enum status join_nccl(struct comm **out, const struct team *team, int rank) {
    struct comm_nccl_options options = {team->timeout_seconds, 0, true};
    struct comm *host;
    gpu = cpu_gpu_create(rank, gpu_in_background);
    CHECK(comm_shared_create(&host, team->memory, rank, team->timeout_seconds));
    return comm_nccl_create(out, host, gpu, &options);
}
#endif

static enum status join(struct comm **out, const struct team *team, int rank, int port) {
    if (transport == SHARED_MEMORY) {
        return comm_shared_create(out, team->memory, rank, team->timeout_seconds);
    }
    if (team->ranks == 1) {
        return comm_single_create(out);
    }
#ifdef NCCL_ON_CPU
    if (transport == NCCL) {
        return join_nccl(out, team, rank);
    }
#endif
    struct rendezvous_options meeting = {
        "127.0.0.1", port, "test", rank, team->ranks, team->timeout_seconds, NULL, false};
    return comm_tcp_create(out, &meeting);
}

typedef enum status (*rank_work)(struct comm *c, struct report *report, const void *context);

static void team_start(struct team *team, int ranks, size_t window_bytes, double timeout_seconds,
    rank_work work, const void *context) {
    team->ranks = ranks;
    team->timeout_seconds = timeout_seconds;
    EXPECT(comm_shared_memory_create(&team->memory, ranks, window_bytes) == STATUS_OK);
    size_t bytes = MAX_RANKS * sizeof(struct report);
    team->reports = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int port = hold_port(&team->port_holder);
    fflush(stdout);
    for (int rank = 0; rank < ranks; rank++) {
        team->process[rank] = fork();
        if (team->process[rank] == 0) {
            struct report *report = &team->reports[rank];
            struct comm *c;
            test_failures_in_this_ = 0;
            double start = time_seconds();
            EXPECT(join(&c, team, rank, port) == STATUS_OK);
            report->status = work(c, report, context);
            report->seconds = time_seconds() - start;
            if (report->status != STATUS_OK) {
                snprintf(report->message, sizeof report->message, "%s", error_message());
            }
            report->failed_expectations = test_failures_in_this_;
            c->free(c);
            fflush(stdout);
            _exit(0);
        }
    }
}

/* Waits for all ranks, tells the others of one that was killed, as a supervisor does. */
static void team_wait(struct team *team) {
    for (int left = team->ranks; left > 0; left--) {
        int ending;
        pid_t process = wait(&ending);
        for (int rank = 0; rank < team->ranks; rank++) {
            if (team->process[rank] == process) {
                team->ending[rank] = ending;
                test_failures_in_this_ += team->reports[rank].failed_expectations;
                if (ending != 0) {
                    struct comm_loss died = {COMM_LOSS_DIED, rank, 0};
                    comm_shared_memory_mark_lost(team->memory, died);
                }
            }
        }
    }
}

static void team_free(struct team *team) {
    close(team->port_holder);
    comm_shared_memory_free(team->memory);
    munmap(team->reports, MAX_RANKS * sizeof(struct report));
}

/* All ranks must succeed. */
static void run_team(int ranks, size_t window_bytes, rank_work work, const void *context) {
    struct team team;
    team_start(&team, ranks, window_bytes, 30, work, context);
    team_wait(&team);
    for (int rank = 0; rank < ranks; rank++) {
        EXPECT(team.ending[rank] == 0);
        EXPECT(team.reports[rank].status == STATUS_OK);
        EXPECT_STRING(team.reports[rank].message, "");
    }
    team_free(&team);
}

/* ---- data that every process can work out for every rank ---- */

/* Sizes from 1e-4 to 1e4, so that the order of a sum shows in its bits. */
static double element(int rank, int64_t index) {
    double normal = random_normal(7, (uint64_t)rank, (uint64_t)index);
    return normal * pow(10, (double)((index * 31 + rank * 17) % 9 - 4));
}

static double exact_sum(int ranks, int64_t index) {
    double sum = 0;
    for (int rank = 0; rank < ranks; rank++) {
        sum += element(rank, index);
    }
    return sum;
}

static float rank_order_sum(int ranks, int64_t index) {
    float sum = (float)element(0, index);
    for (int rank = 1; rank < ranks; rank++) {
        sum += (float)element(rank, index);
    }
    return sum;
}

static double largest_magnitude(int ranks, int64_t index) {
    double largest = 0;
    for (int rank = 0; rank < ranks; rank++) {
        largest = fmax(largest, fabs(element(rank, index)));
    }
    return largest;
}

static struct tensor new_tensor(enum dtype dtype, int64_t count) {
    struct tensor t = {calloc((size_t)count + 1, dtype_bytes(dtype)), dtype};
    return t;
}

static double get(struct tensor t, int64_t index) {
    return t.dtype == DTYPE_F32 ? (double)((float *)t.data)[index] : ((double *)t.data)[index];
}

static void set(struct tensor t, int64_t index, double value) {
    if (t.dtype == DTYPE_F32) {
        ((float *)t.data)[index] = (float)value;
    } else {
        ((double *)t.data)[index] = value;
    }
}

static struct tensor own_elements(const struct comm *c, enum dtype dtype, int64_t count) {
    struct tensor t = new_tensor(dtype, count);
    for (int64_t i = 0; i < count; i++) {
        set(t, i, element(c->rank, i));
    }
    return t;
}

/* Every combination of 1 to 4 ranks, counts around the pieces' sizes, and windows from one cache line up. */
static void with_ranks_and_windows(rank_work work) {
    static const size_t windows[] = {1, 1000, 1 << 20};
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        for (int i = 0; i < (transport == SHARED_MEMORY ? 3 : 1); i++) {
            run_team(ranks, windows[i], work, NULL);
        }
    }
}
static const int64_t counts[] = {0, 1, 3, 16, 63, 64, 65, 257, 1001};
enum { COUNTS = sizeof counts / sizeof counts[0] };
static const enum dtype float_types[2] = {DTYPE_F32, DTYPE_F64};

/* Until the slot's collective is done. A rank that is lost meanwhile shows in the next call. */
static enum status complete(struct comm *c, int slot) {
    CHECK(c->wait(c, slot));
    return c->wait(c, slot);
}

/* ---- results ---- */

static enum status all_reduce_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    for (int type = 0; type < 2; type++) {
        for (int k = 0; k < COUNTS; k++) {
            enum dtype dtype = float_types[type];
            double epsilon = dtype == DTYPE_F32 ? 1e-6 : 1e-15;
            struct tensor data = own_elements(c, dtype, counts[k]);
            set(data, counts[k], 77); /* a guard behind the last element */
            CHECK(c->all_reduce(c, data, counts[k], COMM_SUM, 0));
            CHECK(complete(c, 0));
            for (int64_t i = 0; i < counts[k]; i++) {
                EXPECT_NEAR(
                    get(data, i), exact_sum(c->ranks, i), epsilon * largest_magnitude(c->ranks, i) * 4);
            }
            EXPECT(get(data, counts[k]) == 77);
            free(data.data);
        }
    }
    return STATUS_OK;
}
static void all_reduce_gives_the_sum_at_odd_counts_in_any_pieces(void) {
    with_ranks_and_windows(all_reduce_work);
}

static enum status extremes_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    for (int type = 0; type < 2; type++) {
        struct tensor largest = own_elements(c, float_types[type], 257);
        struct tensor smallest = own_elements(c, float_types[type], 257);
        int nan_rank = c->ranks / 2;
        if (c->rank == nan_rank) {
            set(largest, 100, NAN);
            set(smallest, 100, NAN);
        }
        CHECK(c->all_reduce(c, largest, 257, COMM_MAX, 0));
        CHECK(c->all_reduce(c, smallest, 257, COMM_MIN, 1));
        CHECK(complete(c, 0));
        CHECK(complete(c, 1));
        for (int64_t i = 0; i < 257; i++) {
            double most = -INFINITY, least = INFINITY;
            for (int rank = 0; rank < c->ranks; rank++) {
                most = fmax(most, element(rank, i));
                least = fmin(least, element(rank, i));
            }
            if (i == 100) {
                EXPECT(isnan(get(largest, i)) && isnan(get(smallest, i)));
            } else if (float_types[type] == DTYPE_F32) {
                EXPECT(get(largest, i) == (double)(float)most && get(smallest, i) == (double)(float)least);
            } else {
                EXPECT(get(largest, i) == most && get(smallest, i) == least);
            }
        }
        free(largest.data);
        free(smallest.data);
    }
    return STATUS_OK;
}
static void all_reduce_gives_maxima_and_minima_and_keeps_nan(void) {
    with_ranks_and_windows(extremes_work);
}

static enum status reduce_scatter_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    for (int k = 0; k < COUNTS; k++) {
        int64_t count = counts[k];
        struct tensor data = own_elements(c, DTYPE_F64, count * c->ranks);
        CHECK(c->reduce_scatter(c, data, count, 1));
        CHECK(complete(c, 1));
        for (int64_t i = c->rank * count; i < (c->rank + 1) * count; i++) {
            EXPECT_NEAR(get(data, i), exact_sum(c->ranks, i), 4e-15 * largest_magnitude(c->ranks, i));
        }
        free(data.data);
    }
    return STATUS_OK;
}
static void reduce_scatter_leaves_every_rank_its_part_of_the_sum(void) {
    with_ranks_and_windows(reduce_scatter_work);
}

static enum status all_gather_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    for (int k = 0; k < COUNTS; k++) {
        /* 16-bit elements: moving needs no arithmetic */
        int64_t count = counts[k];
        struct tensor data = new_tensor(DTYPE_BF16, count * c->ranks);
        uint16_t *values = data.data;
        for (int64_t i = 0; i < count; i++) {
            values[c->rank * count + i] = (uint16_t)(c->rank * 10000 + i);
        }
        CHECK(c->all_gather(c, data, count, 0));
        CHECK(complete(c, 0));
        for (int rank = 0; rank < c->ranks; rank++) {
            for (int64_t i = 0; i < count; i++) {
                EXPECT(values[rank * count + i] == rank * 10000 + i);
            }
        }
        EXPECT(values[c->ranks * count] == 0);
        free(data.data);
    }
    return STATUS_OK;
}
static void all_gather_gives_every_rank_all_parts(void) {
    with_ranks_and_windows(all_gather_work);
}

static enum status broadcast_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    for (int root = 0; root < c->ranks; root++) {
        for (int k = 0; k < COUNTS; k++) {
            struct tensor data = own_elements(c, DTYPE_F64, counts[k]);
            CHECK(c->broadcast(c, data, counts[k], root, 0));
            CHECK(complete(c, 0));
            for (int64_t i = 0; i < counts[k]; i++) {
                EXPECT(get(data, i) == element(root, i));
            }
            EXPECT(get(data, counts[k]) == 0);
            free(data.data);
        }
    }
    return STATUS_OK;
}
static void broadcast_gives_every_rank_the_roots_values(void) {
    with_ranks_and_windows(broadcast_work);
}

static enum status host_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    int n = c->ranks;
    double values[3] = {c->rank + 1, -c->rank, 0.5};
    CHECK(c->host_all_reduce(c, values, 3, COMM_SUM));
    EXPECT(values[0] == n * (n + 1) / 2 && values[1] == -n * (n - 1) / 2 && values[2] == 0.5 * n);
    double most = c->rank, least = c->rank;
    CHECK(c->host_all_reduce(c, &most, 1, COMM_MAX));
    CHECK(c->host_all_reduce(c, &least, 1, COMM_MIN));
    EXPECT(most == n - 1 && least == 0);
    char own[13], all[MAX_RANKS * 13];
    memset(own, 'a' + c->rank, sizeof own);
    CHECK(c->host_all_gather(c, all, own, sizeof own));
    for (int i = 0; i < n * 13; i++) {
        EXPECT(all[i] == 'a' + i / 13);
    }
    return c->barrier(c);
}
static void host_collectives_agree_on_every_rank(void) {
    with_ranks_and_windows(host_work);
}

/* More than goes in one piece over TCP, and not a multiple of it. */
static enum status large_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    enum { PART = 90001 };
    int64_t count = PART * c->ranks;
    struct tensor sums = own_elements(c, DTYPE_F64, count), moved = own_elements(c, DTYPE_F64, PART);
    CHECK(c->reduce_scatter(c, sums, PART, 0));
    CHECK(c->all_gather(c, sums, PART, 0));
    CHECK(c->broadcast(c, moved, PART, c->ranks - 1, 1));
    CHECK(complete(c, 0));
    CHECK(complete(c, 1));
    for (int64_t i = 0; i < count; i += 97) {
        EXPECT_NEAR(get(sums, i), exact_sum(c->ranks, i), 4e-15 * largest_magnitude(c->ranks, i));
        EXPECT(get(moved, i % PART) == element(c->ranks - 1, i % PART));
    }
    free(sums.data);
    free(moved.data);
    return STATUS_OK;
}
static void large_data_goes_in_pieces(void) {
    run_team(3, 1 << 16, large_work, NULL);
}

/* Halves and quarters, which bf16 holds exactly. */
static enum status bf16_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    struct tensor data = new_tensor(DTYPE_BF16, 300);
    uint16_t *bits = data.data;
    for (int i = 0; i < 300; i++) {
        bits[i] = float_to_bf16((float)(c->rank + 1) * (float)(i % 8) / 4);
    }
    CHECK(c->all_reduce(c, data, 300, COMM_SUM, 0));
    CHECK(complete(c, 0));
    for (int i = 0; i < 300; i++) {
        EXPECT(bf16_to_float(bits[i]) == (float)(c->ranks * (c->ranks + 1) / 2) * (float)(i % 8) / 4);
    }
    free(data.data);
    return STATUS_OK;
}
static void sums_of_bf16_are_right(void) {
    with_ranks_and_windows(bf16_work);
}

/* ---- bits ---- */

static enum status same_bits_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    enum { PART = 1237 };
    int64_t count = PART * c->ranks;
    struct tensor reduced = own_elements(c, DTYPE_F32, count), scattered = own_elements(c, DTYPE_F32, count);
    CHECK(c->all_reduce(c, reduced, count, COMM_SUM, 0));
    CHECK(c->reduce_scatter(c, scattered, PART, 1));
    CHECK(c->all_gather(c, scattered, PART, 2));
    CHECK(complete(c, 0));
    CHECK(complete(c, 2));
    EXPECT(memcmp(reduced.data, scattered.data, (size_t)count * sizeof(float)) == 0);
    for (int64_t i = 0; i < count; i++) {
        EXPECT(((float *)reduced.data)[i] == rank_order_sum(c->ranks, i));
    }
    free(reduced.data);
    free(scattered.data);
    return STATUS_OK;
}
static void all_reduce_and_reduce_scatter_add_in_rank_order_and_give_the_same_bits(void) {
    with_ranks_and_windows(same_bits_work);
}

/* ---- one rank alone ---- */

static void a_single_rank_keeps_its_data(void) {
    struct comm *c;
    EXPECT(comm_single_create(&c) == STATUS_OK);
    EXPECT(c->rank == 0 && c->ranks == 1);
    float values[3] = {1, 2, 3};
    struct tensor data = {values, DTYPE_F32};
    EXPECT(c->all_reduce(c, data, 3, COMM_SUM, 0) == STATUS_OK);
    EXPECT(c->reduce_scatter(c, data, 3, 0) == STATUS_OK);
    EXPECT(c->all_gather(c, data, 3, 0) == STATUS_OK);
    EXPECT(c->broadcast(c, data, 3, 0, 0) == STATUS_OK);
    EXPECT(c->wait(c, 0) == STATUS_OK && c->barrier(c) == STATUS_OK);
    EXPECT(values[0] == 1 && values[1] == 2 && values[2] == 3);
    double value = 5;
    char out[4] = "", in[4] = "abc";
    EXPECT(c->host_all_reduce(c, &value, 1, COMM_MAX) == STATUS_OK && value == 5);
    EXPECT(c->host_all_gather(c, out, in, 4) == STATUS_OK);
    EXPECT_STRING(out, "abc");
    comm_abort(c);
    comm_abort(NULL);
    c->free(c);
}

/* ---- bad calls ---- */

static enum status refusals_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    struct tensor data = new_tensor(DTYPE_I32, 8);
    EXPECT(c->all_reduce(c, data, 4, COMM_SUM, 0) == STATUS_ERROR);
    EXPECT_CONTAINS(error_message(), "I32");
    EXPECT(c->reduce_scatter(c, data, 4, 0) == STATUS_ERROR);
    EXPECT(c->broadcast(c, data, 4, 2, 0) == STATUS_ERROR);
    free(data.data);
    return fail("seen");
}
static void what_it_cannot_do_is_refused_in_words(void) {
    struct team team;
    team_start(&team, 2, 4096, 5, refusals_work, NULL);
    struct comm *c;
    EXPECT(comm_shared_create(&c, team.memory, 2, 5) == STATUS_ERROR);
    EXPECT_STRING(error_message(), "rank 2 of 2: must be 0 to 1");
    struct rendezvous_options meeting = {"127.0.0.1", 1, "", 2, 2, 1, NULL, false};
    EXPECT(comm_tcp_create(&c, &meeting) == STATUS_ERROR);
    EXPECT_STRING(error_message(), "rank 2 of 2: there must be 2 to 4096, counted from 0");
    team_wait(&team);
    EXPECT_STRING(team.reports[0].message, "seen");
    team_free(&team);
    struct comm_shared_memory *memory;
    EXPECT(comm_shared_memory_create(&memory, 0, 4096) == STATUS_ERROR);
    EXPECT(comm_shared_memory_create(&memory, COMM_MAX_RANKS + 1, 4096) == STATUS_ERROR);
}

/* ---- losses ---- */

/* Until a rank has done more than so many rounds, or has ended. */
static bool wait_for_rounds(const struct team *team, int rank, int rounds) {
    siginfo_t ended = {0};
    while (*(volatile int *)&team->reports[rank].rounds <= rounds && ended.si_pid == 0) {
        usleep(1000);
        waitid(P_PID, (id_t)team->process[rank], &ended, WEXITED | WNOHANG | WNOWAIT);
    }
    return ended.si_pid == 0;
}

static void wait_until_at_work(const struct team *team) {
    for (int rank = 0; rank < team->ranks; rank++) {
        EXPECT(wait_for_rounds(team, rank, 0));
    }
}

/* Collectives of all kinds until something goes wrong; sums are checked all the way. */
static enum status endless_work(struct comm *c, struct report *report, const void *context) {
    (void)context;
    struct tensor data = new_tensor(DTYPE_F32, 4000);
    for (;; report->rounds++) {
        for (int64_t i = 0; i < 4000; i++) {
            set(data, i, c->rank + report->rounds % 100);
        }
        double sum = c->ranks * (c->ranks - 1) / 2 + c->ranks * (report->rounds % 100);
        CHECK(c->all_reduce(c, data, 999, COMM_SUM, 0));
        CHECK(complete(c, 0));
        EXPECT(get(data, 0) == sum && get(data, 998) == sum);
        CHECK(c->reduce_scatter(c, data, 1000, 1));
        CHECK(c->all_gather(c, data, 1000, 2));
        CHECK(complete(c, 2));
        EXPECT(get(data, 998) == sum * c->ranks && get(data, 999) == sum);
        CHECK(c->broadcast(c, data, 500, report->rounds % c->ranks, 0));
        CHECK(complete(c, 0));
        CHECK(c->barrier(c));
    }
}

static void kill_each_rank_of(int ranks, uint64_t seed) {
    for (int victim = 0; victim < ranks; victim++) {
        struct team team;
        team_start(&team, ranks, 1024, 30, endless_work, NULL);
        wait_until_at_work(&team);
        usleep((useconds_t)(random_uniform(seed, 0, (uint64_t)(ranks * 10 + victim)) * 20000));
        kill(team.process[victim], SIGKILL);
        double start = time_seconds();
        team_wait(&team);
        EXPECT(time_seconds() - start < 5);
        char expected[64];
        snprintf(expected, sizeof expected, "rank %d died; rank ", victim);
        for (int rank = 0; rank < ranks; rank++) {
            if (rank == victim) {
                EXPECT(WIFSIGNALED(team.ending[rank]) && WTERMSIG(team.ending[rank]) == SIGKILL);
            } else {
                EXPECT(team.ending[rank] == 0);
                EXPECT(team.reports[rank].status == STATUS_PEER_LOST);
                EXPECT_CONTAINS(team.reports[rank].message, expected);
            }
        }
        team_free(&team);
    }
}
static void killing_any_rank_at_any_moment_ends_the_others_and_names_it(void) {
    uint64_t seed = (uint64_t)getpid();
    printf("    kill moments from seed %llu\n", (unsigned long long)seed);
    for (uint64_t round = 0; round < 3; round++) {
        for (int ranks = 2; ranks <= MAX_RANKS; ranks++) {
            kill_each_rank_of(ranks, seed + round);
        }
    }
}

/* A process that is stopped stops its simulated GPU in the midst of a collective: over NCCL it may be that all have come to
   it, and none of them is late. */
static bool told_late(const char *message, int rank) {
    char late[64];
    snprintf(late, sizeof late, "rank %d did not arrive within 1 s; rank ", rank);
    return strstr(message, late) != NULL ||
           (transport == NCCL &&
               strstr(message, "all ranks came to a collective that did not end within 1 s") != NULL);
}

static void stop_and_continue(int stopped) {
    struct team team;
    team_start(&team, 3, 1024, 1, endless_work, NULL);
    wait_until_at_work(&team);
    kill(team.process[stopped], SIGSTOP);
    double start = time_seconds();
    int ending;
    for (int rank = 0; rank < 3; rank++) {
        if (rank != stopped) {
            EXPECT(waitpid(team.process[rank], &ending, 0) == team.process[rank]);
            EXPECT(team.reports[rank].status == STATUS_PEER_LOST);
            EXPECT(told_late(team.reports[rank].message, stopped));
        }
    }
    double seconds = time_seconds() - start;
    EXPECT(seconds > 0.9 && seconds < 6);
    struct comm_loss loss = comm_shared_memory_loss(team.memory);
    EXPECT(transport != SHARED_MEMORY ||
           (loss.kind == COMM_LOSS_LATE && loss.rank == stopped && loss.seconds == 1));
    /* come back to life, it learns that the others have given it up */
    kill(team.process[stopped], SIGCONT);
    EXPECT(waitpid(team.process[stopped], &ending, 0) == team.process[stopped]);
    EXPECT(team.reports[stopped].status == STATUS_PEER_LOST);
    EXPECT(told_late(team.reports[stopped].message, stopped));
    team_free(&team);
}

static void a_stopped_rank_is_late_after_the_timeout_and_learns_it_later(void) {
    stop_and_continue(0);
    stop_and_continue(1);
}

static enum status slow_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    for (int i = 0; i < 3; i++) {
        if (c->rank == i) {
            usleep(750000);
        }
        CHECK(c->barrier(c));
    }
    return STATUS_OK;
}
static void a_slow_rank_is_waited_for(void) {
    struct team team;
    team_start(&team, 3, 1024, 2, slow_work, NULL);
    team_wait(&team);
    for (int rank = 0; rank < 3; rank++) {
        EXPECT(team.reports[rank].status == STATUS_OK && team.reports[rank].seconds > 2.2);
    }
    team_free(&team);
}

/* As under Ctrl-Z and fg: time in which a waiting rank was stopped itself is nobody's delay. */
static void a_pause_of_all_ranks_is_nobodys_delay(void) {
    struct team team;
    team_start(&team, 2, 1024, 0.5, endless_work, NULL);
    wait_until_at_work(&team);
    kill(team.process[0], SIGSTOP);
    kill(team.process[1], SIGSTOP);
    usleep(1000000);
    int rounds = team.reports[0].rounds;
    kill(team.process[0], SIGCONT);
    kill(team.process[1], SIGCONT);
    EXPECT(wait_for_rounds(&team, 0, rounds));
    kill(team.process[0], SIGKILL);
    team_wait(&team);
    EXPECT_CONTAINS(team.reports[1].message, "rank 0 died");
    team_free(&team);
}

static enum status failing_work(struct comm *c, struct report *report, const void *context) {
    CHECK(c->barrier(c));
    if (c->rank == 1) {
        comm_abort(c);
        return fail("disk full");
    }
    return endless_work(c, report, context);
}
static void a_rank_that_aborts_ends_the_others_at_once(void) {
    struct team team;
    team_start(&team, 4, 1024, 30, failing_work, NULL);
    team_wait(&team);
    for (int rank = 0; rank < 4; rank++) {
        EXPECT(team.reports[rank].seconds < 5);
        EXPECT(team.reports[rank].status == (rank == 1 ? STATUS_ERROR : STATUS_PEER_LOST));
        EXPECT_CONTAINS(team.reports[rank].message, rank == 1 ? "disk full" : "rank 1 failed; rank ");
    }
    if (transport != TCP) {
        struct comm_loss later = {COMM_LOSS_DIED, 2, 0};
        EXPECT(!comm_shared_memory_mark_lost(team.memory, later));
        EXPECT(comm_shared_memory_loss(team.memory).rank == 1);
    }
    team_free(&team);
}

static enum status leaving_work(struct comm *c, struct report *report, const void *context) {
    CHECK(c->barrier(c));
    return c->rank == 2 ? STATUS_OK : endless_work(c, report, context);
}

static void a_rank_that_leaves_before_the_others_is_not_waited_for(void) {
    struct team team;
    team_start(&team, 3, 1024, 30, leaving_work, NULL);
    team_wait(&team);
    EXPECT(team.reports[2].status == STATUS_OK);
    for (int rank = 0; rank < 2; rank++) {
        EXPECT(team.reports[rank].status == STATUS_PEER_LOST && team.reports[rank].seconds < 5);
        EXPECT_CONTAINS(team.reports[rank].message, "rank 2 died");
    }
    team_free(&team);
}

static enum status done_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    struct tensor data = new_tensor(DTYPE_F32, 1);
    for (int i = 0; i < 3; i++) {
        CHECK(c->all_reduce(c, data, 1, COMM_SUM, i));
        CHECK(complete(c, i));
    }
    free(data.data);
    if (c->rank != 2) {
        usleep(300000); /* and a watchdog looks meanwhile */
    }
    return c->check_peers(c);
}
static void a_rank_that_leaves_when_all_is_done_is_no_loss(void) {
    run_team(3, 1024, done_work, NULL);
}

/* ---- what a communicator beside this one asks ---- */

/* Rank 1 has started fewer collectives than the others and says nothing; with `context` all have started as many. */
static enum status stalled_work(struct comm *c, struct report *report, const void *context) {
    bool behind = c->rank == 1 && context == NULL;
    c->tell_progress(c, behind ? 9 : 10);
    CHECK(c->barrier(c));
    CHECK(c->check_peers(c));
    report->rounds = 1;
    if (!behind) {
        return c->report_stall(c, 4);
    }
    for (;;) {
        CHECK(c->check_peers(c));
        usleep(10000);
    }
}
static void of_a_stalled_collective_the_rank_that_started_fewest_is_told_late(void) {
    struct team team;
    team_start(&team, 3, 1024, 30, stalled_work, NULL);
    team_wait(&team);
    for (int rank = 0; rank < 3; rank++) {
        EXPECT(team.reports[rank].status == STATUS_PEER_LOST && team.reports[rank].seconds < 6);
        EXPECT_CONTAINS(team.reports[rank].message, "rank 1 did not arrive within 4 s; rank ");
        EXPECT_CONTAINS(team.reports[rank].message, ": look at rank 1's machine, or raise --comm-timeout");
    }
    team_free(&team);
}
static void a_collective_that_stalls_with_all_ranks_there_is_told_as_that(void) {
    struct team team;
    team_start(&team, 3, 1024, 30, stalled_work, "all");
    team_wait(&team);
    for (int rank = 0; rank < 3; rank++) {
        EXPECT(team.reports[rank].status == STATUS_PEER_LOST);
        EXPECT_CONTAINS(team.reports[rank].message, "all ranks came to a collective that did not end");
    }
    team_free(&team);
}

static enum status first_rank_sleeps_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    c->tell_progress(c, c->rank == 0 ? 9 : 10);
    CHECK(c->barrier(c));
    while (c->rank == 0) {
        pause();
    }
    return c->report_stall(c, 4);
}
static void of_a_stalled_collective_the_first_rank_is_told_late_though_it_is_silent(void) {
    struct team team;
    team_start(&team, 3, 1024, 30, first_rank_sleeps_work, NULL);
    for (int rank = 1; rank < 3; rank++) {
        EXPECT(waitpid(team.process[rank], NULL, 0) == team.process[rank]);
    }
    kill(team.process[0], SIGKILL);
    EXPECT(waitpid(team.process[0], NULL, 0) == team.process[0]);
    for (int rank = 1; rank < 3; rank++) {
        EXPECT(team.reports[rank].status == STATUS_PEER_LOST && team.reports[rank].seconds < 8);
        EXPECT_CONTAINS(team.reports[rank].message, "rank 0 did not arrive within 4 s; rank ");
    }
    team_free(&team);
}

/* A watchdog's look every millisecond while the rank is in collectives. */
struct watchdog {
    struct comm *c;
    atomic_bool stop;
    enum status status; /* of the last look */
};
static void *watch(void *context) {
    struct watchdog *w = context;
    for (uint64_t i = 0; !atomic_load(&w->stop) && w->status == STATUS_OK; i++) {
        w->c->tell_progress(w->c, i);
        w->status = w->c->check_peers(w->c);
        usleep(1000);
    }
    return NULL;
}
static enum status peers_work(struct comm *c, struct report *report, const void *context) {
    (void)context;
    struct watchdog w = {.c = c};
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, watch, &w) == 0);
    for (int i = 0; i < 200; i++) {
        double values[2000];
        for (int k = 0; k < 2000; k++) {
            values[k] = c->rank + k;
        }
        CHECK(c->host_all_reduce(c, values, 2000, COMM_SUM));
        EXPECT(values[0] == 3 && values[1999] == 3 + 3 * 1999);
    }
    atomic_store(&w.stop, true);
    pthread_join(thread, NULL);
    EXPECT(w.status == STATUS_OK);
    report->rounds = 1;
    for (;;) {
        CHECK(c->check_peers(c));
        usleep(10000);
    }
}
static void looking_after_the_peers_disturbs_no_collective_and_notices_a_death(void) {
    struct team team;
    team_start(&team, 3, 1024, 30, peers_work, NULL);
    wait_until_at_work(&team);
    kill(team.process[2], SIGKILL);
    double start = time_seconds();
    team_wait(&team);
    EXPECT(time_seconds() - start < 5);
    for (int rank = 0; rank < 2; rank++) {
        EXPECT(team.reports[rank].status == STATUS_PEER_LOST);
        EXPECT_CONTAINS(team.reports[rank].message, "rank 2 died; rank ");
    }
    team_free(&team);
}

static enum status agreement_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    EXPECT(comm_agree(c, STATUS_OK) == STATUS_OK);
    return comm_agree(c, c->rank == 2 ? fail_as(STATUS_OUT_OF_MEMORY, "rank 2 is full") : STATUS_OK);
}
static void all_ranks_agree_on_the_failure_of_one(void) {
    struct team team;
    team_start(&team, 3, 1024, 30, agreement_work, NULL);
    team_wait(&team);
    for (int rank = 0; rank < 3; rank++) {
        EXPECT(team.reports[rank].status == STATUS_OUT_OF_MEMORY);
        EXPECT_STRING(team.reports[rank].message, "rank 2 is full");
    }
    team_free(&team);
}

/* ---- processor time ---- */

static enum status barriers_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    for (int i = 0; i < 1000; i++) {
        CHECK(c->barrier(c));
    }
    return STATUS_OK;
}
static double seconds_of(struct timeval time) {
    return (double)time.tv_sec + 1e-6 * (double)time.tv_usec;
}
static void a_thousand_barriers_of_four_ranks_take_no_seconds_of_any_core(void) {
    struct rusage before, after;
    getrusage(RUSAGE_CHILDREN, &before);
    run_team(4, 1024, barriers_work, NULL);
    getrusage(RUSAGE_CHILDREN, &after);
    EXPECT(seconds_of(after.ru_utime) + seconds_of(after.ru_stime) - seconds_of(before.ru_utime) -
               seconds_of(before.ru_stime) <
           2);
}

static enum status idle_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    if (c->rank == 0) {
        usleep(500000);
    }
    clock_t start = clock();
    CHECK(c->barrier(c));
    EXPECT((double)(clock() - start) / CLOCKS_PER_SEC < 0.1);
    return STATUS_OK;
}
static void a_waiting_rank_leaves_the_core_to_others(void) {
    run_team(4, 1024, idle_work, NULL);
}

static void run_all(void) {
    RUN(all_reduce_gives_the_sum_at_odd_counts_in_any_pieces);
    RUN(all_reduce_gives_maxima_and_minima_and_keeps_nan);
    RUN(reduce_scatter_leaves_every_rank_its_part_of_the_sum);
    RUN(all_gather_gives_every_rank_all_parts);
    RUN(broadcast_gives_every_rank_the_roots_values);
    RUN(host_collectives_agree_on_every_rank);
    RUN(large_data_goes_in_pieces);
    RUN(sums_of_bf16_are_right);
    RUN(all_reduce_and_reduce_scatter_add_in_rank_order_and_give_the_same_bits);
    RUN(a_single_rank_keeps_its_data);
    RUN(what_it_cannot_do_is_refused_in_words);
    RUN(killing_any_rank_at_any_moment_ends_the_others_and_names_it);
    RUN(a_stopped_rank_is_late_after_the_timeout_and_learns_it_later);
    RUN(a_slow_rank_is_waited_for);
    RUN(a_pause_of_all_ranks_is_nobodys_delay);
    RUN(a_rank_that_aborts_ends_the_others_at_once);
    RUN(a_rank_that_leaves_before_the_others_is_not_waited_for);
    RUN(a_rank_that_leaves_when_all_is_done_is_no_loss);
    RUN(of_a_stalled_collective_the_rank_that_started_fewest_is_told_late);
    RUN(of_a_stalled_collective_the_first_rank_is_told_late_though_it_is_silent);
    RUN(a_collective_that_stalls_with_all_ranks_there_is_told_as_that);
    RUN(looking_after_the_peers_disturbs_no_collective_and_notices_a_death);
    RUN(all_ranks_agree_on_the_failure_of_one);
    RUN(a_thousand_barriers_of_four_ranks_take_no_seconds_of_any_core);
    RUN(a_waiting_rank_leaves_the_core_to_others);
}

#ifdef NCCL_ON_CPU

/* ---- beside the compute stream ---- */

/* A kernel that does not end before the host says so, and then writes. */
struct slow_kernel {
    atomic_bool may_end;
    float *out;
    float value;
};
static void run_slow_kernel(void *argument) {
    struct slow_kernel *k = argument;
    while (!atomic_load(&k->may_end)) {
        usleep(1000);
    }
    *k->out = k->value;
}
struct copy_kernel {
    const float *from;
    float to;
};
static void run_copy_kernel(void *argument) {
    struct copy_kernel *k = argument;
    k->to = *k->from;
}

/* What a step does with two buckets: the host is through with all of it before the first kernel ends. */
static enum status streams_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    enum { BUCKETS = 2, ROUNDS = 3 };
    EXPECT(c->running_ms(c) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        float data[BUCKETS];
        struct slow_kernel kernel[BUCKETS];
        struct copy_kernel copy[BUCKETS];
        for (int i = 0; i < BUCKETS; i++) {
            data[i] = -1;
            kernel[i].out = &data[i];
            kernel[i].value = (float)(10 * round + i + c->rank);
            atomic_init(&kernel[i].may_end, false);
            cpu_gpu_run(gpu, run_slow_kernel, &kernel[i]);
            CHECK(c->all_reduce(c, (struct tensor){&data[i], DTYPE_F32}, 1, COMM_SUM, i));
        }
        for (int i = 0; i < BUCKETS; i++) {
            CHECK(complete(c, i)); /* for the compute stream */
            copy[i].from = &data[i];
            cpu_gpu_run(gpu, run_copy_kernel, &copy[i]);
        }
        for (int i = 0; i < BUCKETS; i++) {
            EXPECT(data[i] == -1);
        }
        for (int i = 0; i < BUCKETS; i++) {
            atomic_store(&kernel[i].may_end, true);
        }
        cpu_gpu_synchronize(gpu);
        for (int i = 0; i < BUCKETS; i++) {
            EXPECT(copy[i].to == (float)(c->ranks * (10 * round + i) + c->ranks * (c->ranks - 1) / 2));
        }
        double running_ms = c->running_ms(c);
        EXPECT(running_ms > 0 && running_ms < 30e3);
    }
    EXPECT(c->running_ms(c) == 0);
    return c->barrier(c);
}
static void collectives_run_beside_the_compute_stream_and_the_host_waits_for_neither(void) {
    gpu_in_background = true;
    run_team(3, 1024, streams_work, NULL);
    gpu_in_background = false;
}

static void sleep_two_seconds(void *argument) {
    (void)argument;
    usleep(2000000);
}

struct busy {
    int last_rank; /* up to it GPUs are busy for two seconds, with a timeout of one */
    double patience_seconds;
};

/* Then all come to a collective. */
static enum status busy_work(struct comm *c, struct report *report, const void *context) {
    (void)report;
    const struct busy *busy = context;
    float value = 1;
    c->be_patient(c, busy->patience_seconds);
    if (c->rank <= busy->last_rank) {
        cpu_gpu_run(gpu, sleep_two_seconds, NULL);
    }
    CHECK(c->all_reduce(c, (struct tensor){&value, DTYPE_F32}, 1, COMM_SUM, 0));
    CHECK(c->wait(c, 0));
    cpu_gpu_synchronize(gpu);
    CHECK(c->wait(c, 0));
    EXPECT(value == (float)c->ranks);
    return c->barrier(c);
}
static void a_gpus_own_work_is_nobodys_delay_and_that_of_others_is(void) {
    static const struct busy cases[] = {{1, 0}, {0, 0}, {0, 4}};
    gpu_in_background = true;
    for (int i = 0; i < 3; i++) {
        struct team team;
        team_start(&team, 2, 1024, 1, busy_work, &cases[i]);
        team_wait(&team);
        bool too_late = cases[i].last_rank == 0 && cases[i].patience_seconds == 0;
        for (int rank = 0; rank < 2; rank++) {
            if (too_late) {
                EXPECT(team.reports[rank].status == STATUS_PEER_LOST);
                EXPECT_CONTAINS(team.reports[rank].message, "rank 0 did not arrive within 1 s; rank ");
            } else {
                EXPECT(team.reports[rank].status == STATUS_OK);
                EXPECT_STRING(team.reports[rank].message, "");
            }
        }
        team_free(&team);
    }
    gpu_in_background = false;
}

static void meet_error(void *argument) {
    (void)argument;
    cpu_nccl_meets(CPU_NCCL_REMOTE_ERROR);
}

/* NCCL meets an error on rank 1, which waits for its GPU. */
static enum status error_work(struct comm *c, struct report *report, const void *context) {
    (void)report, (void)context;
    float value = 1;
    enum status status = STATUS_OK;
    if (c->rank == 1) {
        CHECK(c->all_reduce(c, (struct tensor){&value, DTYPE_F32}, 1, COMM_SUM, 0));
        cpu_gpu_run(gpu, meet_error, NULL);
        status = complete(c, 0);
    } else {
        status = c->barrier(c);
    }
    comm_abort(c); /* as the program does on any failure */
    return status;
}
static void an_error_that_nccl_meets_on_one_rank_ends_all(void) {
    struct team team;
    team_start(&team, 3, 1024, 30, error_work, NULL);
    team_wait(&team);
    for (int rank = 0; rank < 3; rank++) {
        EXPECT(team.reports[rank].status == STATUS_PEER_LOST && team.reports[rank].seconds < 5);
        EXPECT_CONTAINS(team.reports[rank].message,
            rank == 1 ? "remote process exited or there was a network error" : "rank 1 failed; rank ");
    }
    team_free(&team);
}

static enum status one_gpu_work(struct comm *host, struct report *report, const void *context) {
    (void)report, (void)context;
    struct comm_nccl_options options = {30, 0, false};
    struct comm *c;
    return comm_nccl_create(&c, host, cpu_gpu_create(host->rank % 2, false), &options);
}
static void two_ranks_on_one_gpu_are_refused(void) {
    struct team team;
    transport = SHARED_MEMORY; /* the host's communicator, which NCCL's is to stand beside */
    team_start(&team, 3, 1024, 30, one_gpu_work, NULL);
    transport = NCCL;
    team_wait(&team);
    for (int rank = 0; rank < 3; rank++) {
        EXPECT(team.reports[rank].status == STATUS_ERROR);
        EXPECT_CONTAINS(team.reports[rank].message, "ranks 0 and 2 are both on GPU 0000:00:00.0");
    }
    team_free(&team);
}

#endif

int main(void) {
#ifdef NCCL_ON_CPU
    printf("  over NCCL\n");
    transport = NCCL;
    run_all();
    RUN(collectives_run_beside_the_compute_stream_and_the_host_waits_for_neither);
    RUN(a_gpus_own_work_is_nobodys_delay_and_that_of_others_is);
    RUN(an_error_that_nccl_meets_on_one_rank_ends_all);
    RUN(two_ranks_on_one_gpu_are_refused);
#else
    printf("  over shared memory\n");
    run_all();
    printf("  over TCP\n");
    transport = TCP;
    run_all();
#endif
    return test_summary();
}
