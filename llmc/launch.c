/* Starting ranks on this machine, watching over them, and the signals that stop a run.

   The supervisor forks the ranks, then only waits: for a rank's end (SIGCHLD), for a stop signal, for the
   end of the grace that ranks have once one has failed. Ranks forked side by side tell it who is late; the one
   rank of a place has its peers elsewhere, so of that one it sees for itself whether it stands still. Its
   signals are blocked except while it sleeps in pselect, so that none is missed between looking and sleeping.
   Ranks are forked with the handlers of the stop signals in place: however early one comes, it is caught. */
#include "launch.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

/* ---- signals ---- */

/* Who ends the run at a second SIGINT: a process on its own does so itself, the supervisor kills the ranks,
   and a rank leaves it to the supervisor because a terminal's Ctrl-C reaches it both directly and
   forwarded. */
enum role { ROLE_ALONE, ROLE_SUPERVISOR, ROLE_RANK };

enum { SAME_WISH_MS = 200, STOP_SIGNALS = 3 };
static const int stop_signals[STOP_SIGNALS] = {SIGHUP, SIGINT, SIGTERM};

/* Handlers have no other way to say something than static variables. */
static volatile sig_atomic_t role = ROLE_ALONE;
static volatile sig_atomic_t first_signal;
static volatile sig_atomic_t end_at_once;
static _Atomic int64_t first_signal_ms;
static volatile sig_atomic_t errors_are_read; /* stderr is a terminal */

/* A step may take a while, and who presses Ctrl-C waits for an answer. */
static void answer_interrupt(void) {
    static const char text[] =
        "\ntrain_gpt: interrupted: the run saves this step and stops; another Ctrl-C ends it at once\n";
    int before = errno;
    if (errors_are_read && role != ROLE_RANK && write(STDERR_FILENO, text, sizeof text - 1) < 0) {
        errno = before; /* nobody reads it any more */
    }
}

static void catch_stop_signal(int number) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
    if (first_signal == 0) {
        first_signal = number;
        first_signal_ms = now_ms;
        if (number == SIGINT) {
            answer_interrupt();
        }
    } else if (number == SIGINT && now_ms - first_signal_ms >= SAME_WISH_MS) {
        end_at_once = 1;
        if (role == ROLE_ALONE) {
            /* comes through when this handler returns */
            signal(SIGINT, SIG_DFL);
            raise(SIGINT);
        }
    }
}

/* Its arrival is what interrupts pselect; waitpid tells the rest. */
static void notice_child(int number) {
    (void)number;
}

static void stop_signal_set(sigset_t *set) {
    sigemptyset(set);
    for (int i = 0; i < STOP_SIGNALS; i++) {
        sigaddset(set, stop_signals[i]);
    }
}

/* nohup's word that the run is to outlive its terminal */
static bool hangup_is_ignored(void) {
    struct sigaction now;
    return sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler == SIG_IGN;
}

void launch_catch_signals(void) {
    /* Reads and writes go on after a signal instead of failing with EINTR. */
    struct sigaction action = {.sa_handler = catch_stop_signal, .sa_flags = SA_RESTART};
    errors_are_read = isatty(STDERR_FILENO);
    stop_signal_set(&action.sa_mask);
    for (int i = 0; i < STOP_SIGNALS; i++) {
        if (stop_signals[i] != SIGHUP || !hangup_is_ignored()) {
            sigaction(stop_signals[i], &action, NULL);
        }
    }
}

int launch_signal_caught(void) {
    return first_signal;
}

bool launch_first_failure(const struct launch_rank *rank) {
    if (rank->shared == NULL) {
        return true;
    }
    struct comm_loss failed = {COMM_LOSS_FAILED, rank->seat, 0};
    comm_shared_memory_mark_lost(rank->shared, failed);
    struct comm_loss first = comm_shared_memory_loss(rank->shared);
    return first.kind == COMM_LOSS_FAILED && first.rank == rank->seat;
}

