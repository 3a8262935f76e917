/* Ranks that end well, end badly, are killed, stopped or interrupted: what the supervisor returns, what it
   says on stderr, and that nobody is left behind. Each run is a process of its own whose stderr the test
   reads. */
#include "llmc/launch.h"
#include "test.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_RANKS = 4 };

/* What ranks tell the test while they run; in shared memory. */
struct board {
    volatile pid_t supervisor, process[MAX_RANKS];
    volatile int started[MAX_RANKS];
    volatile int signal_seen[MAX_RANKS];
    volatile int fault; /* what the work function is to do */
    double timeout_seconds;
};

/* A run in the background, and what came of it. */
struct run {
    struct board *board;
    pid_t supervisor;
    bool on_terminal; /* its stderr is one, not a pipe */
    const struct launch_place
        *place; /* of the one rank, then supervised; NULL: ranks are forked side by side */
    int errors; /* read end of its stderr; at its end when the last of its processes is gone */
    char text[2048];
    int ending;
    double seconds; /* from run_start to the end of all its processes */
    double start;
};

static void run_start_with_timeout(
    struct run *run, int ranks, double grace_seconds, launch_main work, int fault, double timeout_seconds) {
    run->board = mmap(NULL, sizeof *run->board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    run->board->fault = fault;
    run->board->timeout_seconds = timeout_seconds;
    run->text[0] = '\0';
    run->start = time_seconds();
    int ends[2];
    if (run->on_terminal) {
        ends[0] = posix_openpt(O_RDWR | O_NOCTTY);
        EXPECT(ends[0] >= 0 && grantpt(ends[0]) == 0 && unlockpt(ends[0]) == 0);
        ends[1] = open(ptsname(ends[0]), O_RDWR | O_NOCTTY);
    } else {
        EXPECT(pipe(ends) == 0);
    }
    fflush(stdout);
    run->supervisor = fork();
    if (run->supervisor == 0) {
        setpgid(0, 0); /* a group of its own, as a shell makes it */
        close(ends[0]);
        dup2(ends[1], STDERR_FILENO);
        close(ends[1]);
        run->board->supervisor = getpid();
        _exit(run->place != NULL
                  ? launch_placed(run->place, true, timeout_seconds, grace_seconds, work, run->board)
                  : launch_local(ranks, false, 1 << 16, grace_seconds, work, run->board));
    }
    close(ends[1]);
    run->errors = ends[0];
}

static void run_start(struct run *run, int ranks, double grace_seconds, launch_main work, int fault) {
    run_start_with_timeout(run, ranks, grace_seconds, work, fault, 60);
}

static void run_wait(struct run *run) {
    size_t length = 0;
    ssize_t got;
    while ((got = read(run->errors, run->text + length, sizeof run->text - 1 - length)) > 0) {
        length += (size_t)got;
    }
    run->text[length] = '\0';
    EXPECT(waitpid(run->supervisor, &run->ending, 0) == run->supervisor);
    run->seconds = time_seconds() - run->start;
    close(run->errors);
    munmap(run->board, sizeof *run->board);
}

static void wait_for_ranks(const struct run *run, int ranks) {
    for (int rank = 0; rank < ranks; rank++) {
        while (!run->board->started[rank]) {
            usleep(1000);
        }
    }
}

static bool run_ended(const struct run *run) {
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)run->supervisor, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

/* As one who presses Ctrl-C again: a supervisor that heard of the first one late takes the second one for the same. */
static void interrupt_until_ended(const struct run *run, bool whole_group) {
    for (double end = time_seconds() + 30; !run_ended(run) && time_seconds() < end;) {
        kill(whole_group ? -run->supervisor : run->supervisor, SIGINT);
        usleep(100000);
    }
}

static int exit_code(const struct run *run) {
    return WIFEXITED(run->ending) ? WEXITSTATUS(run->ending) : -1;
}

/* ---- a rank's work ---- */

static void sign_in(const struct launch_rank *rank, struct board *board) {
    board->process[rank->rank] = getpid();
    board->started[rank->rank] = 1;
}

/* How a program ends a rank that failed; launch.h has the rule. */
static int end_with_error(const struct launch_rank *rank, enum status status) {
    if (launch_first_failure(rank)) {
        fprintf(stderr, "rank %d: %s\n", rank->rank, error_message());
    }
    return (int)status;
}

enum fault {
    FAULT_NONE,
    FAULT_RANK_2_FAILS,
    FAULT_ALL_FAIL,
    FAULT_RANK_1_EXITS, /* without a word, as a library might */
    FAULT_RANK_1_CRASHES,
    FAULT_RANK_1_NEVER_RETURNS /* and rank 0 exits */
};

/* Ranks meet in small steps until all have caught a signal; at the tenth the fault strikes. */
static int work(const struct launch_rank *rank, void *context) {
    struct board *board = context;
    struct comm *c;
    launch_catch_signals();
    enum status status = comm_shared_create(&c, rank->shared, rank->rank, board->timeout_seconds);
    sign_in(rank, board);
    double stop = 0;
    for (int step = 0; status == STATUS_OK && stop == 0; step++) {
        if (step == 10) {
            switch ((enum fault)board->fault) {
            case FAULT_NONE:
                break;
            case FAULT_RANK_2_FAILS:
                if (rank->rank == 2) {
                    return end_with_error(rank, fail("the disk is full"));
                }
                break;
            case FAULT_ALL_FAIL:
                return end_with_error(rank, fail("no such file"));
            case FAULT_RANK_1_EXITS:
                if (rank->rank == 1) {
                    _exit(7);
                }
                break;
            case FAULT_RANK_1_CRASHES:
                if (rank->rank == 1) {
                    abort();
                }
                break;
            case FAULT_RANK_1_NEVER_RETURNS:
                if (rank->rank == 0) {
                    return 9;
                }
                while (rank->rank == 1) {
                    pause();
                }
                break;
            }
        }
        usleep(200);
        stop = launch_signal_caught();
        status = c->host_all_reduce(c, &stop, 1, COMM_MIN); /* stops when all have seen the signal */
    }
    board->signal_seen[rank->rank] = launch_signal_caught();
    c->free(c);
    return status == STATUS_OK ? 0 : end_with_error(rank, status);
}

/* ---- a rank that the environment names ---- */

static struct launch_place place(int rank) {
    struct launch_place p = {.ranks = 4, .rank = rank, .local_rank = 1, .local_ranks = 2};
    return p;
}

static int is_placed(const struct launch_rank *rank, void *context) {
    bool supervised = *(bool *)context;
    bool sane = rank->rank == 3 && rank->ranks == 4 && rank->local_rank == 1 && rank->local_ranks == 2 &&
                (rank->shared != NULL) == supervised && launch_first_failure(rank);
    return sane ? 42 : 1;
}
static void a_rank_of_the_environment_runs_alone_under_its_own_number(void) {
    struct launch_place p = place(3);
    for (int supervised = 0; supervised < 2; supervised++) {
        bool context = supervised == 1;
        EXPECT(launch_placed(&p, context, 60, 1, is_placed, &context) == 42);
    }
}

static int die_in_step_12(const struct launch_rank *rank, void *context) {
    (void)context;
    launch_note_step(rank, 12);
    raise(SIGKILL);
    return 0;
}
static void a_supervised_rank_that_dies_is_named_by_its_own_number_and_step(void) {
    struct launch_place p = place(3);
    struct run run = {.place = &p};
    run_start(&run, 1, 1, die_in_step_12, FAULT_NONE);
    run_wait(&run);
    EXPECT(exit_code(&run) == 128 + SIGKILL);
    EXPECT_CONTAINS(run.text, "train_gpt: rank 3 was killed by signal 9 (Killed) in step 12, as");
}

static int work_in_step_12(const struct launch_rank *rank, void *context) {
    struct board *board = context;
    launch_note_step(rank, 12);
    board->process[0] = getpid();
    board->started[0] = 1;
    while (launch_signal_caught() == 0) {
        usleep(1000);
    }
    return 0;
}

static void a_supervised_rank_that_is_stopped_is_late_after_the_timeout(void) {
    struct launch_place p = place(3);
    struct run run = {.place = &p};
    run_start_with_timeout(&run, 1, 30, work_in_step_12, FAULT_NONE, 1);
    wait_for_ranks(&run, 1);
    double stopped = time_seconds();
    kill(run.board->process[0], SIGSTOP);
    run_wait(&run);
    EXPECT(exit_code(&run) == STATUS_PEER_LOST);
    EXPECT_STRING(run.text, "train_gpt: rank 3 did not arrive within 1 s in step 12; ended the run: look at "
                            "its machine, or raise "
                            "--comm-timeout\n");
    EXPECT(time_seconds() - stopped > 0.9 && time_seconds() - stopped < 8);
}

/* Of 2 s three times 1.2; then 2.5 s together with its supervisor, as under Ctrl-Z and fg. */
static void a_supervised_rank_that_is_continued_within_the_timeout_works_on(void) {
    struct launch_place p = place(3);
    struct run run = {.place = &p};
    run_start_with_timeout(&run, 1, 30, work_in_step_12, FAULT_NONE, 2);
    wait_for_ranks(&run, 1);
    for (int i = 0; i < 4; i++) {
        pid_t stopped = i < 3 ? run.board->process[0] : -run.supervisor;
        kill(stopped, SIGSTOP);
        usleep(i < 3 ? 1200000 : 2500000);
        kill(stopped, SIGCONT);
        usleep(50000);
    }
    EXPECT(!run_ended(&run));
    kill(run.supervisor, SIGTERM);
    run_wait(&run);
    EXPECT(exit_code(&run) == 0);
    EXPECT_STRING(run.text, "");
}

/* ---- what the environment says ---- */

static const char *const variables[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "FLASHGPT_PORT", "FLASHGPT_TOKEN", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_MCA_ess_base_jobid", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_STEP_NODELIST",
    "SLURM_NTASKS"};
enum { VARIABLES = sizeof variables / sizeof variables[0] };

/* Reads the environment that holds of our variables those in `settings`, "A=1 B=2", and no other. */
static enum status read_with(struct launch_place *p, const char *settings) {
    char copy[400];
    snprintf(copy, sizeof copy, "%s", settings);
    for (int i = 0; i < VARIABLES; i++) {
        unsetenv(variables[i]);
    }
    for (char *word = strtok(copy, " "); word != NULL; word = strtok(NULL, " ")) {
        char *equals = strchr(word, '=');
        *equals = '\0';
        setenv(word, equals + 1, 1);
    }
    enum status status = launch_read_environment(p);
    for (int i = 0; i < VARIABLES; i++) {
        unsetenv(variables[i]);
    }
    return status;
}

static void launchers_are_understood(void) {
    static const struct {
        const char *settings, *launcher, *address, *token;
        int rank, ranks, local_rank, local_ranks, port;
    } cases[] = {
        {"RANK=5 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=gpu7 MASTER_PORT=2000",
            "the environment", "gpu7", "", 5, 16, 1, 4, 2000},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1 FLASHGPT_TOKEN=secret FLASHGPT_PORT=77", "the environment",
            "::1", "secret", 1, 2, 1, 2, 77},
        /* torchrun's agent has MASTER_PORT itself */
        {"RANK=0 WORLD_SIZE=8 LOCAL_RANK=0 LOCAL_WORLD_SIZE=8 MASTER_ADDR=localhost MASTER_PORT=29500 "
         "TORCHELASTIC_RUN_ID=none",
            "torchrun", "localhost", "none", 0, 8, 0, 8, 29501},
        {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 "
         "OMPI_COMM_WORLD_LOCAL_SIZE=4",
            "mpirun", "127.0.0.1", "", 3, 4, 3, 4, 29500},
        {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
         "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=10.0.0.1 OMPI_MCA_ess_base_jobid=123",
            "mpirun", "10.0.0.1", "123", 3, 4, 1, 2, 29500},
        {"SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=8(x2) "
         "SLURM_JOB_ID=1234567 SLURM_STEP_NODELIST=gpu[07-08]",
            "Slurm", "gpu07", "1234567", 9, 16, 1, 8, 24567},
        {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1,1 "
         "SLURM_JOB_ID=7 SLURM_STEP_NODELIST=a1,b[2-3] MASTER_PORT=4444",
            "Slurm", "a1", "7", 0, 2, 0, 1, 4444},
        {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=7 "
         "SLURM_STEP_NODELIST=node[12,14]-ib",
            "Slurm", "node12", "7", 0, 2, 0, 1, 20007},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct launch_place p;
        EXPECT(read_with(&p, cases[i].settings) == STATUS_OK);
        EXPECT_STRING(p.launcher, cases[i].launcher);
        EXPECT_STRING(p.address, cases[i].address);
        EXPECT_STRING(p.token, cases[i].token);
        EXPECT(p.rank == cases[i].rank && p.ranks == cases[i].ranks && p.port == cases[i].port);
        EXPECT(p.local_rank == cases[i].local_rank && p.local_ranks == cases[i].local_ranks);
    }
}

static void without_a_launcher_or_alone_the_environment_says_nothing(void) {
    static const char *const settings[] = {"", "MASTER_ADDR=x MASTER_PORT=1", "RANK=0 WORLD_SIZE=1",
        "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=3" /* a batch script */};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        struct launch_place p;
        EXPECT(read_with(&p, settings[i]) == STATUS_OK && p.ranks == 0 && p.rank == 0);
    }
}

static void an_environment_that_makes_no_sense_is_refused_by_the_variables_name(void) {
    static const char *const cases[][2] = {
        {"RANK=1", "RANK without WORLD_SIZE"},
        {"WORLD_SIZE=8", "WORLD_SIZE without RANK"},
        {"RANK=8 WORLD_SIZE=8 MASTER_ADDR=x", "RANK=8: must be a whole number from 0 to 7"},
        {"RANK=one WORLD_SIZE=8", "RANK=one"},
        {"RANK=1 WORLD_SIZE=0", "WORLD_SIZE=0"},
        {"RANK=1 WORLD_SIZE=100000", "WORLD_SIZE=100000"},
        {"RANK=1 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2 MASTER_ADDR=x", "LOCAL_WORLD_SIZE=2"},
        {"RANK=1 WORLD_SIZE=8 MASTER_ADDR=x MASTER_PORT=70000", "MASTER_PORT=70000"},
        {"RANK=1 WORLD_SIZE=8", "set MASTER_ADDR"},
        {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
         "OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "mpirun started rank 3 of 4, but not where rank 0 is: set MASTER_ADDR"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct launch_place p;
        EXPECT(read_with(&p, cases[i][0]) == STATUS_ERROR);
        EXPECT_CONTAINS(error_message(), cases[i][1]);
    }
}

/* ---- good ends ---- */

static int count_ranks(const struct launch_rank *rank, void *context) {
    struct board *board = context;
    board->started[rank->rank]++;
    board->process[rank->rank] = getpid();
    bool sane = rank->ranks == 4 && rank->local_rank == rank->rank && rank->local_ranks == 4 &&
                rank->shared != NULL && getppid() == board->supervisor && launch_signal_caught() == 0;
    printf("a rank's output;"); /* stays in the buffer until the rank returns */
    return sane ? 0 : 1;
}
static void every_rank_runs_once_in_a_process_of_its_own(void) {
    struct board *board =
        mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    board->supervisor = getpid();
    FILE *file = tmpfile();
    int terminal = dup(STDOUT_FILENO);
    fflush(stdout);
    dup2(fileno(file), STDOUT_FILENO);
    printf("before;");
    int code = launch_local(4, true, 1 << 16, 1, count_ranks, board);
    fflush(stdout);
    dup2(terminal, STDOUT_FILENO);
    close(terminal);
    EXPECT(code == 0);
    for (int rank = 0; rank < 4; rank++) {
        EXPECT(board->started[rank] == 1 && board->process[rank] != getpid());
    }
    /* what stood in the buffer is written once, and what the ranks left in theirs is not lost */
    EXPECT(lseek(fileno(file), 0, SEEK_END) == (off_t)(strlen("before;") + 4 * strlen("a rank's output;")));
    fclose(file);
    munmap(board, sizeof *board);
}

static int same_process(const struct launch_rank *rank, void *context) {
    pid_t *process = context;
    bool sane = rank->rank == 0 && rank->ranks == 1 && rank->local_ranks == 1 && rank->shared == NULL &&
                launch_first_failure(rank);
    return sane && *process == getpid() ? 42 : 1;
}
static void one_rank_runs_in_this_process(void) {
    pid_t process = getpid();
    EXPECT(launch_local(1, false, 1 << 16, 1, same_process, &process) == 42);
}

static int kill_itself(const struct launch_rank *rank, void *context) {
    bool sane = rank->rank == 0 && rank->ranks == 1 && rank->local_ranks == 1 && rank->shared != NULL &&
                getppid() == *(pid_t *)context;
    if (sane) {
        abort();
    }
    return 1;
}
static void one_supervised_rank_runs_in_a_process_of_its_own_and_may_crash(void) {
    pid_t process = getpid();
    char text[128] = "";
    int ends[2], terminal = dup(STDERR_FILENO);
    EXPECT(pipe(ends) == 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    EXPECT(launch_local(1, true, 1 << 16, 1, kill_itself, &process) == 128 + SIGABRT);
    dup2(terminal, STDERR_FILENO);
    close(terminal);
    EXPECT(read(ends[0], text, sizeof text - 1) > 0);
    close(ends[0]);
    EXPECT_STRING(text, "train_gpt: rank 0 was killed by signal 6 (Aborted); ended the run\n");
}

static int return_at_once(const struct launch_rank *rank, void *context) {
    (void)rank, (void)context;
    return 0;
}
static void signal_handlers_and_mask_are_put_back(void) {
    enum { NUMBERS = 4 };
    static const int numbers[NUMBERS] = {SIGINT, SIGTERM, SIGHUP, SIGCHLD};
    struct sigaction before[NUMBERS], after[NUMBERS];
    sigset_t mask_before, mask_after;
    sigprocmask(SIG_SETMASK, NULL, &mask_before);
    for (int i = 0; i < NUMBERS; i++) {
        sigaction(numbers[i], NULL, &before[i]);
    }
    EXPECT(launch_local(2, true, 1 << 16, 1, return_at_once, NULL) == 0);
    sigprocmask(SIG_SETMASK, NULL, &mask_after);
    for (int i = 0; i < NUMBERS; i++) {
        sigaction(numbers[i], NULL, &after[i]);
        EXPECT(after[i].sa_handler == before[i].sa_handler);
        EXPECT(sigismember(&mask_after, numbers[i]) == sigismember(&mask_before, numbers[i]));
    }
}

/* ---- bad ends ---- */

static void a_rank_that_fails_tells_its_error_once_and_its_code_is_the_runs(void) {
    struct run run = {0};
    run_start(&run, 4, 30, work, FAULT_RANK_2_FAILS);
    run_wait(&run);
    EXPECT(exit_code(&run) == STATUS_ERROR);
    EXPECT_STRING(run.text, "rank 2: the disk is full\n");
    EXPECT(run.seconds < 5);
}

static void an_error_that_all_ranks_meet_is_told_once(void) {
    struct run run = {0};
    run_start(&run, 4, 30, work, FAULT_ALL_FAIL);
    run_wait(&run);
    EXPECT(exit_code(&run) == STATUS_ERROR);
    EXPECT_CONTAINS(run.text, ": no such file\n");
    EXPECT(strchr(run.text, '\n') == run.text + strlen(run.text) - 1);
}

static void a_rank_that_exits_without_a_word_is_named(void) {
    struct run run = {0};
    run_start(&run, 4, 30, work, FAULT_RANK_1_EXITS);
    run_wait(&run);
    EXPECT(exit_code(&run) == 7);
    EXPECT_STRING(run.text, "train_gpt: rank 1 ended with exit code 7; ended the run\n");
    EXPECT(run.seconds < 5);
}

static void a_rank_that_crashes_is_named_with_its_signal(void) {
    struct run run = {0};
    run_start(&run, 4, 30, work, FAULT_RANK_1_CRASHES);
    run_wait(&run);
    EXPECT(exit_code(&run) == 128 + SIGABRT);
    EXPECT_STRING(run.text, "train_gpt: rank 1 was killed by signal 6 (Aborted); ended the run\n");
    EXPECT(run.seconds < 5);
}

static void a_killed_rank_ends_the_run_in_no_time(void) {
    for (int victim = 0; victim < 4; victim++) {
        struct run run = {0};
        run_start(&run, 4, 30, work, FAULT_NONE);
        wait_for_ranks(&run, 4);
        double start = time_seconds();
        kill(run.board->process[victim], SIGKILL);
        run_wait(&run);
        EXPECT(time_seconds() - start < 5);
        EXPECT(exit_code(&run) == 128 + SIGKILL);
        char line[128];
        snprintf(line, sizeof line,
            "train_gpt: rank %d was killed by signal 9 (Killed), as the system does when memory runs out; "
            "ended the "
            "run\n",
            victim);
        EXPECT_STRING(run.text, line);
    }
}

static void a_rank_that_does_not_heed_the_notice_is_killed_after_the_grace(void) {
    struct run run = {0};
    run_start(&run, 2, 0.5, work, FAULT_RANK_1_NEVER_RETURNS);
    run_wait(&run);
    EXPECT(exit_code(&run) == 9);
    EXPECT_STRING(run.text, "train_gpt: rank 0 ended with exit code 9; ended the run\n");
    EXPECT(run.seconds > 0.45 && run.seconds < 5);
}

static void a_stopped_rank_ends_the_run_after_the_timeout(void) {
    struct run run = {0};
    run_start_with_timeout(&run, 4, 30, work, FAULT_NONE, 1);
    wait_for_ranks(&run, 4);
    kill(run.board->process[3], SIGSTOP);
    run_wait(&run);
    EXPECT(exit_code(&run) == STATUS_PEER_LOST);
    EXPECT_STRING(run.text,
        "train_gpt: rank 3 did not arrive within 1 s; ended the run: look at its machine, or raise "
        "--comm-timeout\n");
    EXPECT(run.seconds > 1 && run.seconds < 8);
}

static void ranks_die_with_their_supervisor(void) {
    struct run run = {0};
    run_start(&run, 4, 30, work, FAULT_NONE);
    wait_for_ranks(&run, 4);
    kill(run.supervisor, SIGKILL);
    double start = time_seconds();
    run_wait(&run); /* reads stderr until the last rank has gone */
    EXPECT(time_seconds() - start < 5);
    EXPECT(WIFSIGNALED(run.ending));
}

static void a_number_of_ranks_that_cannot_be_is_refused(void) {
    struct run run = {0};
    run_start(&run, -1, 5, work, FAULT_NONE);
    run_wait(&run);
    EXPECT(exit_code(&run) == STATUS_ERROR);
    EXPECT_STRING(run.text, "train_gpt: -1 ranks: must be 1 to 4096\n");
}

/* ---- stop signals ---- */

static void stop_with(int number, bool whole_group) {
    struct run run = {0};
    run_start(&run, 4, 30, work, FAULT_NONE);
    wait_for_ranks(&run, 4);
    struct board *board = run.board;
    kill(whole_group ? -run.supervisor : run.supervisor, number);
    while (board->signal_seen[0] == 0 || board->signal_seen[1] == 0 || board->signal_seen[2] == 0 ||
           board->signal_seen[3] == 0) {
        usleep(1000);
        if (time_seconds() - run.start > 30) {
            break;
        }
    }
    for (int rank = 0; rank < 4; rank++) {
        EXPECT(board->signal_seen[rank] == number);
    }
    run_wait(&run);
    EXPECT(exit_code(&run) == 0);
    EXPECT_STRING(run.text, "");
}
static void a_signal_to_the_supervisor_reaches_every_rank(void) {
    stop_with(SIGTERM, false);
    stop_with(SIGINT, false);
    stop_with(SIGHUP, false);
}
static void ctrl_c_at_a_terminal_counts_once_though_it_reaches_the_whole_group(void) {
    stop_with(SIGINT, true);
}
static void a_terminal_that_hangs_up_stops_the_run(void) {
    stop_with(SIGHUP, true);
}

static void a_rank_that_is_stopped_is_continued_to_heed_the_signal(void) {
    struct run run = {0};
    run_start(&run, 4, 30, work, FAULT_NONE);
    wait_for_ranks(&run, 4);
    kill(run.board->process[1], SIGSTOP);
    kill(run.board->process[2], SIGSTOP);
    usleep(100000);
    kill(run.supervisor, SIGTERM);
    run_wait(&run);
    EXPECT(exit_code(&run) == 0);
    EXPECT_STRING(run.text, "");
    EXPECT(run.seconds < 10);
}

static void under_nohup_a_hangup_is_ignored(void) {
    struct sigaction before, ignore = {.sa_handler = SIG_IGN};
    struct run run = {0};
    sigaction(SIGHUP, &ignore, &before);
    run_start(&run, 4, 30, work, FAULT_NONE);
    sigaction(SIGHUP, &before, NULL);
    wait_for_ranks(&run, 4);
    struct board *board = run.board;
    kill(-run.supervisor, SIGHUP);
    usleep(100000);
    EXPECT(board->signal_seen[0] == 0 && !run_ended(&run));
    kill(run.supervisor, SIGTERM);
    run_wait(&run);
    EXPECT(exit_code(&run) == 0);
    EXPECT_STRING(run.text, "");
}

/* The first rank asks for the stop while the others may still have to be forked; all listen late. */
static int stop_at_birth(const struct launch_rank *rank, void *context) {
    (void)context;
    if (rank->rank == 0) {
        kill(getppid(), SIGTERM);
    }
    usleep(50000);
    launch_catch_signals();
    for (int waits = 0; launch_signal_caught() == 0 && waits < 5000; waits++) {
        usleep(1000);
    }
    return launch_signal_caught() == SIGTERM ? 0 : 1;
}
static void a_signal_before_the_ranks_listen_is_not_lost_and_kills_none(void) {
    struct run run = {0};
    run_start(&run, 4, 30, stop_at_birth, FAULT_NONE);
    run_wait(&run);
    EXPECT(exit_code(&run) == 0);
    EXPECT_STRING(run.text, "");
}

static int stubborn(const struct launch_rank *rank, void *context) {
    struct board *board = context;
    launch_catch_signals();
    sign_in(rank, board);
    while (board->fault == FAULT_NONE) {
        pause();
    }
    return 0;
}
static void a_second_interrupt_ends_the_run_at_once(void) {
    struct run run = {0};
    run_start(&run, 2, 5, stubborn, FAULT_NONE);
    wait_for_ranks(&run, 2);
    kill(-run.supervisor, SIGINT);
    usleep(10000);
    kill(-run.supervisor, SIGINT); /* follows at once: the same wish */
    usleep(400000);
    EXPECT(!run_ended(&run));
    interrupt_until_ended(&run, true);
    run_wait(&run);
    EXPECT(exit_code(&run) == 128 + SIGINT);
    EXPECT_STRING(run.text, "train_gpt: ended the run at once after a second interrupt\n");
}

static void on_a_terminal_an_interrupt_is_answered_once(void) {
    for (int ranks = 1; ranks <= 2; ranks++) {
        struct run run = {.on_terminal = true};
        run_start(&run, ranks, 5, stubborn, FAULT_NONE);
        wait_for_ranks(&run, ranks);
        kill(-run.supervisor, SIGINT);
        struct pollfd answer = {run.errors, POLLIN, 0};
        EXPECT(poll(&answer, 1, 30000) == 1);
        usleep(300000); /* for a second answer, were there one */
        kill(-run.supervisor, SIGKILL);
        run_wait(&run);
        EXPECT_STRING(run.text, "\r\ntrain_gpt: interrupted: the run saves this step and stops; another "
                                "Ctrl-C ends it at once\r\n");
    }
}

static void a_second_interrupt_ends_a_lone_process_too(void) {
    struct run run = {0};
    run_start(&run, 1, 5, stubborn, FAULT_NONE);
    wait_for_ranks(&run, 1);
    kill(run.supervisor, SIGTERM);
    kill(run.supervisor, SIGTERM);
    usleep(400000);
    EXPECT(!run_ended(&run));
    interrupt_until_ended(&run, false);
    run_wait(&run);
    EXPECT(WIFSIGNALED(run.ending) && WTERMSIG(run.ending) == SIGINT);
}

int main(void) {
    signal(SIGHUP, SIG_DFL); /* also where the tests themselves run under nohup */
    RUN(a_rank_of_the_environment_runs_alone_under_its_own_number);
    RUN(a_supervised_rank_that_dies_is_named_by_its_own_number_and_step);
    RUN(a_supervised_rank_that_is_stopped_is_late_after_the_timeout);
    RUN(a_supervised_rank_that_is_continued_within_the_timeout_works_on);
    RUN(launchers_are_understood);
    RUN(without_a_launcher_or_alone_the_environment_says_nothing);
    RUN(an_environment_that_makes_no_sense_is_refused_by_the_variables_name);
    RUN(every_rank_runs_once_in_a_process_of_its_own);
    RUN(one_rank_runs_in_this_process);
    RUN(one_supervised_rank_runs_in_a_process_of_its_own_and_may_crash);
    RUN(signal_handlers_and_mask_are_put_back);
    RUN(a_rank_that_fails_tells_its_error_once_and_its_code_is_the_runs);
    RUN(an_error_that_all_ranks_meet_is_told_once);
    RUN(a_rank_that_exits_without_a_word_is_named);
    RUN(a_rank_that_crashes_is_named_with_its_signal);
    RUN(a_killed_rank_ends_the_run_in_no_time);
    RUN(a_rank_that_does_not_heed_the_notice_is_killed_after_the_grace);
    RUN(a_stopped_rank_ends_the_run_after_the_timeout);
    RUN(ranks_die_with_their_supervisor);
    RUN(a_number_of_ranks_that_cannot_be_is_refused);
    RUN(a_signal_to_the_supervisor_reaches_every_rank);
    RUN(ctrl_c_at_a_terminal_counts_once_though_it_reaches_the_whole_group);
    RUN(a_terminal_that_hangs_up_stops_the_run);
    RUN(a_rank_that_is_stopped_is_continued_to_heed_the_signal);
    RUN(under_nohup_a_hangup_is_ignored);
    RUN(a_signal_before_the_ranks_listen_is_not_lost_and_kills_none);
    RUN(a_second_interrupt_ends_the_run_at_once);
    RUN(on_a_terminal_an_interrupt_is_answered_once);
    RUN(a_second_interrupt_ends_a_lone_process_too);
    return test_summary();
}