void launch_note_step(const struct launch_rank *rank, int64_t step) {
    if (rank->shared != NULL) {
        comm_shared_memory_set_step(rank->shared, rank->seat, step);
    }
}

void launch_print_error(const char *format, ...) {
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "train_gpt: %s\n", line); /* one call: lines of several ranks do not mix */
}

/* ---- the supervisor ---- */

/* What launch_local changes in the process and puts back. */
struct signal_state {
    sigset_t mask;
    struct sigaction child, stop[STOP_SIGNALS];
};

static void signals_supervise(struct signal_state *before) {
    sigset_t blocked;
    stop_signal_set(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, &before->mask);
    for (int i = 0; i < STOP_SIGNALS; i++) {
        sigaction(stop_signals[i], NULL, &before->stop[i]);
    }
    first_signal = 0;
    end_at_once = 0;
    launch_catch_signals();
    role = ROLE_SUPERVISOR;
    struct sigaction child = {.sa_handler = notice_child};
    sigemptyset(&child.sa_mask);
    sigaction(SIGCHLD, &child, &before->child);
}

/* In a rank just forked, where stop signals are still blocked: they stay caught. */
static void signals_of_rank(const struct signal_state *before) {
    role = ROLE_RANK;
    sigaction(SIGCHLD, &before->child, NULL);
    sigprocmask(SIG_SETMASK, &before->mask, NULL);
}

static void signals_restore(const struct signal_state *before) {
    role = ROLE_ALONE;
    sigaction(SIGCHLD, &before->child, NULL);
    for (int i = 0; i < STOP_SIGNALS; i++) {
        sigaction(stop_signals[i], &before->stop[i], NULL);
    }
    sigprocmask(SIG_SETMASK, &before->mask, NULL);
}

struct supervisor {
    struct comm_shared_memory *memory;
    struct signal_state signals_before;
    double grace_seconds;
    int ranks, running;               /* of those forked here; they have seats 0, 1, ... */
    const struct launch_place *place; /* of the one rank that is not known by its seat; else NULL */
    pid_t *process;                   /* 0: not running */
    int *ending;                      /* waitpid's status */
    bool failed;
    double kill_time; /* when the ranks that still run are killed; INFINITY: no such plan */
    /* of the place's rank, which a signal may stop: */
    double timeout_seconds; /* after so long it is late, as it is for its peers */
    bool stopped;
    double stopped_seconds, last_look;
};

static void signal_ranks(const struct supervisor *s, int number) {
    for (int rank = 0; rank < s->ranks; rank++) {
        if (s->process[rank] != 0) {
            kill(s->process[rank], number);
        }
    }
}

static struct launch_rank placed_rank(const struct launch_place *p, struct comm_shared_memory *shared) {
    struct launch_rank rank = {p->rank, p->ranks, p->local_rank, p->local_ranks, shared, 0};
    return rank;
}

_Noreturn static void become_rank(
    const struct supervisor *s, int seat, pid_t supervisor, launch_main main_function, void *context) {
    signals_of_rank(&s->signals_before);
#ifdef __linux__
    /* Elsewhere a rank notices its supervisor's death in its next collective. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    if (getppid() != supervisor) {
        _exit(STATUS_PEER_LOST); /* it died before prctl */
    }
    struct launch_rank self = {seat, s->ranks, seat, s->ranks, s->memory, seat};
    if (s->place != NULL) {
        self = placed_rank(s->place, s->memory);
    }
    int code = main_function(&self, context);
    fflush(NULL);
    _exit(code); /* what the parent registered with atexit is not the rank's to run */
}

static enum status start_ranks(struct supervisor *s, launch_main main_function, void *context) {
    pid_t supervisor = getpid();
    fflush(NULL); /* else every rank would write what stands in the buffers */
    for (int rank = 0; rank < s->ranks; rank++) {
        pid_t process = fork();
        if (process < 0) {
            return fail("cannot start rank %d of %d: %s", rank, s->ranks, strerror(errno));
        }
        if (process == 0) {
            become_rank(s, rank, supervisor, main_function, context);
        }
        s->process[rank] = process;
        s->running++;
    }
    return STATUS_OK;
}

/* The one line about a rank that could not tell its end itself. */
static void report_loss(const struct supervisor *s, struct comm_loss loss, int ending) {
    int rank = s->place != NULL ? s->place->rank : loss.rank;
    int64_t at = comm_shared_memory_step(s->memory, loss.rank);
    char step[40] = "";
    if (at > 0) {
        snprintf(step, sizeof step, " in step %lld", (long long)at);
    }
    switch (loss.kind) {
    case COMM_LOSS_LATE:
        launch_print_error(
            "rank %d did not arrive within %g s%s; ended the run: look at its machine, or raise "
            "--comm-timeout",
            rank, loss.seconds, step);
        break;
    case COMM_LOSS_STUCK:
        launch_print_error("all ranks came to a collective that did not end within %g s%s: the connection "
                           "between GPUs is at fault, NCCL_DEBUG=INFO says more; ended the run",
            loss.seconds, step);
        break;
    case COMM_LOSS_DIED:
        if (WIFSIGNALED(ending)) {
            launch_print_error("rank %d was killed by signal %d (%s)%s%s; ended the run", rank,
                WTERMSIG(ending), strsignal(WTERMSIG(ending)), step,
                WTERMSIG(ending) == SIGKILL ? ", as the system does when memory runs out" : "");
        } else {
            launch_print_error(
                "rank %d ended with exit code %d%s; ended the run", rank, WEXITSTATUS(ending), step);
        }
        break;
    default:
        break; /* told by the rank */
    }
}

/* The run has failed: says so, and starts the grace of the ranks that still run. One that hangs needs none. */
static void begin_end(struct supervisor *s, int rank, int ending) {
    struct comm_loss died = {COMM_LOSS_DIED, rank, 0};
    comm_shared_memory_mark_lost(s->memory, died);
    struct comm_loss loss = comm_shared_memory_loss(s->memory);
    report_loss(s, loss, ending);
    if (loss.kind == COMM_LOSS_LATE && s->process[loss.rank] != 0) {
        kill(s->process[loss.rank], SIGKILL);
    }
    s->failed = true;
    s->kill_time = time_seconds() + s->grace_seconds;
}

static void note_stop(struct supervisor *s, bool stopped) {
    s->stopped = stopped;
    s->stopped_seconds = 0;
    s->last_look = time_seconds();
}

static bool has_ended(struct supervisor *s, int rank, int *ending) {
    int of_interest = s->place != NULL ? WNOHANG | WUNTRACED | WCONTINUED : WNOHANG;
    while (s->process[rank] != 0 && waitpid(s->process[rank], ending, of_interest) == s->process[rank]) {
        if (WIFEXITED(*ending) || WIFSIGNALED(*ending)) {
            return true;
        }
        note_stop(s, WIFSTOPPED(*ending));
    }
    return false;
}

static void reap_ranks(struct supervisor *s) {
    for (int rank = 0; rank < s->ranks; rank++) {
        int ending;
        if (!has_ended(s, rank, &ending)) {
            continue;
        }
        s->process[rank] = 0;
        s->ending[rank] = ending;
        s->running--;
        if (ending != 0 && !s->failed) {
            begin_end(s, rank, ending);
        }
    }
}

/* Time in which this process was stopped, too, as under Ctrl-Z, does not count. */
static void judge_stopped_rank(struct supervisor *s) {
    if (!s->stopped || s->failed) {
        return;
    }
    s->stopped_seconds += comm_seconds_waited(&s->last_look);
    if (s->stopped_seconds >= s->timeout_seconds) {
        struct comm_loss late = {COMM_LOSS_LATE, 0, s->timeout_seconds};
        comm_shared_memory_mark_lost(s->memory, late);
        begin_end(s, 0, 0);
    }
}

static void sleep_until_signal(const struct supervisor *s) {
    static const double LOOK_SECONDS = 0.1; /* at a rank that stands still */
    double wake_time = s->stopped ? fmin(s->kill_time, time_seconds() + LOOK_SECONDS) : s->kill_time;
    sigset_t open = s->signals_before.mask;
    for (int i = 0; i < STOP_SIGNALS; i++) {
        sigdelset(&open, stop_signals[i]);
    }
    sigdelset(&open, SIGCHLD);
    if (isinf(wake_time)) {
        pselect(0, NULL, NULL, NULL, NULL, &open);
        return;
    }
    double seconds = fmax(wake_time - time_seconds(), 0);
    struct timespec left = {(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)};
    pselect(0, NULL, NULL, NULL, &left, &open);
}

static void supervise(struct supervisor *s) {
    bool forwarded = false, interrupted = false;
    for (reap_ranks(s); s->running > 0; reap_ranks(s)) {
        if (first_signal != 0 && !forwarded) {
            signal_ranks(s, first_signal);
            signal_ranks(s, SIGCONT); /* one that is stopped could not heed it */
            forwarded = true;
        }
        if (end_at_once && !interrupted) {
            launch_print_error("ended the run at once after a second interrupt");
            interrupted = true;
            s->failed = true;
            s->kill_time = 0;
        }
        judge_stopped_rank(s);
        if (time_seconds() >= s->kill_time) {
            signal_ranks(s, SIGKILL);
            s->kill_time = INFINITY;
        }
        sleep_until_signal(s);
    }
}

static int exit_code(const struct supervisor *s) {
    if (end_at_once) {
        return 128 + SIGINT;
    }
    struct comm_loss loss = comm_shared_memory_loss(s->memory);
    int ending = s->ending[loss.rank];
    switch (loss.kind) {
    case COMM_LOSS_NONE:
        return 0;
    case COMM_LOSS_LATE:
    case COMM_LOSS_STUCK:
        return STATUS_PEER_LOST;
    default:
        if (WIFSIGNALED(ending)) {
            return 128 + WTERMSIG(ending);
        }
        return WEXITSTATUS(ending) != 0 ? WEXITSTATUS(ending) : STATUS_ERROR;
    }
}

static enum status run_ranks(
    struct supervisor *s, size_t window_bytes, launch_main main_function, void *context) {
    CHECK(comm_shared_memory_create(&s->memory, s->ranks, window_bytes));
    CHECK(ALLOCATE(s->process, s->ranks));
    CHECK(ALLOCATE(s->ending, s->ranks));
    signals_supervise(&s->signals_before);
    enum status status = start_ranks(s, main_function, context);
    if (status != STATUS_OK) {
        s->failed = true; /* those already started are not at fault: no line about them */
        s->kill_time = 0;
    }
    supervise(s);
    signals_restore(&s->signals_before);
    return status;
}

static int run_supervised(
    struct supervisor *s, size_t window_bytes, launch_main main_function, void *context) {
    int code;
    s->kill_time = INFINITY;
    if (run_ranks(s, window_bytes, main_function, context) == STATUS_OK) {
        code = exit_code(s);
    } else {
        launch_print_error("%s", error_message());
        code = STATUS_ERROR;
    }
    free(s->ending);
    free(s->process);
    comm_shared_memory_free(s->memory);
    return code;
}

int launch_local(int ranks, bool supervised, size_t window_bytes, double grace_seconds,
    launch_main main_function, void *context) {
    if (ranks == 1 && !supervised) {
        struct launch_rank self = {0, 1, 0, 1, NULL, 0};
        return main_function(&self, context);
    }
    struct supervisor s = {.grace_seconds = grace_seconds, .ranks = ranks};
    return run_supervised(&s, window_bytes, main_function, context);
}

int launch_placed(const struct launch_place *place, bool supervised, double timeout_seconds,
    double grace_seconds, launch_main main_function, void *context) {
    if (!supervised) {
        struct launch_rank self = placed_rank(place, NULL);
        return main_function(&self, context);
    }
    struct supervisor s = {
        .grace_seconds = grace_seconds, .ranks = 1, .place = place, .timeout_seconds = timeout_seconds};
    return run_supervised(&s, 0, main_function, context);
}
